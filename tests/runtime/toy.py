"""A small model that carries its stream as a pair, a block and a lock over all of it, and what they should put out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.runtime import schedules as sch
from tests.runtime.schedules import Ask, holds
from tests.runtime.toy_program import (
    ARMS,
    BEND,
    BY_PYTHON,
    CALLS,
    CUT,
    EDITS,
    FEEL,
    LAYERS,
    METRICS,
    ORDER,
    PYTHON,
    READS,
    SAE,
    SITES,
    UNEMBEDDING,
    VECTORS,
    WIDTH,
)
from tests.saes import activations, reconstruction, save_sae
from vtaps.runtime.manifest import Manifest
from vtaps.runtime.memory import Limits
from vtaps.runtime.session import Session

Array = np.ndarray[Any, Any]


class Layer(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        stream = hidden if residual is None else hidden + residual
        return 0.5 * stream.roll(1, -1), stream


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(UNEMBEDDING.astype(np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Model(nn.Module):
    """Rows do not see one another, so a row's values depend on its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), Head()

    def forward(self, hidden: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        out: Tensor = self.norm(hidden + residual)
        return out

    def compute_logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(rows)
        return logits


def write(folder: Path, mode: str = "eager", **reads: int) -> Manifest:
    """The block and the lock; ``reads`` are entries of every read."""
    lines = [
        "from vtaps.runtime import block as vt",
        'BLOCK = vt.Block(spec="", tree="", structure="s", vllm="", architecture="")',
    ]
    for number, (site, where) in enumerate(SITES.items()):
        found = {k: v for k, v in where.items() if k in ("module", "output", "input", "residual")}
        if "columns" in where:
            found["columns"] = tuple(where["columns"])
        pair = ", residual" if "residual" in where else ""
        lines += [f"@BLOCK.location({site!r}, **{found!r})", f"def at_{number}(t, hidden{pair}):"]
        for name in ORDER:
            entry = EDITS.get(name) or READS[name]
            if site in entry["sites"] and (mode == "eager" or name not in BY_PYTHON):
                call = CALLS.get(kind := entry.get("verb") or entry["kind"], kind)
                call = "python_read" if name in READS and kind == "python" else call
                some = f", columns={tuple(map(tuple, entry['columns']))!r}" if "columns" in entry else ""
                lines.append(f'    vt.{call}(t, "{name}", hidden{pair}{some})')
    block = folder / "toy.block.py"
    block.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "bend.py").write_text(BEND, encoding="utf-8")
    (folder / "feel.py").write_text(FEEL, encoding="utf-8")
    served = {name: arm for name, arm in ARMS.items() if name != "plain" and (mode == "eager" or name != PYTHON)}
    edits = {name: entry for name, entry in EDITS.items() if mode == "eager" or name not in BY_PYTHON}
    kept = {name: entry for name, entry in READS.items() if mode == "eager" or name not in BY_PYTHON}
    save_sae(folder / "sae", SAE, {"architecture": "jumprelu"})
    for name, vector in VECTORS.items():
        np.save(folder / f"{name}.npy", vector)

    def spelled(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: {**entry, "tokens": sch.tokens(entry["tokens"])} for name, entry in table.items()}

    lock = {
        "lock": 1,
        "engine": {"mode": mode},
        "lens": {"norm": "norm"},
        "block": {"digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(), "structure": "s"},
        "sites": {name: {"width": WIDTH, **site} for name, site in SITES.items()},
        "edits": spelled(edits),
        "reads": {name: {**entry, **reads} for name, entry in spelled(kept).items()},
        "metrics": spelled(METRICS),
        "overrides": {"say": {"ids": list(sch.SAY)}},
        "vectors": {name: {"file": f"{name}.npy"} for name in VECTORS},
        "arms": served,
    }
    (folder / "lock.json").write_text(json.dumps(lock), encoding="utf-8")
    return Manifest(block, folder / "lock.json", folder)


def served(asks: Sequence[Ask], mode: str) -> list[Ask]:
    """The requests with arms that the engine serves."""
    return [replace(ask, arm="edit") if mode != "eager" and ask.arm == PYTHON else ask for ask in asks]


def compiled(module: str) -> bool:
    """All but the unembedding, which vLLM calls outside of what it compiles, and what is sampled of it."""
    return module not in ("head", "sampler")


def inputs(request: int, positions: Sequence[int], times: Sequence[int]) -> Array:
    """Rows ``[n, WIDTH]`` of small integers; ``times`` says how often each was computed before."""
    p, t = np.array(positions, np.int64)[:, None], np.array(times, np.int64)[:, None]
    return (7 * request + 3 * p + 5 * t + (p + 2) * np.arange(WIDTH)) % 13 - 6.0


def streams(ask: Ask, request: int, positions: Sequence[int], times: Sequence[int]) -> dict[str, tuple[Array, Array]]:
    """Site → its rows ``[n, width]`` before and after its edits, in float64."""
    uses: list[dict[str, Any]] = ARMS[ask.arm]["points"][ask.point].get("edits", [])
    out: dict[str, tuple[Array, Array]] = {}

    def at(site: str, x: Array) -> Array:
        before, x = x, x.copy()
        for name in ORDER:
            for use in (u for u in uses if u["edit"] == name and site in u["sites"]):
                entry = EDITS[name]
                rows = np.array([holds(entry["tokens"], ask, request, p) for p in positions], bool)
                ranges = entry.get("columns", [[0, x.shape[1]]])
                cells = np.ix_(np.flatnonzero(rows), np.concatenate([np.arange(a, b) for a, b in ranges]))
                by = float(use["coefficient"]) if entry.get("value") else 0.0
                vector = by if use["vector"] is None else use["coefficient"] * VECTORS[use["vector"]]
                match entry["verb"]:
                    case "add":
                        x[cells] += vector
                    case "scale":
                        x[cells] *= use["coefficient"]
                    case "feature":
                        to = use["coefficient"]
                        if entry["sae"]["does"] == "to":
                            to = to - activations(SAE, x[rows])[:, [use["feature"]]]
                        x[rows] += to * SAE["W_dec"][use["feature"]]
                    case "reconstruct":
                        active = activations(SAE, x[rows])
                        active[:, use["feature"]] += use["coefficient"]
                        x[rows] = reconstruction(SAE, active)
                    case "python":
                        x[rows] = 0.5 * x[rows] + np.array(positions)[rows, None]
                    case _:
                        x[cells] = vector
        out[site] = before, x
        return x

    x = at("in", inputs(request, positions, times))
    for layer in range(LAYERS):
        if layer == 2:
            x = at("in2", x)
        x = at(f"r{layer}", 0.5 * np.roll(x, 1, -1) + x)
        if layer == 1:
            x = x.copy()
            x[:, slice(*CUT)] = at("cut", x[:, slice(*CUT)])
    at("logits", at("final", 2 * x) @ UNEMBEDDING.T)
    speaks = "overrides" in ARMS[ask.arm]["points"][ask.point]
    steps = [p - ask.prompt + 1 - sch.SAY_AT for p in positions]
    at("samples", np.array([[sch.SAY[s] if speaks and 0 <= s < len(sch.SAY) else -1] for s in steps], np.float64))
    return out


class Worker:
    """A session on a model of its own, driven through schedules as vLLM's runners drive it: ``late`` where the logits
    come after the step's end, as in V2."""

    def __init__(
        self,
        session: Session,
        asks: Sequence[Ask],
        limits: Limits,
        dtype: Any = torch.float32,
        device: str = "cpu",
        inside: Callable[[str], bool] | None = None,
    ) -> None:
        self.session, self.asks, self.dtype, self.device = session, asks, dtype, device
        self.model = Model().to(device, dtype)
        session.attach(self.model, self.model.compute_logits, limits, dtype, inside)
        self.runner = sch.Runner(asks, session.table)
        # Position → how often its row was computed before, now and when a token was last sampled from it.
        self.times: list[dict[int, int]] = [{} for _ in asks]
        self.sampled: list[dict[int, int]] = [{} for _ in asks]

    def rows(self, shares: Sequence[sch.Share], padding: int = 0) -> Tensor:
        """The model's input for a step, with rows of NaN behind its own."""
        rows = [np.full((padding, WIDTH), np.nan)]
        for share in shares:
            times, positions = self.times[share.request], range(share.start, share.start + share.count)
            for p in positions:
                times[p] = times.get(p, -1) + 1
            if share.sampled:
                self.sampled[share.request][positions[-1]] = times[positions[-1]]
            rows.insert(-1, inputs(share.request, positions, [times[p] for p in positions]))
        return torch.from_numpy(np.concatenate(rows)).to(self.device, self.dtype)

    def step(
        self,
        shares: Sequence[sch.Share],
        x: Tensor,
        forward: Callable[[Tensor], Tensor] | None = None,
        *,
        late: bool = False,
    ) -> Tensor:
        """One step on input ``x``; returns the tokens that it samples, all -1 but for overrides."""
        session = self.session
        last = torch.tensor(np.cumsum([share.count for share in shares]) - 1).to(self.device, non_blocking=True)
        with torch.inference_mode(), self.runner.step(shares) as step:
            session.step(step)
            final = (forward or self.model)(x)
            if late:
                session.end()
            logits = self.model.compute_logits(final[last])
            if not late:
                session.end()
            session.measure(logits)
            sampled = torch.full((len(shares),), -1, device=self.device)
            session.replace(sampled)
        return sampled

    def dummy(self) -> None:
        with torch.inference_mode():
            self.session.neutral()
            self.session.passed()
            self.model(torch.full((2, WIDTH), torch.nan, dtype=self.dtype, device=self.device))

"""Gates on both engines, one mixed batch: scores, decisions, streams and tokens against a Hugging Face forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engine.case import (  # noqa: E402
    LAYERS,
    WIDTH,
    arm,
    by_key,
    hugging_face,
    reference,
    request,
    tiny_llama,
    use,
    write_case,
)
from vtaps.runtime.engine import Engine  # noqa: E402
from vtaps.spec.rows import from_ranges  # noqa: E402
from vtaps.spec.vectors import draw  # noqa: E402

# vLLM's blocks hold 128 tokens on a CPU and 16 on a GPU; one is never given away.
BLOCKS = 35 if torch.cuda.is_available() else 8

pytestmark = pytest.mark.engine

Floats = np.ndarray[Any, Any]
STREAMS = [f"resid_post[{i}]" for i in range(LAYERS)]
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
TOLERANCE = 4e-3 if torch.cuda.is_available() else 4e-5
VECTORS = {"r": (1, 1.0), "s": (2, 6.0), "t": (3, 8.0)}
PROMPT, LAST = {"rows": "prompt"}, {"rows": "prompt", "positions": [[-1, -1]]}


def gate(site: str, score: str, tokens: dict[str, Any], reduce: str | None = None) -> dict[str, Any]:
    holds = {"holds": "row"} if reduce is None else {"holds": "request", "reduce": reduce}
    return {"site": site, "score": score, "tokens": tokens, **holds}


GATES: dict[str, dict[str, Any]] = {
    "dot": gate("resid_post[0]", "project", {"rows": "all"}),
    "angle": gate("resid_post[1]", "cosine", {"rows": "all"}),
    "most": gate("resid_post[2]", "cosine", PROMPT, "max"),
    "mean": gate("resid_post[0]", "project", PROMPT, "mean"),
    "last": gate("z[1]", "cosine", LAST, "last"),
}
EDITS: dict[str, dict[str, Any]] = {
    "push": {"verb": "add", "sites": ["resid_post[1]"], "tokens": {"rows": "all"}, "when": "dot"},
    "shrink": {"verb": "scale", "sites": ["resid_post[1]"], "tokens": {"rows": "sampling"}, "when": "angle"},
    "steer": {"verb": "add", "sites": ["resid_post[0]"], "tokens": {"rows": "generated"}, "when": "most"},
    "turn": {"verb": "set", "sites": ["resid_post[2]"], "tokens": {"rows": "generated"}, "when": "mean"},
    "clear": {"verb": "zero", "sites": ["z[1]"], "tokens": {"rows": "generated"}, "when": "last"},
    "bend": {"verb": "python", "sites": ["resid_post[2]"], "tokens": {"rows": "all"}, "when": "dot",
             "python": {"file": "bend.py", "function": "bend"}},
}  # fmt: skip
BEND = """\
import torch

def bend(rows, at):
    return 0.5 * rows + 0.01 * torch.from_numpy(at.positions).to(rows)[:, None]
"""
COEFFICIENT = {"push": 1.0, "shrink": 0.25, "steer": 1.0, "turn": 0.5, "clear": None, "bend": None}
VECTOR = {"push": "s", "shrink": None, "steer": "t", "turn": "s", "clear": None, "bend": None}
BOTH = ("push", "shrink", "clear")
SIZES = (3, 21, 122)


def vector(name: str, site: str) -> Floats:
    return draw(*VECTORS[name], int(site[-2]), WIDTH).astype(np.float64)


def score(gate: str, x: Floats) -> Floats:
    """float64 ``[rows]`` of a stream ``[rows, width]``."""
    v = vector("r", GATES[gate]["site"])
    dots = x.astype(np.float64) @ v
    return dots if GATES[gate]["score"] == "project" else dots / np.linalg.norm(x, axis=1) / np.linalg.norm(v)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 260, size).tolist() for size in SIZES]


def reduced(gate: str, scores: Floats) -> float:
    """Of the prompt's rows."""
    how = {"max": np.max, "mean": np.mean, "last": lambda s: s[-1]}[GATES[gate]["reduce"]]
    return float(how(scores))


def thresholds(model: Path) -> dict[str, float]:
    """In the widest gap between scores of unedited prompts, so that rows, or requests, lie on both sides."""
    twin = hugging_face(model)
    found: dict[str, list[float]] = {name: [] for name in GATES}
    for ids in prompts():
        _, seen = reference(twin, ids)
        for name, gate in GATES.items():
            scores = score(name, seen[gate["site"]])
            found[name] += [reduced(name, scores)] if gate["holds"] == "request" else scores.tolist()
    out = {}
    for name, values in found.items():
        ordered = np.sort(values)
        inner = ordered if len(ordered) < 10 else ordered[len(ordered) // 4 : -len(ordered) // 4]
        i = int(np.diff(inner).argmax())
        out[name] = float(np.float32((inner[i] + inner[i + 1]) / 2))
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def above(model: Path) -> dict[str, float]:
    return thresholds(model)


@pytest.fixture(scope="module", params=["eager", "taps"])
def engine(
    request: pytest.FixtureRequest, model: Path, above: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    def acting(*names: str) -> dict[str, Any]:
        uses = [use(n, *EDITS[n]["sites"], coefficient=COEFFICIENT[n], vector=VECTOR[n]) for n in names]
        made = arm(*uses, reads=["stream"])
        gates = [EDITS[n]["when"] for n in names]
        made["points"][0]["gates"] = [{"gate": g, "vector": "r", "above": above[g], "below": None} for g in gates]
        return made

    folder = tmp_path_factory.mktemp("case")
    (folder / "bend.py").write_text(BEND)
    lock, block = write_case(
        folder, model,
        gates=GATES,
        edits=EDITS,
        reads={"stream": {"kind": "rows", "sites": STREAMS, "tokens": {"rows": "all"}}},
        vectors={n: {"random": {"seed": seed, "norm": norm}} for n, (seed, norm) in VECTORS.items()},
        arms={"base": arm(reads=["stream"]), **{name: acting(name) for name in EDITS}, "both": acting(*BOTH)},
        # Prompts come in pieces, beside rows of others; the longest take two blocks with their answers, in a cache of
        # seven: some requests are preempted and computed again.
        vllm={"max_num_batched_tokens": 100, "num_gpu_blocks_override": BLOCKS},
        mode=request.param,
    )  # fmt: skip
    with Engine(lock, folder, block, folder / "manifest") as made:
        yield made


def test_gates_decide_in_one_batch(engine: Engine, model: Path, above: dict[str, float]) -> None:
    twin = hugging_face(model)
    asked = [request(f"{name}/{len(ids)}", name, ids) for ids in prompts() for name in ("base", *EDITS, "both")]
    starts: list[int] = []

    def watch(worker: Any) -> None:
        table = worker.vtaps_session.table
        original = table.step

        def step(batch: Any) -> Any:
            starts.extend(batch.starts.tolist())
            return original(batch)

        table.step = step

    engine._frontend.llm.collective_rpc(watch)
    served = by_key(list(engine.run(asked, lambda _: GREEDY)))
    assert starts.count(0) > len(asked), "nothing was preempted"
    decided: dict[str, set[bool]] = {name: set() for name in EDITS}
    margins = []
    for key, finished in served.items():
        (completion,) = finished.completions
        record, name = completion.record, finished.request.arm
        prompt = len(finished.request.prompt_token_ids)
        ids = [*finished.request.prompt_token_ids, *completion.token_ids][:-1]
        names = () if name == "base" else BOTH if name == "both" else (name,)
        acted: dict[str, Floats] = {}

        def scored(gate: str, x: Any, record: Any = record, prompt: int = prompt) -> Floats:
            """Which rows the gate lets through by its float64 scores; those delivered agree."""
            scores = score(gate, x.double().numpy())
            told = record.gates[gate]
            np.testing.assert_allclose(told.scores, scores[told.positions], atol=TOLERANCE, rtol=TOLERANCE)
            assert told.scores.dtype == np.float32
            if GATES[gate]["holds"] == "row":
                assert told.positions.tolist() == list(range(len(scores)))
                margins.append(np.abs(scores - above[gate]).min())
                assert told.passed.tolist() == (told.scores > np.float32(above[gate])).tolist()
                return scores > above[gate]
            value = reduced(gate, scores[:prompt])
            margins.append(abs(value - above[gate]))
            np.testing.assert_allclose(told.value, value, atol=TOLERANCE, rtol=TOLERANCE)
            assert told.passed.tolist() == [value > above[gate]] * len(told.positions)
            return np.full(len(scores), value > above[gate])

        passed: dict[str, Floats] = {}

        def at(site: str, x: Any, names: Any = names, passed: Any = passed, acted: Any = acted, n: int = prompt) -> Any:
            for gate in (EDITS[e]["when"] for e in names):
                if GATES[gate]["site"] == site and GATES[gate]["holds"] == "row":
                    passed[gate] = scored(gate, x)
            for edit in names:
                if site not in EDITS[edit]["sites"]:
                    continue
                first = {"all": 0, "sampling": n - 1, "generated": n}[EDITS[edit]["tokens"]["rows"]]
                here = passed[EDITS[edit]["when"]] & (np.arange(len(x)) >= first)
                acted[edit] = here
                rows = torch.from_numpy(here)
                v = torch.from_numpy(vector(VECTOR[edit], site) * COEFFICIENT[edit]).float() if VECTOR[edit] else 0.0
                new = {"add": x + v, "scale": x * (COEFFICIENT[edit] or 0.0), "set": 0 * x + v, "zero": 0 * x,
                       "python": 0.5 * x + 0.01 * torch.arange(len(x))[:, None]}  # fmt: skip
                x[rows] = new[EDITS[edit]["verb"]][rows]
            return x

        # A request gate looks at the prompt alone, which nothing here edits before it.
        early = {g: GATES[g]["site"] for g in (EDITS[e]["when"] for e in names) if GATES[g]["holds"] == "request"}
        _, plain = reference(twin, ids)
        for gate, site in early.items():
            passed[gate] = scored(gate, torch.from_numpy(plain[site]))
        logits, streams = reference(twin, ids, {site: lambda x, s=site: at(s, x) for site in (*STREAMS, "z[1]")})
        assert list(completion.token_ids) == logits[prompt - 1 :].argmax(-1).tolist(), key
        for site in STREAMS:
            got = record.reads["stream", site].values["rows"]
            np.testing.assert_allclose(got, streams[site], atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{key} {site}")
        for edit in names:
            fired = from_ranges(record.fired.get(edit, ()))
            assert fired.tolist() == np.flatnonzero(acted[edit]).tolist(), key
            first = {"all": 0, "sampling": prompt - 1, "generated": prompt}[EDITS[edit]["tokens"]["rows"]]
            assert from_ranges(record.selected[edit]).tolist() == list(range(first, len(ids))), key
            decided[edit] |= set(acted[edit][first:].tolist())
    # Rows, or requests, on both sides, and none so near that rounding decides.
    assert all(found == {True, False} for found in decided.values()), decided
    assert min(margins) > 2e-5, min(margins)

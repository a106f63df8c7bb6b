"""Every verb and read on CUDA against the same steps on the CPU, with no engine around them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from vtaps.runtime.records import Record  # noqa: E402
from vtaps.runtime.rowtable import Scheduled  # noqa: E402
from vtaps.runtime.session import Manifest, Session  # noqa: E402
from vtaps.runtime.transport import unpack  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LAYERS, WIDTH, VOCAB, PROMPT, NEW = 6, 64, 50, 5, 5
SITES = [f"r{i}" for i in range(LAYERS)]
VERBS = {"add": "add", "scale": "scale", "set": "set_", "zero": "zero"}
READS = {"rows": "keep", "mean": "mean", "norm": "norm", "project": "project", "lens": "lens"}


class Layer(nn.Module):
    def forward(self, hidden: Any, residual: Any) -> Any:
        return hidden * 0.5, (hidden if residual is None else residual) + 0.25 * hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Identity()
        self.head = nn.Parameter(torch.linspace(-1, 1, VOCAB * WIDTH).reshape(VOCAB, WIDTH))

    def forward(self, hidden: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden

    def compute_logits(self, rows: Any) -> Any:
        return rows @ self.head.T


def write(folder: Path) -> Manifest:
    lines = [
        "from vtaps.runtime import block as vt",
        'BLOCK = vt.Block(spec="", tree="", structure="s", vllm="", architecture="")',
    ]
    for i, site in enumerate(SITES):
        lines += [
            f'@BLOCK.location("{site}", module="layers.{i}", output=0, residual=1)',
            f"def at_{i}(t, hidden, residual):",
            *(f'    vt.{call}(t, "{v}", hidden, residual, columns=((3, 9), (20, 64)))' for v, call in VERBS.items()),
            *(f'    vt.{call}(t, "{kind}", hidden, residual)' for kind, call in READS.items()),
        ]
    block = folder / "b.py"
    block.write_text("\n".join(lines) + "\n")
    tokens = {"rows": "all"}
    sites = {
        s: {"module": f"layers.{i}", "output": 0, "residual": 1, "width": WIDTH, "layer": i}
        for i, s in enumerate(SITES)
    }
    edits = {
        verb: {"verb": verb, "sites": SITES, "tokens": {"rows": "all", "positions": [[i, i]]}}
        for i, verb in enumerate(VERBS)
    }
    reads = {
        kind: {
            "kind": kind, "sites": SITES, "tokens": tokens, "vectors": ["v"] if kind == "project" else [],
            "top": 5 if kind == "lens" else None,
        }
        for kind in READS
    }  # fmt: skip
    uses = [
        {"edit": verb, "sites": SITES[:3], "coefficient": None if verb == "zero" else 1.5,
         "vector": "v" if verb in ("add", "set") else None}
        for verb in VERBS
    ]  # fmt: skip
    lock = {
        "lock": 1,
        "lens": {"norm": "norm"},
        "block": {"digest": "sha256:" + hashlib.sha256(block.read_bytes()).hexdigest(), "structure": "s"},
        "sites": sites,
        "edits": edits,
        "reads": reads,
        "vectors": {"v": {"random": {"seed": 1}}},
        "metrics": {"m": {"kind": "logprob", "ids": [3], "tokens": tokens}},
        "arms": {"a": {"reads": list(READS), "metrics": ["m"], "points": [{"edits": uses}]}},
    }
    (folder / "lock.json").write_text(json.dumps(lock))
    return Manifest(block, folder / "lock.json", folder)


def serve(manifest: Manifest, device: str, dtype: Any) -> dict[tuple[str, int], Record]:
    """Two requests beside each other: a prefill, then decoding."""
    session, model = Session(manifest), Model().to(device, dtype)
    session.attach(model, model.compute_logits)
    generator = torch.Generator().manual_seed(0)
    for key in "ab":
        session.table.admit(key, {"key": key, "arm": "a", "point": 0}, PROMPT)
    with torch.inference_mode():
        for start in (0, *range(PROMPT, PROMPT + NEW - 1)):
            count = PROMPT if start == 0 else 1
            session.begin([Scheduled(key, start, np.zeros(count, np.int64), i * count) for i, key in enumerate("ab")])
            hidden = model(torch.randn(2 * count, WIDTH, generator=generator).to(device, dtype))
            session.end(model.compute_logits(hidden[[count - 1, -1]]))
    return unpack(session.collect([("a", 0, NEW), ("b", 0, NEW)]))


def widened(value: Any) -> Any:
    return (value.astype(np.uint32) << 16).view(np.float32) if value.dtype == np.uint16 else value


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_cuda_equals_the_cpu(dtype: Any, tolerance: float, tmp_path: Path) -> None:
    manifest = write(tmp_path)
    here, there = serve(manifest, "cpu", dtype), serve(manifest, "cuda", dtype)
    assert here.keys() == there.keys()
    for key, expected in here.items():
        got = there[key]
        assert got.fired == expected.fired == {verb: ((i, i + 1),) for i, verb in enumerate(VERBS)}
        assert got.reads.keys() == expected.reads.keys()
        for where, read in expected.reads.items():
            assert got.reads[where].positions.tolist() == list(range(PROMPT + NEW - 1))
            assert got.reads[where].dtype == read.dtype
            for field, value in read.values.items():
                if field != "ids":
                    np.testing.assert_allclose(
                        widened(got.reads[where].values[field]), widened(value), atol=tolerance, rtol=tolerance / 10,
                        err_msg=f"{key} {where} {field}",
                    )  # fmt: skip
        np.testing.assert_allclose(got.metrics["m"][1], expected.metrics["m"][1], atol=tolerance)

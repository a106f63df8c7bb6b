"""The toy's program: its locations, edits, reads, metrics and arms, as its lock spells them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.runtime import schedules as sch
from tests.saes import exact_sae

WIDTH, VOCAB, LAYERS = 8, 11, 3
CUT = (2, 5)

UNEMBEDDING = np.random.default_rng(11).normal(size=(VOCAB, WIDTH)).astype(np.float32).astype(np.float64)
# Small numbers of few bits: the stream is exact in float32, in whichever order it is summed.
VECTORS = {
    "v": np.array([1, -2, 3, 0, 5, -1, 2, 4.0]),
    "w": np.array([-3, 1, 0.5, 2, -4, 6, 1, -0.5]),
    "narrow": np.array([4, -1, 2.0]),
    "u": np.arange(VOCAB) - 4.0,
    "weight": np.random.default_rng(3).integers(-2, 3, (3, WIDTH)).astype(np.float64),
    "bias": np.array([1, -2, 0.5]),
}
SAE = exact_sae(WIDTH, 12)
SITES: dict[str, dict[str, Any]] = {
    "in": {"module": "layers.0", "input": "hidden", "residual": "residual"},
    "r0": {"module": "layers.0", "output": 0, "residual": 1},
    "r1": {"module": "layers.1", "output": 0, "residual": 1},
    "cut": {"module": "layers.1", "output": 0, "residual": 1, "columns": list(CUT), "width": CUT[1] - CUT[0]},
    "in2": {"module": "layers.2", "input": "hidden", "residual": "residual"},
    "r2": {"module": "layers.2", "output": 0, "residual": 1},
    "final": {"module": "norm"},
    "logits": {"module": "head", "width": VOCAB, "rows": "sampled"},
    "samples": {"module": "sampler", "width": 1, "rows": "sampled"},
}
BEHIND = ("logits", "samples")
"""They have a row a request."""
EDITS: dict[str, dict[str, Any]] = {
    "push": {"verb": "add", "sites": ["in", "r0", "r1"], "tokens": "generated"},
    "gain": {"verb": "scale", "sites": ["r1", "final"], "tokens": "steps"},
    "clear": {"verb": "zero", "sites": ["r0", "in2"], "tokens": "ends", "columns": [[1, 3], [6, 8]]},
    "put": {"verb": "set", "sites": ["cut"], "tokens": "but"},
    "odd": {"verb": "add", "sites": ["r2"], "tokens": "but even"},
    "bump": {"verb": "add", "sites": ["logits"], "tokens": "sampling"},
    "drive": {"verb": "feature", "sites": ["r0", "r2"], "tokens": "but", "sae": {"dir": "sae", "does": "to"}},
    "nudge": {"verb": "feature", "sites": ["r2"], "tokens": "sampling", "sae": {"dir": "sae", "does": "by"}},
    "mirror": {"verb": "reconstruct", "sites": ["r0", "r2"], "tokens": "but", "sae": {"dir": "sae", "does": "by"}},
    "more": {"verb": "add", "sites": ["logits"], "tokens": "steps", "columns": [[1, 2], [4, 6]], "value": True},
    "never": {"verb": "set", "sites": ["logits"], "tokens": "sampling", "columns": [[7, 9]], "value": True},
    "bend": {
        "verb": "python",
        "sites": ["r1", "final"],
        "tokens": "but",
        "python": {"file": "bend.py", "function": "bend"},
    },
}
PYTHON = "bent"
"""An arm with an edit and reads in Python, which the taps engine does not serve: there ``edit`` takes its place."""
BEND = """\
import torch

def bend(rows, at):
    return 0.5 * rows + torch.from_numpy(at.positions).to(rows)[:, None]
"""
READS: dict[str, dict[str, Any]] = {
    "dots": {"kind": "project", "sites": ["r1", "final"], "tokens": "but", "vectors": ["v", "w"]},
    "rows": {"kind": "rows", "sites": [s for s in SITES if s not in BEHIND], "tokens": "all"},
    "small": {"kind": "rows", "sites": ["r1", "final"], "tokens": "all", "store": {"dtype": "float16"}},
    "tiny": {
        "kind": "rows",
        "sites": ["r0", "cut"],
        "tokens": "but",
        "store": {"dtype": "float8_e4m3", "scale": "per_row"},
    },
    "wide": {"kind": "rows", "sites": ["in2"], "tokens": "generated", "store": {"dtype": "float32"}},
    "out": {"kind": "rows", "sites": ["logits"], "tokens": "all"},
    "norm": {"kind": "norm", "sites": ["r2", "logits"], "tokens": "generated"},
    "mean": {"kind": "mean", "sites": ["r0", "cut"], "tokens": "all"},
    "late": {"kind": "mean", "sites": ["in2"], "tokens": "steps"},
    "top": {"kind": "lens", "sites": ["r0", "r2", "logits"], "tokens": "sampling", "top": 3},
    "picked": {"kind": "lens", "sites": ["logits"], "tokens": "steps", "ids": [7, 0]},
    "said": {"kind": "rows", "sites": ["samples"], "tokens": "generated"},
    "chosen": {"kind": "lens", "sites": ["final"], "tokens": "but", "ids": [1, 4]},
    "asked": {"kind": "probe", "sites": ["r1", "final"], "tokens": "but", "vectors": ["weight", "bias"]},
    "most": {"kind": "features", "sites": ["r0", "r2"], "tokens": "sampling", "sae": "sae", "top": 3},
    "some": {"kind": "features", "sites": ["final"], "tokens": "but", "sae": "sae", "ids": [7, 0]},
    "even": {"kind": "norm", "sites": ["r0"], "tokens": "even"},
    "feel": {
        "kind": "python",
        "sites": ["in", "r1", "cut", "final", "logits"],
        "tokens": "but",
        "python": {"file": "feel.py", "function": "feel"},
    },
    "count": {
        "kind": "python",
        "sites": ["cut", "r1"],
        "tokens": "all",
        "python": {"file": "feel.py", "function": "count"},
    },
}
FEEL = """\
import torch

def feel(rows, at):
    assert at.layer is None and (at.location == "final") == (at.module == "norm"), at
    assert (at.location == "in") == (at.input == "hidden"), at
    felt = torch.stack([rows.sum(-1), torch.from_numpy(at.positions).to(rows)], -1)
    rows.fill_(torch.nan)
    return felt

def count(rows):
    return (rows > 0).sum(-1, dtype=torch.uint8)
"""
DTYPES = {"count": "uint8", "said": "int32", "small": "float16", "tiny": "float8_e4m3"}
"""Of what a read keeps, where it is not float32."""
METRICS: dict[str, dict[str, Any]] = {
    "logprob": {"kind": "logprob", "ids": [3], "tokens": "sampling"},
    "diff": {"kind": "logit_diff", "ids": [1, 4], "tokens": "steps"},
    "rank": {"kind": "rank", "ids": [2], "tokens": "but"},
    "odds": {"kind": "logprob", "ids": [0], "tokens": "but even"},
}
BEFORE = ("dots", "count")
ORDER = (*BEFORE, *EDITS, *(read for read in READS if read not in BEFORE))
"""Of the statements at each location: some reads come before the edits."""
CALLS = {"set": "set_", "rows": "keep"}
BY_PYTHON = ("bend", "mirror", "feel", "count")


def edit(
    name: str, *sites: str, coefficient: float | None = None, vector: str | None = None, **more: Any
) -> dict[str, Any]:
    return {"edit": name, "sites": list(sites), "coefficient": coefficient, "vector": vector, **more}


SAY = [{"override": "say", "start": sch.SAY_AT}]
# A batch with a selector of token ids in it is planned anew every step: these stand in an arm of their own.
BY_POSITION = [read for read in READS if read not in ("even", *BY_PYTHON)]
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"points": [{}]},
    "idle": {"points": [{}]},
    "tokens": {
        "reads": ["even", "mean", "top"],
        "metrics": ["odds"],
        "points": [{"edits": [edit("odd", "r2", coefficient=1.0, vector="w")]}],
    },
    "look": {"reads": BY_POSITION, "metrics": ["logprob", "diff", "rank"], "points": [{}]},
    "edit": {
        "reads": BY_POSITION,
        "metrics": ["logprob"],
        "points": [
            {
                "edits": [
                    edit("push", "in", "r0", coefficient=2.0, vector="v"),
                    edit("gain", "r1", "final", coefficient=0.5),
                    edit("clear", "r0", "in2"),
                    edit("put", "cut", coefficient=-1.0, vector="narrow"),
                    edit("bump", "logits", coefficient=0.5, vector="u"),
                    edit("more", "logits", coefficient=1.5),
                ]
            },
            {
                "edits": [
                    edit("push", "r0", "r1", coefficient=-0.5, vector="w"),
                    edit("gain", "r1", coefficient=-2.0),
                    edit("more", "logits", coefficient=-2.0),
                    {**edit("never", "logits"), "coefficient": "-inf"},
                ],
                "overrides": SAY,
            },
            {
                "edits": [
                    edit("drive", "r0", "r2", coefficient=6.0, feature=3),
                    edit("nudge", "r2", coefficient=-2.0, feature=11),
                ]
            },
            {"edits": [edit("drive", "r2", coefficient=0.0, feature=5)]},
        ],
    },
    "bent": {
        "reads": [*BY_POSITION, "feel", "count"],
        "points": [
            {"edits": [edit("gain", "r1", coefficient=0.5), edit("bend", "r1", "final")]},
            {"edits": [edit("bend", "final"), edit("push", "r0", coefficient=-0.5, vector="w")]},
            {"edits": [edit("mirror", "r0", "r2", coefficient=0.0, feature=3), edit("gain", "r1", coefficient=0.5)]},
            {"edits": [edit("mirror", "r2", coefficient=2.0, feature=5)]},
        ],
    },
    # The logits are edited, and nothing reads them.
    "some": {
        "reads": ["rows", "late", "top"],
        "points": [
            {"edits": [edit("clear", "in2"), edit("bump", "logits", coefficient=-1.0, vector="u")], "overrides": SAY}
        ],
    },
}

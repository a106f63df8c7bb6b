"""Two ranks give what one gives: every verb and every read that several ranks serve, at whole and at parted locations.

One rank alone is held against Hugging Face elsewhere; here the same spec is run on one and on two processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.engine.case import ON_GPU
from tests.engine.runs import Run, run_spec
from tests.models import tiny
from tests.saes import write_sae

pytestmark = pytest.mark.engine

WIDTH, HIDDEN = 128, 256
PYTHON = """
def most(x, ctx):
    return x.abs().max(-1).values

def flip(x, ctx):
    return x.neg()
"""
WHOLE = (
    "embed",
    "resid_pre[1]",
    "resid_mid[0]",
    "resid_post[*]",
    "ln1[1]",
    "ln2[0]",
    "attn_out[1]",
    "mlp_out[0]",
    "final_norm",
)
PARTED = ("q[1]", "k[1]", "v[0]", "rot_q[0]", "rot_k[1]", "z[1]")
RAW = ("model.layers.1.self_attn.qkv_proj.output", "model.layers.0.self_attn.attn.input.value")
DENSE = ("mlp_post[1]", "model.layers.1.mlp.gate_up_proj.output")
OF_A_ROW: dict[str, dict[str, Any]] = {
    "mean": {"mean_over": "request"},
    "norm": {"norm": True},
    "dots": {"project": {"vectors": ["x", "y"]}},
    "probe": {"probe": {"weight": "x"}},
}


def spec(family: str, mode: str, ranks: int, folder: Path) -> str:
    dense, routed = family != "qwen3_moe", family == "qwen3_moe"
    parted = (*PARTED, *RAW, *(DENSE if dense else ()))
    edits: dict[str, dict[str, Any]] = {
        # What needs whole rows, where every rank has them.
        "push": {"at": "resid_post[1]", "add": {"vector": "x", "scale": 1.0}},
        "kept": {"at": "resid_mid[1]", "add": {"vector": "x", "scale": 2.0, "keep_norm": True}},
        "out": {"at": "resid_post[*]", "project_out": {"vectors": ["x", "y"]}},
        "bound": {"at": "mlp_out[1]", "clamp": {"vector": "x", "max": -0.25}},
        "rank": {"at": "attn_out[1]", "affine": {"down": "down", "up": "up", "scale": 0.5}},
        "feature": {"at": "resid_post[1]", "feature": {"sae": "sae", "index": 3, "to": 2.0}},
        "flip": {"at": "ln2[1]", "python": "own.py:flip"},
        "when": {"at": "resid_post[1]", "add": {"vector": "y", "scale": 3.0}, "when": "dot"},
        "once": {"at": "resid_post[1]", "tokens": "generated", "add": {"vector": "y", "scale": 3.0}, "when": "most"},
        # What goes column by column, where each has some.
        "head": {"at": "z[1]", "zero": {"heads": [0, 3]}},
        "heads": {"at": "rot_q[1]", "scale": {"by": -1.5, "heads": [1, 2]}},
        "dims": {"at": "k[1]", "add": {"vector": "x", "scale": 1.0, "dims": ["3..20"]}},
        "vals": {"at": "v[1]", "set": {"vector": "y", "scale": 2.0}},
        "fused": {"at": RAW[0], "add": {"vector": "y", "scale": 1.0}},
        "cell": {"at": ["z[1]", "resid_post[0]"], "tokens": {"positions": [1, -1]}, "set": {"rows": "base.cells"}},
        "part": {"at": "z[0]", "tokens": {"positions": [1]}, "set": {"rows": "base.cells", "heads": [1, 2]}},
        "bias": {"at": "logits", "tokens": "sampling", "add": {"ids": ["b", "e"], "value": 5.0}},
    }  # fmt: skip
    if dense:
        edits["mlp"] = {"at": "mlp_post[0]", "add": {"vector": "x", "scale": 1.0}}
        edits["gate"] = {"at": DENSE[1], "scale": {"by": 0.5, "dims": ["100..300"]}}
    if routed:
        edits["route"] = {"at": "router_logits[1]", "add": {"value": 2.0, "dims": [1]}}
    reads: dict[str, dict[str, Any]] = {
        "stream": {"at": "resid_post[*]", "tokens": "all"},
        "whole": {"at": list(WHOLE), "tokens": "all"},
        "parted": {"at": list(parted), "tokens": "all"},
        "mixed": {"at": ["resid_post[1]", "z[0]"], "tokens": {"positions": ["0..-1"]}},
        "cells": {"at": ["z[0, 1]", "resid_post[0]"], "tokens": "prompt"},
        "top": {"at": "resid_post[*]", "tokens": "sampling", "lens": {"top": 7}},
        "chosen": {"at": "resid_mid[1]", "tokens": "all", "lens": {"ids": ["b", "e", 250]}},
        "logits": {"at": "logits", "tokens": "sampling"},
        "logits_top": {"at": "logits", "tokens": "sampling", "lens": {"top": 4}},
        "samples": {"at": "samples", "tokens": "sampling"},
        "active": {"at": "resid_post[1]", "tokens": "all", "features": {"sae": "sae", "top": 4}},
        "pattern": {"at": "pattern[1]", "tokens": "all", "heads": [0, 3]},
        "most": {"at": "ln2[1]", "tokens": "all", "python": "own.py:most"},
        **{f"{n}_whole": {"at": "resid_mid[0, 1]", "tokens": "all", **form} for n, form in OF_A_ROW.items()},
        **{f"{n}_parted": {"at": ["z[1]", "k[0]"], "tokens": "all", **form} for n, form in OF_A_ROW.items()},
    }  # fmt: skip
    if routed:
        reads["whole"]["at"].append("router_logits[1]")
    for name, read in reads.items():
        if name != "pattern" and name != "samples":
            read["sees"] = "after_edits"
    write_sae(folder / "sae", "standard", WIDTH, 16, seed=4)
    (folder / "own.py").write_text(PYTHON)
    rng = np.random.default_rng(1)
    np.save(folder / "down.npy", (rng.standard_normal((3, WIDTH)) / 4).astype(np.float32))
    np.save(folder / "up.npy", (rng.standard_normal((3, WIDTH)) / 4).astype(np.float32))
    arms = {name: {"edits": [name], "reads": ["stream"], "metrics": ["e"]} for name in edits}
    arms["base"] = {"reads": list(reads), "metrics": ["e"]}
    arms["head"]["reads"] = ["stream", "parted"]
    arms["said"] = {"overrides": ["say"], "reads": ["stream"]}
    return json.dumps({
        "vtaps": 1,
        "model": {"path": str(tiny(family)), "dtype": "float32"},
        # Prompts come in pieces, beside rows of others.
        "engine": {"mode": mode, "vllm": {
            "max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20,
            "tensor_parallel_size": ranks, **ON_GPU,
        }},
        "vectors": {
            "x": {"random": {"seed": 1, "norm": 3}}, "y": {"random": {"seed": 2, "norm": 3}},
            "down": {"file": "down.npy"}, "up": {"file": "up.npy"},
        },
        "saes": {"sae": {"dir": "sae"}},
        "gates": {
            "dot": {"at": "resid_post[0]", "tokens": "all", "project": "x", "above": 0.0, "holds": "row"},
            "most": {"at": "resid_post[0]", "tokens": "prompt", "cosine": "y", "holds": "request",
                     "reduce": "max", "above": -1.0},
        },
        "reads": reads,
        "edits": {name: {"tokens": "all", **edit} for name, edit in edits.items()},
        "overrides": {"say": {"start": 1, "text": "abc"}},
        "metrics": {"e": {"logprob": "e", "tokens": "sampling"}},
        "prompts": {"any": [{"id": "short", "text": "a"}, {"id": "long", "text": "the b is longer than some steps"}]},
        "arms": arms,
        "sampling": {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": 0},
    })  # fmt: skip


def served(family: str, mode: str, ranks: int, folder: Path) -> Run:
    folder.mkdir()
    return run_spec(spec(family, mode, ranks, folder), folder)


@pytest.mark.parametrize(("family", "mode"), [("llama", "taps"), ("qwen3", "eager"), ("qwen3_moe", "eager")])
def test_two_ranks_give_what_one_gives(family: str, mode: str, tmp_path: Path) -> None:
    one, two = (served(family, mode, ranks, tmp_path / str(ranks)) for ranks in (1, 2))
    kept = ("request", "arm", "prompt", "token_ids", "text")
    assert [{k: r[k] for k in kept} for r in two.rows] == [{k: r[k] for k in kept} for r in one.rows]
    fired = [{k: v for k, v in r.items() if k.startswith(("fired.", "expected."))} for r in one.rows]
    assert fired == [{k: v for k, v in r.items() if k.startswith(("fired.", "expected."))} for r in two.rows]
    assert all(any(r[f"fired.{name}"] for r in one.rows) for name in one.lock["edits"])
    compared = 0
    for name in one.result.reads:
        a, b = one.result[name], two.result[name]
        assert a.sites == b.sites and a.rows.equals(b.rows), name
        for site in a.sites:
            for field in a.fields:
                want, got = (np.asarray(r.site(site, field)) for r in (a, b))
                if field == "ids":
                    assert np.array_equal(got, want), (name, site)
                    continue
                size = max(1.0, float(np.nanmax(np.abs(want))))
                assert got.shape == want.shape and np.allclose(got, want, rtol=0, atol=1e-5 * size, equal_nan=True), (
                    name, site, field, float(np.nanmax(np.abs(got - want))), size,
                )  # fmt: skip
                compared += 1
    assert compared > 60
    pairs = zip(one.result.metrics.to_pylist(), two.result.metrics.to_pylist(), strict=True)
    assert all(abs(a["value"] - b["value"]) < 1e-4 for a, b in pairs)

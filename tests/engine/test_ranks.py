"""Several workers give what one gives: every verb and every read that they serve, at whole and at parted locations.

One alone is held against Hugging Face elsewhere; here the same spec is run on one process and on two, which share
layers (tensor parallel) or have some each (pipeline parallel).
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


def spec(family: str, mode: str, ranks: int, stages: int, folder: Path) -> str:
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
        "when": {"at": "resid_post[0]", "add": {"vector": "y", "scale": 3.0}, "when": "dot"},
        "once": {"at": "resid_post[0]", "tokens": "generated", "add": {"vector": "y", "scale": 3.0}, "when": "most"},
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
        "chosen": {"at": "resid_mid[-1]", "tokens": "all", "lens": {"ids": ["b", "e", 250]}},
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
    if stages > 1:  # a lens unembeds on the last stage
        last = json.loads((tiny(family) / "config.json").read_text())["num_hidden_layers"] - 1
        reads["top"]["at"] = f"resid_post[{last}]"
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
            "tensor_parallel_size": ranks, "pipeline_parallel_size": stages, **ON_GPU,
        }},
        "vectors": {
            "x": {"random": {"seed": 1, "norm": 3}}, "y": {"random": {"seed": 2, "norm": 3}},
            "down": {"file": "down.npy"}, "up": {"file": "up.npy"},
        },
        "saes": {"sae": {"dir": "sae"}},
        "gates": {
            "dot": {"at": "resid_mid[0]", "tokens": "all", "project": "x", "above": 0.0, "holds": "row"},
            "most": {"at": "resid_mid[0]", "tokens": "prompt", "cosine": "y", "holds": "request",
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


def served(family: str, mode: str, ranks: int, stages: int, folder: Path) -> Run:
    folder.mkdir()
    return run_spec(spec(family, mode, ranks, stages, folder), folder)


ALONE: dict[tuple[str, str], Run] = {}


@pytest.mark.parametrize(
    ("family", "mode", "ranks", "stages"),
    [
        ("llama", "taps", 2, 1),
        ("llama", "taps", 1, 2),
        ("qwen3_moe", "eager", 2, 1),
        ("qwen3", "eager", 1, 2),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [
                ("llama", "eager", 2, 1),
                ("llama", "eager", 1, 2),
                ("llama", "taps", 2, 2),
                ("qwen3", "taps", 2, 1),
                ("qwen3", "eager", 2, 1),
                ("qwen3", "taps", 1, 2),
                ("qwen3_moe", "taps", 2, 1),
                ("qwen3_moe", "taps", 1, 2),
                ("qwen3_moe", "eager", 1, 2),
            ]
        ),
    ],
)
def test_several_workers_give_what_one_gives(
    family: str, mode: str, ranks: int, stages: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    if (family, mode) not in ALONE:
        ALONE[family, mode] = served(family, mode, 1, 1, folder / "one")
    one, several = ALONE[family, mode], served(family, mode, ranks, stages, folder / "several")
    for a, b in zip(one.rows, several.rows, strict=True):
        kept = [
            "request",
            "arm",
            "prompt",
            "token_ids",
            "text",
            *(k for k in a if k.startswith(("fired.", "expected."))),
        ]
        assert {k: a[k] for k in kept} == {k: b[k] for k in kept}
    assert all(any(r[f"fired.{name}"] for r in one.rows) for name in one.lock["edits"])
    compared = 0
    for name in several.result.reads:
        a, b = one.result[name], several.result[name]
        assert b.sites and set(b.sites) <= set(a.sites) and (a.sites == b.sites or (stages > 1 and name == "top"))
        assert a.rows.equals(b.rows), name
        for site, field in ((s, f) for s in b.sites for f in b.fields):
            want, got = (np.asarray(r.site(site, field)) for r in (a, b))
            if field == "ids":
                assert np.array_equal(got, want), (name, site)
                continue
            assert got.shape == want.shape and largest(got, want) <= 1e-5 * max(1.0, float(np.nanmax(np.abs(want)))), (
                name, site, field,
            )  # fmt: skip
            compared += 1
    assert compared > 50
    pairs = zip(one.result.metrics.to_pylist(), several.result.metrics.to_pylist(), strict=True)
    assert all(abs(a["value"] - b["value"]) < 1e-4 for a, b in pairs)


def largest(got: Any, want: Any) -> float:
    """Behind a row's own position a pattern has no number."""
    assert np.array_equal(np.isnan(got), np.isnan(want))
    return float(np.nanmax(np.abs(got - want)))

"""Every verb at every kind of location, on both engines, against the reference of ``vtaps verify``.

Which rows, columns, numbers and prompts each case has is drawn from a seed; one engine of each kind serves them all,
each edit in a request of its own, so that what is wrong shows in every later layer and in the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("vllm")

from tests.engine.case import ON_GPU
from tests.models import tiny
from tests.saes import write_sae
from vtaps.check import check_file
from vtaps.comparing import compared
from vtaps.compiling import compile_plan
from vtaps.running import requests_of
from vtaps.runtime.engine import Engine
from vtaps.runtime.records import Finished
from vtaps.runtime.reference.forward import HuggingFace
from vtaps.runtime.reference.holding import Holder, Meant
from vtaps.runtime.reference.kinds import READS
from vtaps.runtime.reference.verbs import VERBS
from vtaps.verification import Comparison, together
from vtaps.verifying import bound_of

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
WIDTH, HEAD_DIM, LAYERS = 128, 32, 4
OP = "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output"
OP_ALIAS = "mlp_post[1]"
"""What the op computes is what the alias names; as locations they are two."""
KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    "pair": tuple((f"{alias}[{i}]", WIDTH) for i in range(3) for alias in ("resid_mid", "resid_post")),
    "module": (("mlp_out[2]", WIDTH), ("attn_out[1]", WIDTH), ("ln2[0]", WIDTH), ("embed", WIDTH)),
    "heads": (("z[1]", WIDTH), ("rot_q[2]", WIDTH), ("z[0]", WIDTH)),
    "columns": (("q[1]", WIDTH), ("k[2]", 64), ("v[1]", 64)),
    "op": ((OP, 256),),
    "raw": (("model.layers.1.mlp.gate_up_proj.output", 512),),
}
FEATURES = 8
WITH_HEADS = ("heads", "columns")
NOT_HUGGING_FACE = ("raw",)
SELECTORS: tuple[dict[str, Any] | str, ...] = (
    "all", "prompt", "sampling", "generated", {"steps": [0, "2..3"]}, {"positions": [0, "2..3", -1]},
    {"rows": "all", "except": {"positions": [0]}}, {"rows": "sampling", "except": {"steps": [1]}}, {"match": " b"},
)  # fmt: skip
PROMPTS = {"short": "a b", "long": "the b is longer than windows and steps"}


OF_SAE = ("feature", "reconstruct")


def spelled(verb: str) -> str:
    """How a spec names it."""
    return "feature" if verb == "reconstruct" else verb


@dataclass(frozen=True)
class Case:
    verb: str
    kind: str
    site: str
    width: int
    edit: dict[str, Any]
    prompt: str

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.kind}"


def cases() -> list[Case]:
    rng = np.random.default_rng(3)
    found = []
    for verb in (v for v, formula in VERBS.items() if callable(formula)):
        for kind, sites in KINDS.items():
            site, width = sites[rng.integers(len(sites))]
            fields = dict(_fields(verb, width, rng))
            narrow = rng.integers(3)
            if verb in OF_SAE:
                narrow = 0
            if narrow and kind in WITH_HEADS:
                fields["heads"] = [int(rng.integers(width // HEAD_DIM))]
            if narrow == 2 or (narrow and kind not in WITH_HEADS):
                fields["dims"] = [0, "3..20", 31]
            prompt = ("short", "long")[rng.integers(2)]
            tokens = SELECTORS[rng.integers(len(SELECTORS))]
            found.append(Case(verb, kind, site, width, {"at": site, "tokens": tokens, spelled(verb): fields}, prompt))
    return found


def _fields(verb: str, width: int, rng: np.random.Generator) -> dict[str, Any]:
    scale = float(rng.choice([-1.5, 0.5, 2.0]))
    vector = str(rng.choice(["x", "y"]))
    if verb == "affine":
        return {"down": f"down{width}", "up": f"up{width}", "scale": scale} | ({"bias": "bias"} if scale > 0 else {})
    if verb in OF_SAE:
        fields = {"sae": f"sae{width}", "index": int(rng.integers(FEATURES)), "to" if scale > 0 else "by": scale}
        return fields | ({"error": "drop"} if verb == "reconstruct" else {})
    return {
        "add": {"vector": vector, "scale": scale} | ({"keep_norm": True} if rng.integers(2) else {}),
        "scale": {"by": scale},
        "zero": {},
        "set": {"vector": vector, "scale": scale},
        "project_out": {"vectors": ["x", "y"] if scale > 0 else ["y"], "scale": abs(scale)},
        "clamp": {"vector": vector, "max": -0.25} if scale > 0 else {"vector": vector, "min": 0.5},
    }[verb]


CASES = cases()
READ: dict[str, dict[str, Any]] = {
    "rows": {},
    "mean": {"mean_over": "request"},
    "norm": {"norm": True},
    "project": {"project": {"vectors": ["x", "y"]}},
    "probe": {"probe": {"weight": "x"}},
    "lens": {"lens": {"top": 5}},
    "features": {"features": {"sae": f"sae{WIDTH}", "top": 3}},
    "pattern": {"at": "pattern[1, 3]", "heads": [0, 2]},
}


def spec(folder: Path, mode: str) -> Path:
    rng = np.random.default_rng(1)
    tensors: dict[str, Any] = {"bias": rng.standard_normal(3).astype(np.float32)}
    for width in (64, WIDTH, 256, 512):
        for name in ("down", "up"):
            tensors[f"{name}{width}"] = (rng.standard_normal((3, width)) / width**0.25).astype(np.float32)
        if not (folder / f"sae{width}").exists():
            write_sae(folder / f"sae{width}", "standard", width, FEATURES, seed=width)
    save_file(tensors, folder / "affine.safetensors")
    reads = {"stream": {"at": "resid_post[*]", "tokens": "all", "sees": "after_edits"}}
    for kind, form in READ.items():
        reads[f"late_{kind}"] = {"at": "resid_mid[1, 3]", "tokens": {"positions": ["1..-1"]}, **form}
    arms: dict[str, Any] = {"base": {"reads": list(reads), "metrics": ["e", "place"]}}
    for case in CASES:
        reads[f"at_{case.name}"] = {"at": case.site, "tokens": "all", "sees": "after_edits"}
        own = [] if case.site.startswith("resid_post") else [f"at_{case.name}"]
        arms[case.name] = {"edits": [case.name], "reads": ["stream", *own], "prompts": [case.prompt], "metrics": ["e"]}
    used = {name for arm in arms.values() for name in arm["reads"]}
    text = {
        "vtaps": 1,
        "model": {"path": str(tiny("llama")), "dtype": "float32"},
        # Prompts come in pieces, beside rows of others.
        "engine": {
            "mode": mode,
            "vllm": {"max_model_len": 128, "max_num_batched_tokens": 40, "max_num_seqs": 8, **ON_GPU},
        },
        "vectors": {
            "x": {"random": {"seed": 1, "norm": 3}}, "y": {"random": {"seed": 2, "norm": 3}},
            **{name: {"file": "affine.safetensors", "tensor": name} for name in tensors
               if any(name in json.dumps(c.edit) for c in CASES)},
        },
        "saes": {f"sae{width}": {"dir": f"sae{width}"} for width in {c.width for c in CASES if c.verb in OF_SAE}},
        "reads": {name: read for name, read in reads.items() if name in used},
        "edits": {case.name: case.edit for case in CASES},
        "metrics": {"e": {"logprob": "e", "tokens": "sampling"},
                    "place": {"rank": "e", "tokens": {"steps": ["0..2"]}}},
        "prompts": {name: [{"id": name, "text": words}] for name, words in PROMPTS.items()},
        "arms": arms,
        "sampling": {k: v for k, v in GREEDY.items() if k != "logprobs"},
    }  # fmt: skip
    path = folder / f"{mode}.yaml"
    path.write_text(json.dumps(text))  # JSON is YAML
    return path


@dataclass(frozen=True)
class Served:
    lock: Mapping[str, Any]
    folder: Path
    finished: dict[str, Finished]


def serve(folder: Path, mode: str) -> Served:
    result = check_file(spec(folder, mode))
    assert result.plan is not None, [f"{d.code} {d.message}" for d in result.diagnostics]
    compiled, _ = compile_plan(result.plan)
    assert compiled is not None and result.plan.mode == mode
    block = folder / f"{mode}.block.py"
    block.write_text(compiled.block.source)
    with Engine(compiled.lock, folder, block, folder / f"manifest-{mode}") as engine:
        finished = list(engine.run(requests_of(result.plan), lambda _: GREEDY))
    return Served(compiled.lock, folder, {one.request.key: one for one in finished})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("language")
    return {mode: serve(folder, mode) for mode in ("eager", "taps")}


@pytest.fixture(scope="module")
def model() -> Iterator[HuggingFace]:
    sites = {c.site for c in CASES if c.kind not in (*NOT_HUGGING_FACE, "op")} | {OP_ALIAS}
    streams = {f"{alias}[{i}]" for i in range(LAYERS) for alias in ("resid_mid", "resid_post")}
    yield HuggingFace(str(tiny("llama")), "LlamaForCausalLM", sites | streams)


def under_the_alias(run: Served) -> tuple[Meant, dict[str, Finished]]:
    """The lock and the records with the op's location under the name of the alias."""
    lock = json.loads(json.dumps(run.lock).replace(OP, OP_ALIAS))
    finished = {}
    for key, one in run.finished.items():
        (completion,) = one.completions
        reads = {(n, OP_ALIAS if s == OP else s): rows for (n, s), rows in completion.record.reads.items()}
        record = replace(completion.record, reads=reads)
        finished[key] = replace(one, completions=(replace(completion, record=record),))
    return Meant(lock, run.folder), finished


def past(found: tuple[Comparison, ...]) -> list[str]:
    return [f"{c.request}: {c.what} {c.name} {c.site} {c.error:.1e}" for c in found if not c.ok]


def test_the_cases_cover_the_language() -> None:
    assert {(c.verb, c.kind) for c in CASES} == {(v, k) for v, f in VERBS.items() if callable(f) for k in KINDS}
    assert len({json.dumps(c.edit["tokens"]) for c in CASES}) == len(SELECTORS)
    assert set(READ) == {kind for kind, comparison in READS.items() if callable(comparison)}
    forms = {frozenset(c.edit[spelled(c.verb)]) & {"heads", "dims"} for c in CASES}
    assert forms == {frozenset(), frozenset({"heads"}), frozenset({"dims"}), frozenset({"heads", "dims"})}


@pytest.mark.parametrize("mode", ["eager", "taps"])
def test_every_verb_at_every_kind_of_location_is_hugging_face_s(
    mode: str, runs: dict[str, Served], model: HuggingFace
) -> None:
    meant, finished = under_the_alias(runs[mode])
    holder, measured, moved = Holder(meant, model), [], {}
    for key, one in finished.items():
        kind = next((c.kind for c in CASES if c.name == one.request.arm), None)
        if kind in NOT_HUGGING_FACE:
            continue
        held = holder.hold(one, GREEDY)
        assert held.skipped == ()
        measured += held.measured
        moved |= held.moved
        assert set(held.moved) == ({one.request.arm} if kind else set()), key
    bound = bound_of("float32")
    assert past(together(measured, bound)) == []
    # A check that could not fail would pass on a verb that does nothing.  A clamp leaves rows within its bounds alone.
    still = [edit for edit, size in moved.items() if size < 1e-2]
    assert all(edit.startswith("clamp_") for edit in still) and len(still) <= 1, still
    served = {edit.removesuffix("_heads") for edit in moved if edit.endswith("_heads")}
    assert served == {verb for verb, formula in VERBS.items() if callable(formula)}
    wrong = [c for one in finished.values() for c in meant.counts(one) if not c.same or not c.fired]
    assert wrong == []


def test_what_hugging_face_does_not_name_is_the_same_on_both_engines(runs: dict[str, Served]) -> None:
    names = [c.name for c in CASES if c.kind in NOT_HUGGING_FACE]
    pairs = [
        (runs["taps"].finished[key], one)
        for key, one in runs["eager"].finished.items()
        if one.request.arm in names
    ]  # fmt: skip
    assert len(pairs) == len(names)
    measured = [m for taps, eager in pairs for m in compared(taps, eager, "read", {})]
    assert {m.name for m in measured} >= {f"at_{name}" for name in names}
    assert past(together(measured, bound_of("float32"))) == []
    base = {one.request.group: one for one in runs["eager"].finished.values() if one.request.arm == "base"}
    for _, eager in pairs:
        assert eager.completions[0].logprobs != base[eager.request.group].completions[0].logprobs

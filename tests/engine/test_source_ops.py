"""Locations inside forwards on both engines: every op that a spec can name, against the same forward by hand.

Tiny random models in float32. One engine a family and mode serves it all: a read at each op of each layer, and edits
through ops beside requests that nothing edits, in the same batch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tests.engine.op_trials import EDITED, PUSH, TOKENS, TRIALS, ByHand, Trial
from tests.engine.plain_cohere import Cohere
from tests.engine.plain_forwards import Gemma3, Gpt2, Llama, Plain, Qwen3, Qwen3Moe
from tests.engine.plain_hybrids import GraniteHybrid, Lfm2
from tests.engine.runs import Case, Floats, Run, largest, run_spec
from tests.models import tiny
from vtaps.runtime.trees import tree_for
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.tree import ModelTree

pytestmark = pytest.mark.engine

BOUND = 2e-5
"""Largest difference from the reference, of the largest value in the row; 1.4e-6 has been seen."""

TWO_LAYERS = {"num_hidden_layers": 2}
FAMILIES: dict[str, tuple[type[Plain], dict[str, Any], tuple[str, ...]]] = {
    "llama": (Llama, TWO_LAYERS, ("eager", "taps")),
    "qwen3": (Qwen3, TWO_LAYERS, ("eager", "taps")),
    "gemma3": (Gemma3, TWO_LAYERS | {"layer_types": ["sliding_attention", "full_attention"]}, ("eager",)),
    "gpt2": (Gpt2, {"n_layer": 2}, ("eager", "taps")),
    "qwen3_moe": (Qwen3Moe, {}, ("eager", "taps")),
    "granitemoehybrid": (GraniteHybrid, {}, ("eager", "taps")),
    "cohere": (Cohere, {}, ("eager",)),
    # Without compilation vLLM's CPU kernel rotates queries of [T, heads, dims] by positions that are not theirs.
    "lfm2": (Lfm2, {}, ("taps",)),
}
"""The forward by hand, what differs from the configuration in ``data``, and the engine modes. Two layers have every
branch: the first has no residual yet, of a hybrid's one attends.

A start that compiles takes longest. Gemma's instrumented ops are views of the same kind as Qwen's.
"""

SHORT = [40, 75, 222, 17, 98, 113, 201]
LONG = [7 + (i * 37) % 250 for i in range(24)]
"""Longer than Gemma's sliding window of 16."""
FORWARDS = re.compile(
    r"model|transformer|(model\.layers|transformer\.h)\.\d+"
    r"(\.(self_attn|attn|mlp|feed_forward|block_sparse_moe|shared_mlp|short_conv|mamba))?"
)
"""The modules whose ops are read: the model that vLLM compiles, its decoder layers, and the attention, MLP, block of
experts or mixer in them."""

NAMED = ("gpt2",)
"""Each value in this forward has an alias or is a module's: none of them is instrumented."""

DEEP = {"llama": ("inside",), "cohere": ("inside", "input")}
"""Here the ops of the functions that these forwards call too, and what ops take in."""

UNFILLED = ("torch.empty", "torch.empty_like")
"""They make a tensor for a kernel to fill: what stands in it before is nobody's value."""


LAST_NORM = {"gpt2": "transformer.ln_f", "lfm2": "model.embedding_norm"}


WHOLE_STREAM = ("gpt2", "granitemoehybrid")
"""Their last norm puts out one tensor; the others' a residual beside it."""


def last_norm(family: str) -> str:
    return LAST_NORM.get(family, "model.norm")


def located(tree: ModelTree, deep: Sequence[str]) -> dict[str, str]:
    """Every spelling of an op in :data:`FORWARDS` that a spec can use → its site's name; ``deep``: see :data:`DEEP`."""
    found: dict[str, str] = {}
    for path, module in tree.modules.items():
        if module.forward is None or not FORWARDS.fullmatch(path):
            continue
        ops = tree.forwards[module.forward].ops
        unfilled = {op.name for op in ops if op.text in UNFILLED}
        named = [("", op) for op in ops if not {op.name, op.of} & unfilled]
        if "inside" in deep:
            called = [(f"{op.name}.source.", tree.forwards[op.inside]) for op in ops if op.inside in tree.forwards]
            named += [(prefix, op) for prefix, forward in called for op in forward.ops]
        for prefix, op in named:
            args = [f".{arg.place}" for arg in op.args if arg.key != ""] if "input" in deep else []
            for element in ("", *(f".output[{i}]" for i in range(8)), *args):
                text = f"{path}.source.{prefix}{op.name}{element}"
                sites, _ = locate(tree, text, Span("spec.yaml"))
                if sites:
                    (found[text],) = {site.name for site in sites}
    return found


def spec_of(family: str, mode: str, named: dict[str, str], folder: Path) -> str:
    """The arm ``base`` reads every op, every trial is an arm. JSON is YAML."""
    save_file({"push": PUSH}, folder / "vectors.safetensors")
    first = {site: text for text, site in reversed(named.items())}
    read = {"tokens": "all", "sees": "after_edits"}
    reads = {f"op_{n}": {"at": text, **read} for n, text in enumerate(first.values())}
    trials = TRIALS[family]
    pushed = any("add" in edit for trial in trials.values() for edit in trial.edits.values())
    return json.dumps(
        {
            "vtaps": 1,
            "model": {"path": str(tiny(family, **FAMILIES[family][1])), "dtype": "float32"},
            "engine": {
                "mode": mode,
                "vllm": {"max_model_len": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 16 << 20},
            },
            "vectors": {"push": {"file": "vectors.safetensors", "tensor": "push"}} if pushed else {},
            "reads": {
                **reads,
                "last": {"at": f"{last_norm(family)}.output" + "[0]" * (family not in WHOLE_STREAM), **read},
            },
            "edits": {
                f"{name}_{edit}": {"tokens": TOKENS, **fields}
                for name, trial in trials.items()
                for edit, fields in trial.edits.items()
            },
            "prompts": {"some": [{"id": "short", "ids": SHORT}, {"id": "long", "ids": LONG}]},
            "arms": {
                "base": {"reads": [*reads, "last"]},
                **{
                    name: {"edits": [f"{name}_{edit}" for edit in trial.edits], "reads": ["last"]}
                    for name, trial in trials.items()
                },
            },
            "sampling": {"temperature": 0, "max_tokens": 5, "ignore_eos": True},
        }
    )


class Reference:
    """A family's Hugging Face model, its forward by hand, and what a spec can name in it."""

    def __init__(self, family: str) -> None:
        plain, changes, _ = FAMILIES[family]
        folder = tiny(family, **changes)
        tree, problems = tree_for(folder, "float32")
        assert tree is not None, problems
        self.family, self.tree = family, tree
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.plain = plain(self.model)

    def edited(self, ids: Sequence[int], by_hand: Sequence[ByHand]) -> tuple[Floats, Floats]:
        """Logits ``[rows, vocab]`` and the last norm's output ``[rows, width]`` of Hugging Face's forward."""
        modules, last = dict(self.model.named_modules()), []

        def after(_: Any, __: Any, out: Any, change: ByHand) -> None:
            x = out[0] if isinstance(out, tuple) else out
            x[..., EDITED, :] = change.change(x[..., EDITED, :])

        def before(_: Any, args: Any, kwargs: Any, change: ByHand) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if change.side == "argument":
                x = x.clone()
            x[..., EDITED, :] = change.change(x[..., EDITED, :])
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        handles = [modules[last_norm(self.family)].register_forward_hook(lambda _, __, out: last.append(out))]
        for change in by_hand:
            module = modules[change.module]
            if change.side == "output":
                handles.append(module.register_forward_hook(functools.partial(after, change=change)))
            else:
                hook = functools.partial(before, change=change)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits[0].numpy(), last[0][0].numpy()


@dataclass(frozen=True)
class Served:
    family: str
    run: Run
    reference: Reference
    named: dict[str, str]
    trials: dict[str, Trial]

    def last(self, case: Case) -> Floats:
        (site,) = self.run.sites("last")
        positions, found = self.run.read("last", case, site)
        assert positions == list(range(case.rows))
        values: Floats = found
        return values


@pytest.fixture(scope="module")
def references() -> Callable[[str], Reference]:
    return functools.cache(Reference)


@pytest.fixture(scope="module", params=[(f, m) for f in FAMILIES for m in FAMILIES[f][2]], ids="-".join)
def served(
    request: pytest.FixtureRequest,
    references: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    family, mode = request.param
    reference, folder = references(family), tmp_path_factory.mktemp(f"{family}-{mode}")
    named = located(reference.tree, DEEP.get(family, ()))
    run = run_spec(spec_of(family, mode, named, folder), folder)
    assert {site["mode"] for site in run.lock["sites"].values()} == {"recorded" if mode == "taps" else mode}
    return Served(family, run, reference, named, TRIALS[family])


def off(found: Any, wanted: Any) -> float:
    """The largest difference in a row, of the row's largest value; the worst row's."""
    assert np.shape(found) == np.shape(wanted) and np.isfinite(found).all()
    differences = np.abs(np.float64(found) - wanted).max(-1)
    worst: float = (differences / np.abs(wanted).max(-1)).max()
    return worst


def greedy(logits: Floats, case: Case) -> tuple[int, ...]:
    """With the tokens that the engine went on with: equal, by induction, means that these are greedy's."""
    return tuple(int(t) for t in logits[case.prompt - 1 :].argmax(-1))


def test_every_op_equals_the_forward_by_hand(served: Served) -> None:
    run, named = served.run, served.named
    assert any(".source." in site for site in named.values()) == (served.family not in NAMED)
    sites = {site: read for read in run.result.reads if read != "last" for site in run.sites(read)}
    assert set(sites) == set(named.values())
    for case in run.cases("base").values():
        logits, values = served.reference.plain.forward(case.fed)
        assert greedy(logits, case) == case.generated
        # Forwards by hand that are made from Llama's say more than is read of theirs.
        deep = served.family in DEEP
        values = {name: x for name, x in values.items() if deep or name in named or name.count(".source.") == 1}
        assert set(values) == set(named), "not the same ops"
        wrong = []
        for text, site in named.items():
            positions, found = run.read(sites[site], case, site)
            assert positions == list(range(case.rows)), text
            if not off(found, values[text]) < BOUND:
                wrong.append(f"{text} ({site}) is off by {off(found, values[text]):.1e}")
        assert not wrong, "\n".join(wrong)


def test_the_forward_by_hand_equals_hugging_face(served: Served) -> None:
    """What is common to both copies of a forward, and wrong, would show here."""
    for case in served.run.cases("base").values():
        logits, last = served.reference.edited(case.fed, ())
        assert off(served.reference.plain.forward(case.fed)[0], logits) < BOUND
        assert off(served.last(case), last) < BOUND


def test_edits_through_ops(served: Served) -> None:
    """As by hand in Hugging Face's model, with neighbours in the batch that nothing edits or another trial does."""
    for name, trial in served.trials.items():
        for case in served.run.cases(name).values():
            logits, last = served.reference.edited(case.fed, trial.by_hand)
            assert greedy(logits, case) == case.generated, name
            assert off(served.last(case), last) < BOUND, name
            unedited, _ = served.reference.edited(case.fed, ())
            assert largest(unedited[EDITED], logits[EDITED]) > 1e-2, f"{name} does next to nothing"
            for edit in trial.edits:
                assert served.run.fired(f"{name}_{edit}", case) == (case.rows - 1, case.rows - 1)

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

from tests.engine.plain_forwards import Plain
from tests.engine.runs import Case, Floats, Run, largest, run_spec
from tests.models import tiny
from vtaps.runtime.trees import tree_for
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.tree import ModelTree

pytestmark = pytest.mark.engine

BOUND = 2e-5
"""Largest difference from the reference, of the largest value in the row."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_layer": 2},
    "qwen3_moe": {},
    "lfm2": {},  # the hybrid: short convolution, attention, short convolution
}
"""What differs from the configuration in ``data``. Two layers have every branch: the first has no residual yet."""
MODES = ("eager", "taps")

SHORT = [40, 75, 222, 17, 98, 113, 201]
LONG = [7 + (i * 37) % 250 for i in range(24)]
"""Longer than Gemma's sliding window of 16."""
WIDTH = 128
PUSH = np.random.default_rng(5).standard_normal(WIDTH).astype(np.float32)

FORWARDS = re.compile(r"(model\.layers|transformer\.h)\.\d+(\.(self_attn|attn|mlp|feed_forward|short_conv))?")
"""The modules whose ops are read: decoder layers, attention, MLPs and blocks of experts, the short convolution."""

UNFILLED = re.compile(r"model\.layers\.\d+\.source\.(torch_empty_like|output)_0")
"""LFM2 makes a tensor that its convolution fills: what stands in it before is nobody's value."""


@dataclass(frozen=True)
class ByHand:
    """``change`` of the rows ``[…, n, columns]`` of a module's input or output in the Hugging Face model, in place."""

    module: str
    side: str
    change: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """Edits of a spec, name → edit without its rows, and what they come to in the Hugging Face model."""

    edits: dict[str, dict[str, Any]]
    by_hand: tuple[ByHand, ...]


def scaled(by: float, heads: slice = slice(None)) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[..., heads] *= by
        return out

    return change


ZERO: dict[str, Any] = {"zero": {}}
PUSHED: dict[str, Any] = {"add": {"vector": "push"}}
ATTENTION = "model.layers.1.self_attn"
TRIALS: dict[str, dict[str, Trial]] = {
    "llama": {
        "zero_q": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_0", **ZERO}},  # the alias q[1]
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
    },
    "qwen3": {
        "zero_head": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_view_0", "zero": {"heads": [1]}}},
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0, slice(32, 64))),),
        ),
    },
    "gemma3": {
        "scale_k": Trial(
            {"scale": {"at": f"{ATTENTION}.source.k_flatten_0", "scale": {"by": -1.5}}},
            (ByHand(f"{ATTENTION}.k_norm", "output", scaled(-1.5)),),
        ),
    },
    "gpt2": {
        "scale_sum": Trial(
            {"scale": {"at": "transformer.h.1.source.binop_add_0", "scale": {"by": -0.5}}},
            (ByHand("transformer.h.1.ln_2", "input", scaled(-0.5)),),
        ),
        # An op and the module around it: input, op, op, output. Each order of two gives another value.
        "around": Trial(
            {
                "add_before": {"at": "transformer.h.0.input.hidden_states", **PUSHED},
                "scale_first": {"at": "transformer.h.0.source.residual_0", "scale": {"by": 2.0}},
                "scale_last": {"at": "transformer.h.0.source.binop_add_1", "scale": {"by": -3.0}},
                "add_after": {"at": "transformer.h.0.output", **PUSHED},
            },
            (
                ByHand("transformer.h.0", "input", lambda x: (x + torch.from_numpy(PUSH)) * 2.0),
                ByHand("transformer.h.0", "output", lambda x: x * -3.0 + torch.from_numpy(PUSH)),
            ),
        ),
    },
    "qwen3_moe": {
        "zero_q": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_0", **ZERO}},  # no alias table: an element of what the split gives
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "scale_fed": Trial(
            {"scale": {"at": "model.layers.0.mlp.source.hidden_states_view_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0.mlp", "input", scaled(-0.5)),),
        ),
    },
    "lfm2": {
        "scale_v": Trial(
            {"scale": {"at": f"{ATTENTION}.source.v_0", "scale": {"by": -1.5}}},
            (ByHand(f"{ATTENTION}.v_proj", "output", scaled(-1.5)),),
        ),
        "zero_head": Trial(
            {"zero": {"at": f"{ATTENTION}.source.k_view_0", "zero": {"heads": [1]}}},
            (ByHand(f"{ATTENTION}.k_proj", "output", scaled(0.0, slice(32, 64))),),
        ),
    },
}
TOKENS = {"rows": "all", "except": {"positions": [0]}}
"""The rows of every edit; by hand :data:`EDITED`."""
EDITED = slice(1, None)

LAST_NORM = {"gpt2": "transformer.ln_f", "lfm2": "model.embedding_norm"}


def last_norm(family: str) -> str:
    return LAST_NORM.get(family, "model.norm")


def located(tree: ModelTree) -> dict[str, str]:
    """Every spelling of an op in :data:`FORWARDS` that a spec can use → the name of its site."""
    found: dict[str, str] = {}
    for path, module in tree.modules.items():
        if not FORWARDS.fullmatch(path) or module.forward is None:
            continue
        for op in tree.forwards[module.forward].ops:
            for element in ("", *(f".output[{i}]" for i in range(8))):
                text = f"{path}.source.{op.name}{element}"
                sites, _ = locate(tree, text, Span("spec.yaml"))
                if sites and not UNFILLED.match(text):
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
            "model": {"path": str(tiny(family, **FAMILIES[family])), "dtype": "float32"},
            "engine": {
                "mode": mode,
                "vllm": {"max_model_len": 64, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 16 << 20},
            },
            "vectors": {"push": {"file": "vectors.safetensors", "tensor": "push"}} if pushed else {},
            "reads": {
                **reads,
                "last": {"at": f"{last_norm(family)}.output" + "[0]" * (family != "gpt2"), **read},
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
        folder = tiny(family, **FAMILIES[family])
        tree, problems = tree_for(folder, "float32")
        assert tree is not None, problems
        self.family, self.named = family, located(tree)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.plain = Plain(self.model)

    def edited(self, ids: Sequence[int], by_hand: Sequence[ByHand]) -> tuple[Floats, Floats]:
        """Logits ``[rows, vocab]`` and the last norm's output ``[rows, width]`` of Hugging Face's forward."""
        modules, last = dict(self.model.named_modules()), []

        def after(_: Any, __: Any, out: Any, change: ByHand) -> None:
            x = out[0] if isinstance(out, tuple) else out
            x[..., EDITED, :] = change.change(x[..., EDITED, :])

        def before(_: Any, args: Any, kwargs: Any, change: ByHand) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            x[..., EDITED, :] = change.change(x[..., EDITED, :])

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
    run: Run
    mode: str
    reference: Reference

    def last(self, case: Case) -> Floats:
        (site,) = self.run.sites("last")
        positions, found = self.run.read("last", case, site)
        assert positions == list(range(case.rows))
        values: Floats = found
        return values


@pytest.fixture(scope="module")
def references() -> Callable[[str], Reference]:
    return functools.cache(Reference)


@pytest.fixture(scope="module", params=[(f, m) for f in FAMILIES for m in MODES], ids="-".join)
def served(
    request: pytest.FixtureRequest,
    references: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    family, mode = request.param
    reference, folder = references(family), tmp_path_factory.mktemp(f"{family}-{mode}")
    run = run_spec(spec_of(family, mode, reference.named, folder), folder)
    assert {site["mode"] for site in run.lock["sites"].values()} == {"recorded" if mode == "taps" else mode}
    return Served(run, mode, reference)


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
    run, reference = served.run, served.reference
    inside = [site for site in set(reference.named.values()) if ".source." in site]
    assert inside, "no forward is instrumented, which proves little"
    sites = {site: read for read in run.result.reads if read != "last" for site in run.sites(read)}
    assert set(sites) == set(reference.named.values())
    for case in run.cases("base").values():
        logits, values = reference.plain.forward(case.fed)
        assert greedy(logits, case) == case.generated
        assert set(values) == set(reference.named), "the forward by hand has other ops"
        wrong = []
        for text, site in reference.named.items():
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
    for name, trial in TRIALS[served.reference.family].items():
        for case in served.run.cases(name).values():
            logits, last = served.reference.edited(case.fed, trial.by_hand)
            assert greedy(logits, case) == case.generated, name
            assert off(served.last(case), last) < BOUND, name
            unedited, _ = served.reference.edited(case.fed, ())
            assert largest(unedited[EDITED], logits[EDITED]) > 1e-2, f"{name} does next to nothing"
            for edit in trial.edits:
                assert served.run.fired(f"{name}_{edit}", case) == (case.rows - 1, case.rows - 1)

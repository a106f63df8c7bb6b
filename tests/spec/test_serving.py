"""Which locations can be taps, and what each engine mode makes of a spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.spec.trees import FAMILIES, tree
from tests.trees import DATA, seed_cache
from vtaps.check import CheckResult, check_file
from vtaps.compiling import compile_plan
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.places import Refused, resolve_place
from vtaps.spec.serving import Compiled, between_all_reduce_and_norm, compiled_part
from vtaps.spec.tree import ModelTree, Module, Site
from vtaps.summary import describe


def site(at: ModelTree, text: str) -> Site:
    (found,), problems = locate(at, text, Span("s.yaml"))
    assert problems == []
    return found


ROOTS = {
    **dict.fromkeys((*FAMILIES, "opt", "smollm2"), "model"),
    "gpt2": "transformer",
    "ernie4_5": "",  # vLLM decorates Ernie's whole model, above LlamaModel
}


@pytest.mark.parametrize("family", ROOTS)
def test_the_compiled_module_is_the_decorated_one(family: str) -> None:
    """As in vLLM 0.32's sources: ``@support_torch_compile`` stands above LlamaModel, GPT2Model, OPTModel (and not
    OPTDecoder, which holds the layers), …"""
    at = tree(family)
    root = compiled_part(at).root
    assert root == ROOTS[family]
    assert at.modules[root].cls in (
        "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GemmaModel", "Gemma2Model", "Gemma3Model",
        "GPT2Model", "OPTModel", "Ernie4_5ForCausalLM",
    )  # fmt: skip


@pytest.mark.parametrize("family", ROOTS)
def test_every_place_that_can_be_named_is_recorded(family: str) -> None:
    at = tree(family)
    compiled = compiled_part(at)
    named = []
    for path, module in at.modules.items():
        for side, elements in (("input", [name for name, _ in module.inputs]), ("output", [None, 0, 1])):
            for element in elements:
                try:
                    named.append(resolve_place(at, path, side, element))
                except Refused:
                    continue
    inside = [s for s in named if s.module]
    assert len(inside) > 20
    assert {s.name: tap for s in inside if (tap := compiled.tap(s)) != "recorded"} == {"logits": "hook"}


@pytest.mark.parametrize(
    ("family", "text", "name"),
    [
        ("granitemoehybrid", "model.source.hidden_states_2", "model.source.hidden_states_2.output"),
        ("qwen3moe", "model.source.hidden_states_1", "embed"),
        ("falcon", "transformer.source.self_embed_input_ids_0", "transformer.source.self_embed_input_ids_0.output"),
        ("llama", "model.source.hidden_states_1", "embed"),
        ("gpt2", "transformer.source.hidden_states_0", "resid_pre[0]"),
        ("mistral", "model.source.forward_0", "final_norm"),
    ],
)
def test_what_the_compiled_module_s_own_forward_computes_is_recorded(family: str, text: str, name: str) -> None:
    at = tree(family)
    found = site(at, text)
    assert (found.name, compiled_part(at).tap(found)) == (name, "recorded")


def test_dbrx_is_not_compiled() -> None:
    at = tree("dbrx")
    compiled = compiled_part(at)
    stream = site(at, "transformer.blocks.1.output")
    assert compiled.root is None and compiled.tap(stream) is None
    assert "vLLM does not compile DbrxForCausalLM" in compiled.why_not(stream)


@pytest.mark.parametrize(
    ("module", "order", "tap", "why"),
    [
        ("language.model.layers.3.mlp", 20, "recorded", ""),
        ("language.model.norm", 30, "recorded", ""),
        ("lm_head", 41, "hook", ""),
        ("logits_processor", 42, "hook", ""),
        ("language.model", 40, None, "it is the compiled model, `language.model`"),
        ("language", 40, None, "runs outside the compiled model, `language.model`"),
        ("", 50, None, "runs outside the compiled model"),
        ("vision", 1, None, "runs before the compiled model"),
        ("language.modelling", 1, None, "runs before the compiled model"),
    ],
)
def test_around_the_compiled_module(module: str, order: int, tap: str | None, why: str) -> None:
    compiled = Compiled("SomeModel", "language.model", 39)
    place = Site(f"{module}.output", module, "output", None, "tensor", order)
    assert compiled.tap(place) == tap
    assert tap is not None or why in compiled.why_not(place)


@pytest.mark.parametrize(("module", "tap"), [("language.model", "recorded"), ("language", None), ("vision", None)])
def test_an_op_around_the_compiled_module(module: str, tap: str | None) -> None:
    place = Site(f"{module}.source.x_0.output", module, "output", None, "tensor", 1, op="x_0", forward="f")
    assert Compiled("SomeModel", "language.model", 39).tap(place) == tap


def test_without_a_table_the_layers_are_the_list_under_which_most_is_called() -> None:
    """Beside a list of image blocks that a pass over text does not call, and inside a model in a model."""
    modules = [
        Module("", "Outer", enter=0, leave=20, calls=1),
        Module("vision", "Vision"),
        Module("vision.blocks", "ModuleList"),
        *(Module(f"vision.blocks.{i}", "Block") for i in range(9)),
        Module("text", "Text", enter=1, leave=19, calls=1),
        Module("text.model", "Decoder"),
        Module("text.model.layers", "ModuleList"),
        *(Module(f"text.model.layers.{i}", "Layer", enter=2 + i, leave=8 + i, calls=1) for i in range(2)),
    ]
    at = replace(tree("opt"), architecture="Outer", modules={m.path: m for m in modules})
    assert compiled_part(at) == Compiled("Outer", "text.model", 9)
    # A tree without values says nothing of calls: the parent of the layers stands in.
    silent = {p: Module(p, m.cls) for p, m in tree("llama").modules.items()}
    assert compiled_part(replace(tree("llama"), modules=silent, unvalued="no")).root == "model"
    assert compiled_part(replace(at, modules={"": modules[0]})).root is None


def test_which_edits_part_an_all_reduce_from_its_norm() -> None:
    llama, gemma, gpt2 = tree("llama"), tree("gemma2"), tree("gpt2")
    for at, text, parted in [
        (llama, "resid_post[1]", True),
        (llama, "resid_mid[1]", True),
        (llama, "z[1]", False),
        (llama, "final_norm", False),
        (gemma, "resid_post[1]", False),
        (gpt2, "resid_post[1]", False),
    ]:
        assert between_all_reduce_and_norm(at.architecture, site(at, text)) is parted, text


# Whole specs ------------------------------------------------------------------------------------------------


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    seed_cache(tmp_path / "cache", monkeypatch)

    def check(engine: str, at: str = "resid_post[1]", family: str = "llama") -> CheckResult:
        text = f"""vtaps: 1
model: {{path: {DATA}/configs/{family}, tokenizer: {DATA}/tokenizer, dtype: float32}}
engine: {engine}
reads: {{stream: {{at: "{at}", tokens: sampling}}}}
edits: {{off: {{at: "{at}", tokens: all, zero: {{}}}}}}
prompts: {{facts: [{{id: france, text: "The capital of France is"}}]}}
arms: {{base: {{reads: [stream]}}, edited: {{edits: [off]}}}}
"""
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return check_file(tmp_path / "spec.yaml")

    return check


def test_auto_takes_taps(checked) -> None:  # type: ignore[no-untyped-def]
    plan = checked("{mode: auto, vllm: {max_num_seqs: 8, max_num_batched_tokens: 64}}").plan
    assert (plan.mode, [p.mode for p in plan.locations]) == ("taps", ["recorded"])
    told = describe(plan)
    assert "taps (auto: every location is inside the compiled model" in told
    # One row a request, 128 columns of float32, for two steps.
    assert "1 location, one launch each; slots for up to 1 row a step, 32.0 KiB of 4.0 GiB allowed" in told
    assert "for at most 1 request at once and 64 tokens a step" in told
    assert "resid_post[1]: one GPU loses no fusion" in told
    lock = compile_plan(plan)[0].lock
    assert lock["engine"]["mode"] == "taps" and lock["engine"]["tap_memory"] == 4 * 2**30
    assert lock["sites"]["resid_post[1]"]["mode"] == "recorded"
    assert lock["reads"]["stream"]["step_rows"] == 1


def test_auto_takes_taps_for_the_compiled_module_s_own_forward(checked) -> None:  # type: ignore[no-untyped-def]
    at = "model.source.hidden_states_2"
    plan = checked("{}", at, "granitemoehybrid").plan
    assert (plan.mode, [p.mode for p in plan.locations]) == ("taps", ["recorded"])
    lock = compile_plan(plan)[0].lock
    (forward,) = lock["forwards"]
    assert forward.endswith("GraniteMoeHybridModel.forward")
    assert lock["sites"][f"{at}.output"]["forward"] == forward
    other = compile_plan(checked("{}", "model.source.self_embed_input_ids_0", "granitemoehybrid").plan)[0]
    assert other.lock["block"]["structure"] != lock["block"]["structure"]


def test_auto_falls_back_and_says_why(checked) -> None:  # type: ignore[no-untyped-def]
    result = checked("{}", "transformer.blocks[0, 1].output", "dbrx")
    assert result.diagnostics == []
    assert result.plan.mode == "eager"
    told = describe(result.plan)
    assert "eager (auto: transformer.blocks.0.output is not a tap: vLLM does not compile DbrxForCausalLM" in told
    assert "costs compile and CUDA graphs" in told and "67.5" in told and "slots" not in told
    assert compile_plan(result.plan)[0].lock["sites"]["transformer.blocks.0.output"]["mode"] == "eager"


def test_eager_by_name(checked) -> None:  # type: ignore[no-untyped-def]
    plan = checked("{mode: eager, tap_memory: 1 kB}").plan
    assert (plan.mode, plan.reason, [p.mode for p in plan.locations]) == ("eager", "asked for in the spec", ["eager"])


def test_taps_by_name_is_held_to_it(checked) -> None:  # type: ignore[no-untyped-def]
    assert checked("{mode: taps}").plan.mode == "taps"
    result = checked("{mode: taps}", "transformer.blocks[0, 1].output", "dbrx")
    assert {d.code for d in result.diagnostics} == {"VT209"} and result.plan is None
    assert "(and 1 more alike)" in result.diagnostics[0].message


def test_arguments_about_compiling_are_the_user_s_own(checked) -> None:  # type: ignore[no-untyped-def]
    own = "compilation_config: {cudagraph_mode: FULL_DECODE_ONLY}, max_cudagraph_capture_size: 16"
    plan = checked(f"{{mode: taps, vllm: {{{own}}}}}").plan
    lock = compile_plan(plan)[0].lock
    assert lock["engine"]["vllm"] == {
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}, "max_cudagraph_capture_size": 16
    }  # fmt: skip


def test_sequence_parallelism_does_not_go_with_taps(checked) -> None:  # type: ignore[no-untyped-def]
    own = "vllm: {compilation_config: {pass_config: {enable_sp: true}}}"
    (found,) = checked(f"{{mode: taps, {own}}}").diagnostics
    assert found.code == "VT503" and "enable_sp" in found.message and found.span.line == 3
    plan = checked(f"{{mode: auto, {own}}}").plan
    assert plan.mode == "eager" and "engine.vllm.compilation_config.pass_config.enable_sp" in plan.reason
    assert checked(f"{{mode: auto, {own.replace('true', 'false')}}}").plan.mode == "taps"


def test_the_block_is_the_same_under_both_engines(checked) -> None:  # type: ignore[no-untyped-def]
    def code(engine: str) -> tuple[str, list[str]]:
        block = compile_plan(checked(engine).plan)[0].block
        return block.structure, [line for line in block.source.splitlines() if "spec" not in line]

    assert code("{mode: taps}") == code("{mode: eager}") == code("{tap_memory: 1 GiB}")

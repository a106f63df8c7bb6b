"""``**``: which outputs it is, what it costs, and which engine serves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.spec.trees import FAMILIES, OTHERS, tree
from tests.trees import DATA, seed_cache
from vtaps.check import CheckResult, check_file
from vtaps.compiling import compile_plan
from vtaps.spec.diagnostics import Span
from vtaps.spec.everywhere import everywhere
from vtaps.spec.locations import locate
from vtaps.spec.places import columns_of
from vtaps.spec.tree import ModelTree, Module, Value
from vtaps.summary import describe

LAYERS = 4


def layer(i: int, *names: str) -> list[str]:
    return [name.format(i=i) for name in names]


LLAMA = [
    "embed",
    *(
        name
        for i in range(LAYERS)
        for name in layer(
            i, "ln1[{i}]", "model.layers.{i}.self_attn.qkv_proj.output", "z[{i}]", "attn_out[{i}]", "ln2[{i}]",
            "model.layers.{i}.mlp.gate_up_proj.output", "mlp_post[{i}]", "mlp_out[{i}]", "resid_post[{i}]",
        )
    ),
    "final_norm",
]  # fmt: skip
GPT2 = [
    "embed", "transformer.wpe.output",
    *(
        name
        for i in range(LAYERS)
        for name in layer(
            i, "ln1[{i}]", "transformer.h.{i}.attn.c_attn.output", "z[{i}]", "attn_out[{i}]", "ln2[{i}]",
            "transformer.h.{i}.mlp.c_fc.output", "mlp_out[{i}]", "resid_post[{i}]",
        )
    ),
    "final_norm",
]  # fmt: skip


@pytest.mark.parametrize(("family", "names"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_each_output_once_in_the_order_of_the_forward(family: str, names: list[str]) -> None:
    """One that a module takes over from what it holds (``mlp`` from ``down_proj``) has one name."""
    assert [site.name for site in everywhere(tree(family)).sites] == names


def kept(module: Module, values: list[Value]) -> int:
    return sum(columns_of(v) is not None for v in values)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_what_is_called_is_there_or_is_left_out_by_name(family: str) -> None:
    at = tree(family)
    every = everywhere(at)
    assert len({s.name for s in every.sites}) == len(every.sites) and len(every.sites) > 20
    assert all(s.editable and s.width for s in every.sites)
    here = {(s.module, s.side) for s in every.sites}
    for path, module in at.modules.items():
        if not path or not module.calls or module.output is None:
            continue
        told = any(text.startswith(f"{path}.output") for text in every.left_out)
        found, problems = locate(at, f"{path}.output" if module.output.kind == "tensor" else f"{path}.output[0]",
                                 Span("s.yaml"))  # fmt: skip
        named = bool(found) and found[0] in every.sites
        # Of a pair the sum is there, under the module's own path.
        assert told or named or (path, "output") in here, (path, problems)


def test_halves_of_the_stream_are_summed_where_a_table_says_that_they_are_halves() -> None:
    pairs = [s for s in everywhere(tree("llama")).sites if s.value == "pair"]
    assert [s.name for s in pairs] == [f"resid_post[{i}]" for i in range(LAYERS)]
    names = [s.name for s in everywhere(tree("dbrx")).sites]
    halves = "transformer.blocks.2.norm_attn_norm.output[{}]"
    assert halves.format(0) in names and halves.format(1) in names


def test_what_is_left_out_is_told_with_why() -> None:
    stream = "the stream, which it hands on"
    assert everywhere(tree("llama")).left_out == (
        "model.layers.0.self_attn.rotary_emb.output: one RotaryEmbedding for 4 places",
        f"model.layers.*.post_attention_layernorm.output[1], 4 times: {stream}",
        f"model.layers.*.input_layernorm.output[1], 3 times: {stream}",
        f"model.norm.output[1]: {stream}",
    )
    odd = {"ids": Value("tensor", "int64", ("T", 4)), "scales": Value("tensor", "float32", (4,))}
    modules = {
        "": Module("", "M", calls=1, enter=0, leave=9, output=Value("tensor", "float32", ("T", 8))),
        **{
            name: Module(name, "Odd", calls=1, enter=1, leave=2, output=value)
            for name, value in odd.items()
        },
    }  # fmt: skip
    found = everywhere(replace(tree("opt"), architecture="M", modules=modules))
    assert found.sites == ()
    assert found.left_out == (
        "ids.output: int64[T, 4], not the model's float32",
        "scales.output: [4] has no row axis",
    )


def test_a_tree_without_values_has_no_outputs_and_says_why() -> None:
    silent: ModelTree = replace(
        tree("llama"), modules={p: Module(p, m.cls) for p, m in tree("llama").modules.items()}, unvalued="no kernel"
    )
    sites, (problem,) = locate(silent, "**", Span("s.yaml"))
    assert sites == () and (problem.code, problem.note) == ("VT208", "no kernel")


# Whole specs ------------------------------------------------------------------------------------------------


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    seed_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "probes.py").write_text("def first(rows):\n    return rows[:, 0]\n", encoding="utf-8")

    def check(reads: str, arm: str = "{reads: [every]}", engine: str = "{}") -> CheckResult:
        text = f"""vtaps: 1
model: {{path: {DATA}/configs/llama, tokenizer: {DATA}/tokenizer, dtype: float32}}
engine: {engine}
reads: {{{reads}}}
edits: {{flip: {{at: "**", tokens: all, python: "probes.py:first"}}}}
prompts: {{facts: [{{id: france, ids: [5, 6, 7]}}]}}
arms: {{base: {arm}}}
sampling: {{max_tokens: 2}}
"""
        (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
        return check_file(tmp_path / "spec.yaml")

    return check


def test_check_counts_and_prices_it(checked) -> None:  # type: ignore[no-untyped-def]
    result = checked('every: {at: "**", tokens: all}, felt: {at: "**", tokens: all, python: "probes.py:first"}',
                     "{reads: [every, felt]}")  # fmt: skip
    assert result.ok, result.diagnostics
    told = describe(result.plan)
    assert (
        "engine    eager (auto: reads.every is at `**`, every module output, which only the eager engine serves" in told
    )
    # embed and final_norm are 128 wide; of a layer seven places, and q, k, v, gate and up side by side.
    numbers = 2 * 128 + LAYERS * (6 * 128 + 256 + 256 + 512)
    # Rows 0 … 3; a step holds the prompt's three, and there are slots for two steps.
    assert (
        f"38 module outputs, each a call of Python in every step; reads take up to {numbers * 24 / 1024:.1f} KiB"
        in told
    )
    assert f"read      every: rows at ** (38 module outputs), up to 152 rows, {numbers * 16 / 1024:.1f} KiB" in told
    assert "read      felt: python at ** (38 module outputs), up to 152 rows, as wide as its function makes" in told
    assert "without model.layers.*.post_attention_layernorm.output[1], 4 times" in told
    lock = compile_plan(result.plan)[0].lock
    assert lock["reads"]["felt"]["sites"] == LLAMA == lock["reads"]["every"]["sites"]
    assert {s["mode"] for s in lock["sites"].values()} == {"eager"}


def test_only_an_arm_that_takes_it_needs_the_eager_engine(checked) -> None:  # type: ignore[no-untyped-def]
    reads = 'every: {at: "**", tokens: all}, one: {at: "resid_post[1]", tokens: all}'
    assert checked(reads, "{reads: [one]}").plan.mode == "taps"
    assert checked(reads, "{reads: [one, every]}").plan.mode == "eager"
    edited = checked('one: {at: "ln2[1]", tokens: all, sees: after_edits}', "{reads: [one], edits: [flip]}").plan
    assert edited.reason.startswith("auto: edits.flip is at `**`")


def test_a_python_read_is_a_break(checked) -> None:  # type: ignore[no-untyped-def]
    read = 'every: {at: "resid_post[1]", tokens: all, python: "probes.py:first"}'
    result = checked(read)
    assert result.plan.mode == "taps" and [p.mode for p in result.plan.locations] == ["break"]
    assert "1 at a break for Python" in result.plan.reason
    assert "reads.every" in describe(result.plan)
    locked = compile_plan(result.plan)[0].lock
    assert locked["reads"]["every"]["python"]["digest"] == locked["outside"]["probes.py"]


def test_its_rows_are_held_against_tap_memory_on_the_eager_engine(checked) -> None:  # type: ignore[no-untyped-def]
    numbers = 2 * 128 + LAYERS * (6 * 128 + 256 + 256 + 512)
    fits = checked('every: {at: "**", tokens: all}', engine=f"{{mode: eager, tap_memory: {numbers * 24}}}")
    assert fits.ok, fits.diagnostics
    short = checked('every: {at: "**", tokens: all}', engine=f"{{mode: eager, tap_memory: {numbers * 24 - 1}}}")
    assert [d.code for d in short.diagnostics if d.severity == "error"] == ["VT321"]
    assert checked('every: {at: "resid_post[*]", tokens: all}', engine="{mode: eager, tap_memory: 1}").ok


def test_each_output_is_a_point_of_a_sweep(checked) -> None:  # type: ignore[no-untyped-def]
    plan = checked("", "{edits: [flip], sweep: {flip.at: each}}").plan
    assert [p.values for p in plan.arms["base"].points] == [{"flip.at": name} for name in LLAMA]

"""The grammar of locations and what each resolves to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.spec.trees import tree
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.layers import parse_layers, render_layers
from vtaps.spec.locations import locate
from vtaps.spec.tree import Site

SPAN = Span("spec.yaml", 3, 7, 3, 20)


def sites(text: str, family: str = "smollm2") -> tuple[Site, ...]:
    found, problems = locate(tree(family), text, SPAN)
    assert not problems, problems
    return found


def refused(text: str, family: str = "smollm2") -> Diagnostic:
    found, problems = locate(tree(family), text, SPAN)
    assert found == () and len(problems) == 1, (found, problems)
    assert problems[0].span == SPAN
    return problems[0]


# The layer grammar


@given(st.lists(st.integers(0, 99), min_size=1))
def test_any_layers_render_and_parse_back(layers: list[int]) -> None:
    assert parse_layers(render_layers(layers)).select(100) == tuple(sorted(set(layers)))


@given(st.lists(st.integers(-100, 99), min_size=1))
def test_negative_layers_count_from_the_end(layers: list[int]) -> None:
    written = ", ".join(str(n) for n in layers)
    assert parse_layers(written).select(100) == tuple(sorted({n % 100 for n in layers}))


@given(st.integers(-100, 99), st.integers(-100, 99))
def test_ranges_are_inclusive(first: int, last: int) -> None:
    expected = list(range(first % 100, last % 100 + 1))
    if expected:
        assert parse_layers(f"{first}..{last}").select(100) == tuple(expected)


@given(st.text(alphabet="modelayrs.*[]-0123456789,input_putresd \n\0é", max_size=40))
@example("[" * 600)
@example("resid_post[" + "9" * 5000 + "]")
@example("model.layers.٣.mlp.output")
@settings(max_examples=500, deadline=None)
def test_arbitrary_text_is_resolved_or_refused_but_never_raises(text: str) -> None:
    found, problems = locate(tree("llama"), text, SPAN)
    assert bool(found) != bool(problems)
    assert all(p.code.startswith("VT20") for p in problems)


# One place, many spellings


@pytest.mark.parametrize(
    "spellings",
    [
        ("z[3]", "model.layers.3.self_attn.o_proj.input", "model.layers.3.self_attn.attn.output"),
        ("z[-1]", "model.layers.29.self_attn.o_proj.input.input_", "layers.-1.self_attn.o_proj.input"),
        ("mlp_out[3]", "model.layers.3.mlp.output", "model.model.layers.3.mlp.output", "layers[3].mlp.output"),
        ("mlp_out[3]", "model.layers.3.mlp.down_proj.output", "model.layers.3.mlp.down_proj.output[0]"),
        ("attn_out[3]", "layers.3.self_attn.output", "layers.3.post_attention_layernorm.input.x"),
        ("ln1[3]", "layers.3.self_attn.input.hidden_states", "layers.3.input_layernorm.output[0]"),
        ("ln1[0]", "layers.0.input_layernorm.output"),
        ("ln2[3]", "layers.3.mlp.input", "layers.3.mlp.gate_up_proj.input"),
        ("mlp_post[3]", "layers.3.mlp.down_proj.input", "layers.3.mlp.act_fn.output"),
        ("rot_q[3]", "layers.3.self_attn.attn.input.query", "layers.3.self_attn.attn.input"),
        ("v[3]", "layers.3.self_attn.attn.input.value"),
        ("embed", "resid_pre[0]", "embed_tokens.output", "layers.0.input.hidden_states"),
        ("resid_post[3]", "resid_pre[4]"),
        ("final_norm", "norm.output[0]", "model.output"),
    ],
)
def test_spellings_of_one_tensor_are_one_site(spellings: tuple[str, ...]) -> None:
    found = {sites(text) for text in spellings}
    assert len(found) == 1, found


def test_the_canonical_name_has_no_negative_layer() -> None:
    assert [s.name for s in sites("resid_post[-1, -30, 10..12]")] == [
        "resid_post[0]",
        "resid_post[10]",
        "resid_post[11]",
        "resid_post[12]",
        "resid_post[29]",
    ]


def test_a_list_of_layers_and_a_star_select_alike() -> None:
    assert sites("model.layers[0..29].mlp.output") == sites("model.layers.*.mlp.output") == sites("mlp_out[*]")
    assert sites("resid_post[5, 3..6, -25]") == sites("resid_post[3..6]")


def test_order_is_the_order_of_a_forward() -> None:
    names = ["embed", "ln1", "v", "rot_q", "z", "attn_out", "resid_mid", "ln2", "mlp_post", "mlp_out", "resid_post"]
    orders = [sites(n if n == "embed" else f"{n}[0]")[0].order for n in names]
    assert orders == sorted(orders)
    assert sites("resid_post[0]")[0].order < sites("ln1[1]")[0].order < sites("final_norm")[0].order


def test_one_half_of_the_stream_stays_reachable_and_is_not_the_stream() -> None:
    (half,) = sites("model.layers.3.output[0]")
    assert (half.value, half.alias, half.layer, half.element) == ("tensor", None, 3, 0)
    (stream,) = sites("resid_post[3]")
    assert (stream.value, stream.element, stream.residual) == ("pair", 0, 1)
    (mid,) = sites("resid_mid[3]")
    assert (mid.side, mid.element, mid.residual) == ("input", "x", "residual")


def test_a_raw_place_has_the_width_that_the_model_has() -> None:
    (fused,) = sites("layers.3.self_attn.qkv_proj.output")
    assert (fused.name, fused.width) == ("model.layers.3.self_attn.qkv_proj.output", 9 * 64 + 2 * 3 * 64)
    assert sites("layers.3.self_attn.qkv_proj.output[0]") == (fused,)
    (gate,) = sites("layers.3.mlp.gate_up_proj.output")
    assert gate.width == 2 * 1536


# Refusals


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "VT201"),
        ("resid_post", "VT201"),
        ("resid_post[]", "VT201"),
        ("resid_post[3", "VT201"),
        ("resid_post[[3]]", "VT201"),
        ("resid_post[12..8]", "VT201"),
        ("resid_post[1.5]", "VT201"),
        ("resid_post[3].output", "VT202"),
        ("embed[0]", "VT201"),
        ("model.layers.3", "VT201"),
        ("model.layers.8..12.mlp.output", "VT201"),
        ("model.layers.3.output[x]", "VT201"),
        ("model.layers.3.output[-1]", "VT201"),
        ("lm_head", "VT201"),
        ("model.layers.*.mlpp.output", "VT202"),
        ("mlp.output", "VT202"),
        ("nothing.here.output", "VT202"),
        ("model.layers.10.self_attn.source", "VT201"),
        ("model.layers.10.self_attn.source.q_0.input", "VT208"),
        ("model.layers.10.self_attn.source.self_attn_0.source.x_0", "VT216"),
        ("model.layers.10.self_attn.source.q_0.source.x_0", "VT216"),
        ("model.layers.10.self_attn.source.qkv_split_0.source.x_0", "VT216"),
        ("model.layers.10.self_attn.source.self_attn_0.source", "VT201"),
        ("model.layers.10.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.source.x_0", "VT201"),
        ("model.layers.10.mlp.source.maybe_fused_act_quant_0.source.nothing_0", "VT203"),
        ("model.layers.10.mlp.source.maybe_fused_act_quant_0.source.producer_1", "VT216"),
        ("model.layers.10.mlp.source.maybe_fused_act_quant_0.source.key_0", "VT208"),
        ("model.layers.10.self_attn.source.self_attn_0.input", "VT208"),
        ("model.layers.10.self_attn.source.self_attn_0.input[3]", "VT208"),
        ("model.layers.10.self_attn.source.self_attn_0.input.output_dtype", "VT208"),
        ("model.layers.10.self_attn.source.self_attn_0.input[x]", "VT201"),
        ("model.layers.10.self_attn.source.self_attn_0.input.query.more", "VT201"),
        ("model.layers.10.self_attn.source.qkv_split_0.input.dim", "VT208"),
        ("model.layers.10.self_attn.source.self_rotary_emb_0.input[0]", "VT208"),
        ("model.layers.10.self_attn.source.q_0.outptu", "VT201"),
        ("model.layers.10.self_attn.source.q_0.output[x]", "VT201"),
        ("model.layers.10.self_attn.source.q", "VT203"),
        ("model.layers.10.self_attn.source.qkv_splt_0", "VT203"),
        ("model.layers.10.source.self_input_layernorm_0", "VT216"),
        ("model.layers.10.self_attn.source.qkv_split_0", "VT208"),
        ("model.layers.10.self_attn.source.qkv_split_0.output[3]", "VT208"),
        ("model.layers.10.self_attn.source.q_0.output[0]", "VT208"),
        ("model.source.layer_0", "VT216"),
        ("resid_post[30]", "VT204"),
        ("resid_post[0..30]", "VT204"),
        ("model.layers.30.mlp.output", "VT204"),
        ("model.layers.-31.mlp.output", "VT204"),
        ("model.layers[28..30].mlp.output", "VT204"),
        ("resid_pst[3]", "VT205"),
        ("router_logits", "VT205"),
        ("logits[3]", "VT201"),
        ("model.layers.3.output", "VT207"),
        ("model.layers.3.input_layernorm.output", "VT207"),
        ("model.layers.3.post_attention_layernorm.input", "VT207"),
        ("model.layers.3.output[2]", "VT208"),
        ("model.layers.3.mlp.output[0]", "VT208"),
        ("model.layers.3.self_attn.qkv_proj.output[1]", "VT208"),
        ("model.layers.0.input.residual", "VT208"),
        ("model.layers.3.self_attn.input", "VT208"),
        ("model.layers.3.self_attn.input.nothing", "VT208"),
        ("model.embed_tokens.input", "VT208"),
        ("lm_head.output", "VT208"),
        ("model.layers.output", "VT208"),
        ("model.layers.3.self_attn.rotary_emb.output[0]", "VT208"),
        ("model.layers.0.self_attn.rotary_emb.output[0]", "VT208"),
    ],
)
def test_each_wrong_location_has_its_code(text: str, code: str) -> None:
    assert refused(text).code == code


def test_a_layer_out_of_range_says_what_there_is() -> None:
    assert "layer 30 of 30: layers are 0..29, or -30..-1" in refused("resid_post[30]").message


def test_a_pattern_that_names_nothing_lists_what_is_there() -> None:
    problem = refused("model.layers.*.mlpp.output")
    assert problem.nearest == "mlp"
    assert problem.valid == ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def test_a_pair_is_refused_with_the_alias_and_the_halves() -> None:
    problem = refused("model.layers.3.output")
    assert problem.valid == ("resid_post[3]", "model.layers.3.output[0]", "model.layers.3.output[1]")
    assert refused("model.layers.3.post_attention_layernorm.input").valid[0] == "resid_mid[3]"


def test_thirty_layers_refused_alike_are_one_finding() -> None:
    assert "and 29 more alike" in refused("model.layers.*.output").message


def test_the_first_parameter_of_attention_is_not_taken_for_the_stream() -> None:
    problem = refused("model.layers.3.self_attn.input")
    assert "positions" in problem.message
    assert "model.layers.3.self_attn.input.hidden_states" in problem.valid


def test_a_module_of_all_layers_is_refused_with_the_place_of_one_layer() -> None:
    problem = refused("model.layers.5.self_attn.rotary_emb.output[0]")
    assert "30 times" in problem.message
    assert problem.valid[:2] == ("rot_q[5]", "rot_k[5]")


def test_a_column_points_into_the_brackets() -> None:
    assert "column 14" in refused("resid_post[3,x]").message


def test_heads_kept_as_an_axis_are_columns_side_by_side() -> None:
    (site,), _ = locate(tree("qwen3"), "model.layers.1.self_attn.q_norm.output", SPAN)
    assert (site.width, site.heads) == (128, 4)


def test_without_a_table_raw_places_stay_and_aliases_are_refused() -> None:
    bare = replace(tree("llama"), architecture="FooForCausalLM", digest="other")
    found, problems = locate(bare, "model.layers.*.mlp.output", SPAN)
    assert [s.name for s in found] == [f"model.layers.{i}.mlp.output" for i in range(4)] and not problems
    _, (problem,) = locate(bare, "resid_post[1]", SPAN)
    assert problem.code == "VT206" and "LlamaForCausalLM" in problem.valid
    _, (problem,) = locate(bare, "model.layers.1.output", SPAN)
    assert problem.code == "VT207" and problem.valid == ("model.layers.1.output[0]", "model.layers.1.output[1]")


def test_named_layers_must_all_have_the_module_and_a_star_takes_those_that_do() -> None:
    modules = {p: m for p, m in tree("llama").modules.items() if p != "model.layers.1.mlp"}
    uneven = replace(tree("llama"), modules=modules, architecture="Foo")
    found, _ = locate(uneven, "model.layers.*.mlp.output", SPAN)
    assert [s.layer for s in found] == [0, 2, 3]
    _, (problem,) = locate(uneven, "model.layers[0..2].mlp.output", SPAN)
    assert problem.code == "VT202" and "model.layers.1" in problem.message


def test_an_ambiguous_short_path_lists_the_places() -> None:
    problem = refused("mlp.output")
    assert "30 places" in problem.message and problem.valid[0] == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("family", "text", "valid"),
    [
        ("llama", "model.source.hidden_states_3",
         ("resid_post[*]", "model.layers.*.output[0]", "model.layers.*.output[1]")),
        ("gpt2", "transformer.source.layer_0", ("resid_post[*]", "transformer.h.*.output")),
        ("granitemoehybrid", "model.source.layer_0", ("model.layers.*.output[0]", "model.layers.*.output[1]")),
        ("opt", "model.decoder.source.layer_0", ("model.decoder.layers.*.output",)),
        ("llama", "model.source.binop_add_0", ()),  # a number
    ],
)  # fmt: skip
def test_a_loop_over_layers_is_refused_with_the_layers_own_places(
    family: str, text: str, valid: tuple[str, ...]
) -> None:
    diagnostic = refused(text, family)
    assert diagnostic.code == "VT216" and "is in a loop" in diagnostic.message
    assert diagnostic.valid == valid
    for place in valid:
        assert len(locate(tree(family), place, SPAN)[0]) > 1, place

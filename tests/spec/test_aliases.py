"""Every alias of every family, at the first and the last layer, against the sizes of the configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.spec.trees import FAMILIES, tree
from vtaps.spec import aliases
from vtaps.spec.alias_tables import ALIASES, TABLES
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.places import describe
from vtaps.spec.source import Forward, Op
from vtaps.spec.tree import Site, Value
from vtaps.spec.tree_view import forwards_of, render, render_at, render_forward

# hidden 128, 4 heads of 32, 2 KV heads (GPT-2: 4), intermediate 256
SHAPES = {
    "embed": (128, None),
    "resid_pre": (128, None),
    "resid_mid": (128, None),
    "resid_post": (128, None),
    "ln1": (128, None),
    "ln2": (128, None),
    "attn_out": (128, None),
    "mlp_out": (128, None),
    "q": (128, 4),
    "k": (64, 2),
    "v": (64, 2),
    "rot_q": (128, 4),
    "rot_k": (64, 2),
    "z": (128, 4),
    "mlp_post": (256, None),
    "final_norm": (128, None),
}
GPT2 = {"k": (128, 4), "v": (128, 4)}


def one(family: str, text: str) -> Site:
    found, problems = locate(tree(family), text, Span("spec.yaml"))
    assert not problems, problems
    (site,) = found
    return site


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("layer", [0, 3])
def test_every_alias_resolves_with_its_width_and_heads(family: str, alias: str, layer: int) -> None:
    if alias == "router_logits" or (family == "gpt2" and alias in ("rot_q", "rot_k")):
        assert alias not in aliases.names(tree(family))
        return
    site = one(family, f"{alias}[{layer}]" if aliases.layered(tree(family), alias) else alias)
    expected = (GPT2 if family == "gpt2" else {}).get(alias, SHAPES[alias])
    assert (site.width, site.heads) == expected
    assert site.module in tree(family).modules
    assert site.editable


@pytest.mark.parametrize("family", FAMILIES)
def test_every_spelling_in_the_tables_is_a_place_of_the_tree(family: str) -> None:
    for alias, rule in TABLES[tree(family).architecture].rules.items():
        for text in (rule.at, *rule.same):
            text = text.format(i=2)
            if ".source." in text:
                continue
            module, side, name = aliases.split(text)
            known = tree(family).modules[module]
            if side == "input":
                assert name in dict(known.inputs), (alias, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_op_whose_value_has_an_alias_is_the_alias(family: str) -> None:
    """The tables list an op for every variant of a family: each forward here has those of q, k, v and no stray one."""
    rules = TABLES[tree(family).architecture].rules
    found = {}
    for alias, rule in rules.items():
        for text in (t.format(i=2) for t in rule.same if ".source." in t):
            sites, problems = locate(tree(family), text, Span("x"))
            if not problems:
                layer = (
                    "[2]" if rule.layered and ".2." in text else "[0]" if rule.layered or alias == "resid_pre" else ""
                )
                assert [s.name for s in sites] == [alias + layer], text
                found[alias] = text
            else:
                assert [p.code for p in problems] == ["VT216" if text.endswith(f".{rule.rather}.output") else "VT203"]
    assert {"q", "k", "v"} <= set(found)
    assert "rot_q" not in rules or {"rot_q", "rot_k"} <= set(found)


@pytest.mark.parametrize(
    ("family", "text", "name"),
    [
        ("gpt2", "transformer.h.1.source.residual_0", "resid_post[0]"),
        ("gpt2", "transformer.h.0.source.residual_0", "resid_pre[0]"),
        ("gpt2", "transformer.h.1.source.binop_add_0", "resid_mid[1]"),
        ("gpt2", "transformer.h.1.source.residual_1", "resid_mid[1]"),
        ("gpt2", "transformer.h.1.source.hidden_states_3", "resid_post[1]"),
        ("gpt2", "transformer.h.1.mlp.source.self_act_0", "mlp_post[1]"),
        ("gpt2", "transformer.source.hidden_states_0", "resid_pre[0]"),
        ("gpt2", "transformer.source.inputs_embeds_0", "embed"),
        ("llama", "model.layers.0.source.residual_0", "embed"),
        ("llama", "model.source.hidden_states_1", "embed"),
        ("gemma2", "model.layers.0.source.residual_0", "resid_pre[0]"),
        ("gemma2", "model.source.self_embed_input_ids_0", "resid_pre[0]"),
        ("mistral", "model.layers.1.self_attn.source.q_1", "rot_q[1]"),
        ("llama", "model.layers.1.self_attn.o_proj.source.input_parallel_0", "z[1]"),
    ],
)
def test_a_second_name_of_a_tensor_is_its_alias(family: str, text: str, name: str) -> None:
    assert one(family, text) == one(family, name)


def test_the_rotated_queries_that_mistral_scales_are_not_what_attention_multiplies() -> None:
    plain = tree("mistral")
    path = "model.layers.1.self_attn"
    module = plain.modules[path]
    scaled = (*module.ops, *((name, Value("tensor", "float32", ("T", 128))) for name in ("binop_mul_0", "to_0")))
    variant = replace(plain, modules=plain.modules | {path: replace(module, ops=scaled)})

    def names(text: str) -> list[str]:
        found, problems = locate(variant, f"{path}.{text}", Span("x"))
        assert not problems
        return [site.name for site in found]

    assert names("source.self_rotary_emb_0.output[0]") == [f"{path}.source.self_rotary_emb_0.output[0]"]
    assert names("source.q_2") == names("attn.input.query") == ["rot_q[1]"]
    assert names("source.self_rotary_emb_0.output[1]") == ["rot_k[1]"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hugging_face_index_of_the_stream(family: str) -> None:
    assert one(family, "resid_pre[0]").hf_index == 0
    assert [one(family, f"resid_post[{i}]").hf_index for i in range(4)] == [1, 2, 3, None]
    assert [one(family, f"resid_pre[{i}]").hf_index for i in range(4)] == [0, 1, 2, 3]
    assert one(family, "resid_mid[1]").hf_index is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_before_a_layer_is_the_stream_after_the_one_before(family: str) -> None:
    assert one(family, "resid_pre[2]") == one(family, "resid_post[1]")
    fed_as_it_is = family not in ("gemma", "gemma2", "gemma3", "gpt2")
    assert (one(family, "resid_pre[0]") == one(family, "embed")) is fed_as_it_is
    assert (one(family, "embed").hf_index == 0) is fed_as_it_is


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_and_v_divide_the_fused_projection(family: str) -> None:
    parts = [one(family, f"{name}[1]") for name in "qkv"]
    assert len({p.module for p in parts}) == 1
    edges = [p.columns for p in parts if p.columns]
    kv = 128 if family == "gpt2" else 64
    assert edges == [(0, 128), (128, 128 + kv), (128 + kv, 128 + 2 * kv)]


@pytest.mark.parametrize(
    ("family", "block", "layers"),
    [
        ("mixtral", "block_sparse_moe", (0, 1, 2, 3)),
        ("olmoe", "mlp", (0, 1, 2, 3)),
        ("qwen2_moe", "mlp", (0, 2, 3)),
        ("qwen3_moe", "mlp", (0, 1)),
    ],
)
def test_router_logits_are_those_of_the_layers_with_experts(family: str, block: str, layers: tuple[int, ...]) -> None:
    found, problems = locate(tree(family), "router_logits[*]", Span("x"))
    assert not problems and [s.layer for s in found] == list(layers)
    for site in found:
        assert (site.module, site.element, site.width) == (f"model.layers.{site.layer}.{block}.gate", 0, 8)
        assert site.editable and site.heads is None
        mid, out = (one(family, f"{name}[{site.layer}]") for name in ("ln2", "mlp_out"))
        assert mid.order < site.order < out.order
    if family == "qwen2_moe":
        assert one(family, "model.layers.0.mlp.gate.output") == found[0]
        _, problems = locate(tree(family), "router_logits[1]", Span("x"))
        assert [(p.code, p.valid) for p in problems] == [("VT202", ("router_logits[0,2..3]",))]


def test_router_logits_of_another_dtype_than_the_rows_are_refused() -> None:
    plain = tree("mixtral")
    path = "model.layers.1.block_sparse_moe.gate"
    gate = plain.modules[path]
    assert gate.output is not None
    wide = replace(gate.output, items=(replace(gate.output.items[0], dtype="float64"), *gate.output.items[1:]))
    variant = replace(plain, modules=plain.modules | {path: replace(gate, output=wide)})
    _, problems = locate(variant, "router_logits[1]", Span("x"))
    assert [p.code for p in problems] == ["VT202"] and "float64" in problems[0].message


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_adds_its_sub_blocks_after_a_norm(family: str) -> None:
    assert one(family, "attn_out[1]").module == "model.layers.1.post_attention_layernorm"
    assert one(family, "mlp_out[1]").module == "model.layers.1.post_feedforward_layernorm"
    # What the attention itself gives is another tensor, and stays raw.
    assert one(family, "model.layers.1.self_attn.output").alias is None
    assert one(family, "resid_mid[1]").module == "model.layers.1.pre_feedforward_layernorm"


def test_gpt2_carries_one_tensor() -> None:
    assert {one("gpt2", f"{a}[1]").value for a in ("resid_pre", "resid_mid", "resid_post")} == {"tensor"}
    assert one("gpt2", "transformer.h.2.input") == one("gpt2", "resid_post[1]")
    assert one("gpt2", "h.2.output") == one("gpt2", "resid_post[2]")
    assert one("gpt2", "h.0.input") == one("gpt2", "resid_pre[0]")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_view_shows_every_alias_once_and_fits(family: str) -> None:
    text = render(tree(family), 120)
    assert max(len(line) for line in text.splitlines()) <= 120
    for alias in aliases.names(tree(family)):
        name = f"{alias}[i]" if aliases.layered(tree(family), alias) else alias
        assert name in text
    assert "[0..3]" in text


def test_one_module_shows_how_each_place_is_spelled() -> None:
    text, problems = render_at(tree("smollm2"), "layers.-1.self_attn.o_proj")
    assert text is not None and not problems
    assert "z[29], model.layers.29.self_attn.o_proj.input.input_" in text
    assert "attn_out[29]" in text
    _, (problem,) = render_at(tree("smollm2"), "layers.40")
    assert problem.code == "VT204"


OPS = (
    Op("f_0", 2, "call", "f"),
    Op("a_0", 2, "element", "f(x)", "f_0", 0),
    Op("g_0", 3, "call", "g", repeats=True),
    Op("h_0", 3, "call", "h", fixed="in a lambda"),
)
FORWARD = Forward("vllm.m.A.forward", "vllm/m.py", 40, 4, "0" * 64, OPS)


def test_a_forward_is_shown_with_its_ops_in_the_margin() -> None:
    source = ["    def forward(self, x):", "        a, _ = f(x)", "        return [g(lambda: h(y)) for y in a]", ""]
    pair = Value("tuple", items=(Value("tensor", "float32", ("T", 8)), Value("none")))
    values = {"f_0": pair, "a_0": pair.items[0], "g_0": Value("tensor", "int64", ("T",))}
    lines = render_forward(FORWARD, values, source).splitlines()
    assert lines[0] == "forward  vllm/m.py:40" and lines[1].split() == ["40", "def", "forward(self,", "x):"]
    assert lines[2].split()[0] == "f_0" and describe(pair) in lines[2] and lines[2].endswith("a, _ = f(x)")
    assert lines[3].split()[0] == "a_0" and describe(pair.items[0]) in lines[3] and lines[3].endswith("+")
    assert (
        lines[4].split()[0] == "g_0*"
        and "int64[T]" in lines[4]
        and lines[5].split()[:4] == ["h_0", "(in", "a", "lambda)"]
    )
    assert len({line.index(code) for line, code in zip((lines[1], lines[2]), ("def", "    a, _"), strict=True)}) == 1
    assert [line.split()[:2] for line in render_forward(FORWARD, values, None).splitlines()[2:]] == [
        ["41", "f_0"], ["41", "a_0"], ["42", "g_0*"], ["42", "h_0"],
    ]  # fmt: skip
    reason = Forward("m.f", reason="it is not vLLM's own")
    assert "without ops: it is not vLLM's own" in render_forward(reason, {}, None)


def test_the_forward_of_a_module_is_found() -> None:
    ((found, values),) = forwards_of(tree("smollm2"), "layers.3.self_attn")
    assert found.where == "vllm.model_executor.models.llama.LlamaAttention.forward"
    assert {name: describe(value) for name, value in values.items()} == {
        "self_qkv_proj_0": "([T, 960], None)",
        "qkv_0": "[T, 960]",
        "qkv_split_0": "([T, 576], [T, 192], [T, 192])",
        "q_0": "[T, 576]",
        "k_0": "[T, 192]",
        "v_0": "[T, 192]",
        "self_rotary_emb_0": "([T, 576], [T, 192])",
        "q_1": "[T, 576]",
        "k_1": "[T, 192]",
        "self_attn_0": "[T, 576]",
        "attn_output_0": "[T, 576]",
        "self_o_proj_0": "([T, 576], None)",
        "output_0": "[T, 576]",
    }
    # All layers have one rotary embedding, and an activation has a body a platform.
    for path in ("layers.3.self_attn.rotary_emb", "layers.3.mlp.act_fn"):
        assert forwards_of(tree("smollm2"), path)[0][0].where.endswith(".forward_native"), path
    assert forwards_of(tree("smollm2"), "layers") == forwards_of(tree("smollm2"), "nothing") == []


def test_the_first_layer_takes_another_branch() -> None:
    first, second = (dict(tree("smollm2").modules[f"model.layers.{i}"].ops) for i in (0, 1))
    assert "self_input_layernorm_0" in first and "self_input_layernorm_1" not in first
    assert "self_input_layernorm_1" in second and "self_input_layernorm_0" not in second


def test_a_function_that_a_forward_calls_is_shown_below_it() -> None:
    (own, _), (inner, _), *_ = forwards_of(tree("smollm2"), "layers.3.mlp")
    (op,) = [op for op in own.ops if op.inside == inner.where]
    assert op.name == "maybe_fused_act_quant_0" and inner.where.endswith(".maybe_fused_act_quant")
    assert inner.ops and f"{op.name} >" in render_forward(own, {}, None)


@pytest.mark.parametrize("family", [*FAMILIES, "smollm2", "opt", "dbrx"])
def test_what_an_op_computes_is_what_the_module_it_calls_puts_out(family: str) -> None:
    """The values of ops and of modules are recorded apart from each other."""
    compared = 0
    for module in tree(family).modules.values():
        forward = tree(family).forwards.get(module.forward or "")
        values = dict(module.ops)
        for op in forward.ops if forward is not None else ():
            if op.name not in values:
                continue
            if op.kind == "element" and op.of in values:
                assert values[op.of].items[op.item or 0] == values[op.name], (module.path, op.name)
            child = tree(family).modules.get(f"{module.path}.{op.text.removeprefix('self.')}".lstrip("."))
            if op.kind == "call" and op.text.startswith("self.") and child is not None:
                real = tree(family).modules[child.same_as] if child.same_as else child
                if real.calls == 1 and not op.repeats:
                    assert values[op.name] == real.output, (module.path, op.name)
                    compared += 1
    assert compared > 8


def texts(family: str, path: str) -> list[tuple[str, str]]:
    """The ops of the forward that a module runs: its text without annotations."""
    at = tree(family)
    return [(op.name, op.text) for op in at.forwards[at.modules[path].forward or ""].ops]


@pytest.mark.parametrize("family", ["phi3", "ernie4_5"])
def test_a_table_without_a_proof_of_its_own_is_run_by_llamas_forwards(family: str) -> None:
    for path in ("model", "model.layers.2", "model.layers.2.self_attn", "model.layers.2.mlp", "model.norm"):
        at, proved = tree(family), tree("llama")
        forward = at.forwards[at.modules[path].forward or ""]
        assert forward == proved.forwards[forward.where], path


def test_gemmas_first_layers_are_those_of_proved_ones_and_its_embedding_is_not() -> None:
    layer = "model.layers.2"
    found = {
        path: [other for other in ("llama", "mistral", "qwen2", "qwen3") if texts(other, path) == texts("gemma", path)]
        for path in (layer, f"{layer}.self_attn", f"{layer}.mlp")
    }
    assert all(found.values()), found
    assert texts("gemma", "model") == texts("gemma2", "model") != texts("llama", "model")

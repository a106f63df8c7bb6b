"""Every alias of every family, at the first and the last layer, against the sizes of the configurations."""

from __future__ import annotations

import pytest

from tests.spec.trees import FAMILIES, tree
from vtaps.spec import aliases
from vtaps.spec.alias_tables import ALIASES, TABLES
from vtaps.spec.diagnostics import Span
from vtaps.spec.locations import locate
from vtaps.spec.source import Forward, Op
from vtaps.spec.tree import Site
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
    if family == "gpt2" and alias in ("rot_q", "rot_k"):
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
            module, side, name = aliases.split(text.format(i=2))
            known = tree(family).modules[module]
            if side == "input":
                assert name in dict(known.inputs), (alias, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hugging_face_index_of_the_stream(family: str) -> None:
    assert one(family, "resid_pre[0]").hf_index == 0
    assert [one(family, f"resid_post[{i}]").hf_index for i in range(4)] == [1, 2, 3, None]
    assert [one(family, f"resid_pre[{i}]").hf_index for i in range(4)] == [0, 1, 2, 3]
    assert one(family, "resid_mid[1]").hf_index is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_before_a_layer_is_the_stream_after_the_one_before(family: str) -> None:
    assert one(family, "resid_pre[2]") == one(family, "resid_post[1]")
    fed_as_it_is = family not in ("gemma2", "gemma3", "gpt2")
    assert (one(family, "resid_pre[0]") == one(family, "embed")) is fed_as_it_is
    assert (one(family, "embed").hf_index == 0) is fed_as_it_is


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_and_v_divide_the_fused_projection(family: str) -> None:
    parts = [one(family, f"{name}[1]") for name in "qkv"]
    assert len({p.module for p in parts}) == 1
    edges = [p.columns for p in parts if p.columns]
    kv = 128 if family == "gpt2" else 64
    assert edges == [(0, 128), (128, 128 + kv), (128 + kv, 128 + 2 * kv)]


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
    assert render_forward(FORWARD, source).splitlines() == [
        "forward  vllm/m.py:40",
        "                        40  def forward(self, x):",
        "  f_0                   41      a, _ = f(x)",
        "  a_0                    +",
        "  g_0*                  42      return [g(lambda: h(y)) for y in a]",
        "  h_0 (in a lambda)      +",
        "                        43",
    ]
    assert render_forward(FORWARD, None).splitlines()[1:] == [
        "  its source is not installed here, or is another version's",
        "    41  f_0, a_0",
        "    42  g_0*, h_0 (in a lambda)",
    ]
    assert "without ops: it is not vLLM's own" in render_forward(Forward("m.f", reason="it is not vLLM's own"), None)


def test_the_forward_of_a_module_is_found() -> None:
    (found,) = forwards_of(tree("smollm2"), "layers.3.self_attn")
    assert found.where == "vllm.model_executor.models.llama.LlamaAttention.forward"
    assert "qkv_split_0" in [op.name for op in found.ops]
    # All layers have one rotary embedding, and an activation has a body a platform.
    for path in ("layers.3.self_attn.rotary_emb", "layers.3.mlp.act_fn"):
        assert forwards_of(tree("smollm2"), path)[0].where.endswith(".forward_native"), path
    assert forwards_of(tree("smollm2"), "layers") == forwards_of(tree("smollm2"), "nothing") == []


def test_a_function_that_a_forward_calls_is_shown_below_it() -> None:
    own, inner, *_ = forwards_of(tree("smollm2"), "layers.3.mlp")
    (op,) = [op for op in own.ops if op.inside == inner.where]
    assert op.name == "maybe_fused_act_quant_0" and inner.where.endswith(".maybe_fused_act_quant")
    assert inner.ops and f"{op.name} >" in render_forward(own, None)

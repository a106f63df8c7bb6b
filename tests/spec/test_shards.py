"""What one rank of several holds: the labels, and those of the committed trees against the layers' own classes."""

from __future__ import annotations

import pytest

from tests.spec.trees import tree
from vtaps.spec import shards
from vtaps.spec.diagnostics import Span
from vtaps.spec.places import describe
from vtaps.spec.snapshot import parse_value, value_text
from vtaps.spec.tree import Value
from vtaps.spec.tree_view import forwards_of, render, render_at, render_forward


@pytest.mark.parametrize(
    ("one", "two", "labelled", "words"),
    [
        ("float32[T,8]", "float32[T,8]", "float32[T,8]", "whole"),
        ("float32[T,8]", "float32[T,4]", "float32[T,8/tp]", "axis 1 sharded"),
        ("float32[T,4,32]", "float32[T,2,32]", "float32[T,4/tp,32]", "axis 1 sharded"),
        ("float32[4*T,32]", "float32[2*T,32]", "float32[4*T/tp,32]", "axis 0 sharded"),
        ("float32[2*T,32]", "float32[T,32]", "float32[2*T/tp,32]", "axis 0 sharded"),
        ("float32[3*T]", "float32[2*T]", "float32[3*T>2*T]", "axis 0 sharded"),
        # One KV head, on both ranks: 4 heads and 2 become 2 heads and 2.
        ("float32[T,192]", "float32[T,128]", "float32[T,192>128]", "axis 1 sharded"),
        ("float32[T,8]", "float32[T,8]:partial", "float32[T,8]:partial", "partial sum"),
        ("float32[T,8]", "float32[T,4]:partial", "float32[T,8/tp]:partial", "axis 1 sharded, partial sum"),
        ("float32[T,8]", None, "float32[T,8]:alone", "tp 1 only"),
        ("float32[T,8]", "None", "float32[T,8]:alone", "tp 1 only"),
        ("float32[T,8]", "float32[T,2,4]", "float32[T,8]:alone", "tp 1 only"),
        ("(float32[T,8], None)", "(float32[T,4], None)", "(float32[T,8/tp], None)", "axis 1 sharded"),
        ("(float32[T,8], float32[T])", "float32[T]", "(float32[T,8]:alone, float32[T]:alone)", "tp 1 only"),
        ("(int64[8], int64[T])", "(int64[4], int64[T])", "(int64[8/tp], int64[T])", "axis 0 sharded, whole"),
        ("None", "float32[T]", "None", ""),
        ("other", None, "other", ""),
    ],
)  # fmt: skip
def test_two_ranks_against_one(one: str, two: str | None, labelled: str, words: str) -> None:
    value = shards.label(parse_value(one), None if two is None else parse_value(two))
    assert value_text(value) == labelled
    assert parse_value(labelled) == value
    assert shards.words(value) == words


def test_the_shape_is_that_of_one_rank() -> None:
    assert parse_value("float32[T,192>128]:partial").shape == ("T", 192)
    assert parse_value("float32[4*T/tp,32]").shape == ("4*T", 32)
    assert describe(parse_value("(float32[T,8/tp], float32[T]:partial)")) == "([T, 8], [T])"
    assert describe(parse_value("(int64[8/tp], float32[T]:alone)"), labels=True) == "(int64[8/tp], [T] tp 1 only)"


# Column-parallel layers split what they put out, row-parallel ones what they take in; these reduce before they return,
# unless they are told not to.  Norms, the embedding and the stream are whole.
DENSE = {
    "model.embed_tokens output": "[T, 128]",
    "model.layers.2 input.hidden_states": "[T, 128]",
    "model.layers.2 input.residual": "[T, 128]",
    "model.layers.2 output": "([T, 128], [T, 128])",
    "model.layers.2.input_layernorm output": "([T, 128], [T, 128])",
    "model.layers.2.self_attn.qkv_proj input.input_": "[T, 128]",
    "model.layers.2.self_attn.qkv_proj output": "([T, 256/tp], None)",
    "model.layers.2.self_attn op q_0": "[T, 128/tp]",
    "model.layers.2.self_attn op k_0": "[T, 64/tp]",
    "model.layers.2.self_attn op v_0": "[T, 64/tp]",
    "model.layers.2.self_attn.attn input.query": "[T, 128/tp]",
    "model.layers.2.self_attn.attn output": "[T, 128/tp]",
    "model.layers.2.self_attn.o_proj input.input_": "[T, 128/tp]",
    "model.layers.2.self_attn.o_proj op output_parallel_0": "[T, 128] partial",
    "model.layers.2.self_attn.o_proj output": "([T, 128], None)",
    "model.layers.2.self_attn output": "[T, 128]",
    "model.layers.2.mlp input.x": "[T, 128]",
    "model.layers.2.mlp.gate_up_proj output": "([T, 512/tp], None)",
    "model.layers.2.mlp.act_fn input.x": "[T, 512/tp]",
    "model.layers.2.mlp.act_fn output": "[T, 256/tp]",
    "model.layers.2.mlp.down_proj input.input_": "[T, 256/tp]",
    "model.layers.2.mlp.down_proj op output_parallel_0": "[T, 128] partial",
    "model.layers.2.mlp output": "[T, 128]",
    "model.norm output": "([T, 128], [T, 128])",
}
EXPECTED = {
    "llama": DENSE,
    # The norms of q and k are over a head's width: the heads are what is split.
    "qwen3": DENSE
    | {
        "model.layers.2.self_attn.q_norm input.x": "[T, 4/tp, 32]",
        "model.layers.2.self_attn.q_norm output": "[T, 4/tp, 32]",
        "model.layers.2.self_attn.k_norm output": "[T, 2/tp, 32]",
        "model.layers.2.self_attn op q_by_head_0": "[T, 4/tp, 32]",
    },
    "gemma2": DENSE
    | {
        "model.layers.2.post_attention_layernorm input.x": "[T, 128]",
        "model.layers.2.post_attention_layernorm output": "[T, 128]",
        "model.layers.2.pre_feedforward_layernorm output": "([T, 128], [T, 128])",
        "model.layers.2.post_feedforward_layernorm output": "[T, 128]",
    },
    "gpt2": {
        "transformer.wte output": "[T, 128]",
        "transformer.wpe output": "[T, 128]",
        "transformer.h.2 output": "[T, 128]",
        "transformer.h.2.attn.c_attn output": "([T, 384/tp], None)",
        "transformer.h.2.attn op q_0": "[T, 128/tp]",
        "transformer.h.2.attn.c_proj input.input_": "[T, 128/tp]",
        "transformer.h.2.attn.c_proj op output_parallel_0": "[T, 128] partial",
        "transformer.h.2.attn.c_proj op bias__0": "[128] partial",  # added on the first rank alone
        "transformer.h.2.attn output": "[T, 128]",
        "transformer.h.2.mlp.c_fc output": "([T, 256/tp], None)",
        "transformer.h.2.mlp.c_proj input.input_": "[T, 256/tp]",
        "transformer.h.2.mlp output": "[T, 128]",
        "transformer.ln_f output": "[T, 128]",
    },
    # The router is replicated; the experts' terms are summed at the end of the runner.
    "dbrx": {
        "transformer.blocks.2.ffn.router output": "[T, 4]",
        "transformer.blocks.2.ffn.experts input.router_logits": "[T, 4]",
        "transformer.blocks.2.ffn.experts input.hidden_states": "[T, 64]",
        "transformer.blocks.2.ffn.experts op fused_output_0": "[T, 64] partial",
        "transformer.blocks.2.ffn.experts op self__maybe_reduce_final_output_0": "[T, 64]",
        "transformer.blocks.2.ffn.experts output": "[T, 64]",
        "transformer.blocks.2.ffn output": "[T, 64]",
        "transformer.blocks.2.norm_attn_norm.attn.out_proj input.input_": "[T, 64/tp]",
    },
    # Layer 1 is dense, the others hold experts.
    "qwen3moe": {
        "model.layers.1.mlp.act_fn output": "[T, 256/tp]",
        "model.layers.1.mlp output": "[T, 128]",
        "model.layers.2.mlp.experts op fused_output_0": "[T, 128] partial",
        "model.layers.2.mlp.experts output": "[T, 128]",
        "model.layers.3 output": "([T, 128], [T, 128])",
    },
    # Attention and MLP return without reducing, their sum is reduced; one KV head, which every rank holds.
    "falcon": {
        "transformer.h.2.self_attention op qkv_0": "[T, 192>128]",
        "transformer.h.2.self_attention op q_0": "[T, 128/tp]",
        "transformer.h.2.self_attention op k_0": "[T, 32]",
        "transformer.h.2.self_attention.dense output": "([T, 128] partial, None)",
        "transformer.h.2.self_attention output": "([T, 128] partial, None)",
        "transformer.h.2.mlp output": "([T, 128] partial, None)",
        "transformer.h.2 op mlp_output_0": "[T, 128] partial",
        "transformer.h.2 op tensor_model_parallel_all_reduce_0": "[T, 128]",
        "transformer.h.2 output": "[T, 128]",
    },
}


@pytest.mark.parametrize("family", EXPECTED)
def test_the_labels_are_those_of_the_layers_classes(family: str) -> None:
    modules = tree(family).modules
    found = {}
    for place in EXPECTED[family]:
        path, _, rest = place.partition(" ")
        kind, _, name = rest.replace("op ", "op.").partition(".")
        values = {
            "input": dict(modules[path].inputs),
            "op": dict(modules[path].ops),
            "output": {"": modules[path].output},
        }
        found[place] = describe(values[kind][name], labels=True)
    assert found == EXPECTED[family]


def test_every_value_has_the_label_of_the_same_place_in_the_next_layer() -> None:
    modules = tree("llama").modules
    for path, module in modules.items():
        if path.startswith("model.layers.1") and not module.same_as:
            other = modules[path.replace(".1", ".3", 1)]
            assert (module.inputs, module.output, module.ops) == (other.inputs, other.output, other.ops)


def test_a_model_that_does_not_divide_has_no_labels_and_says_why() -> None:
    smollm2 = tree("smollm2")
    assert smollm2.unsharded is not None and "attention heads (9)" in smollm2.unsharded
    values = [v for m in smollm2.modules.values() for v in (m.output, *dict(m.inputs).values(), *dict(m.ops).values())]
    assert values and not any(_labels(value) for value in values)
    shown = render(smollm2)
    assert shown.count("without shard labels, it does not run on 2 ranks: Total number of attention heads (9)") == 1
    text, _ = render_at(smollm2, "model.layers.3.self_attn.o_proj", Span(""))
    assert text is not None and "whole" not in text and "without shard labels" in text


def _labels(value: Value | None) -> bool:
    return value is not None and (bool(value.shards or value.mark) or any(map(_labels, value.items)))


def test_the_tree_shows_them() -> None:
    text = render(tree("llama"), 160)
    (line,) = (line for line in text.splitlines() if "gate_up_proj" in line)
    assert "([T, 512/tp], None)" in line
    assert "N/tp" in text.splitlines()[-1]
    shown, _ = render_at(tree("falcon"), "transformer.h.1.self_attention.dense", Span(""))
    assert shown is not None
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "input input_ [T, 128/tp] axis 1 sharded transformer.h.1.self_attention.dense.input.input_" in rows
    assert "output ([T, 128] partial, None) partial sum transformer.h.1.self_attention.dense.output" in rows
    own, *_ = forwards_of(tree("llama"), "model.layers.1.self_attn.o_proj")
    margin = [" ".join(line.split()[1:]) for line in render_forward(*own, None).splitlines()]
    assert "output_parallel_0 [T, 128] partial" in margin
    assert "output_1 [T, 128] tp 1 only" in margin

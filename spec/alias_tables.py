"""One table per architecture: what each alias names in vLLM's module tree, and how it is read.

A location in a table is written as in a spec, ``{i}`` for the layer; ``.output`` is the tensor, or the first
tensor of a tuple. ``same`` lists other spellings of the very same tensor, which resolve to the alias.
Each row is proved against the Hugging Face forward, or its modules run the forwards of one that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Heads = Literal["heads", "kv_heads"]
Part = Literal["q", "k", "v"]


@dataclass(frozen=True)
class Rule:
    """``residual``: the place holds one half of the stream, the other half is this output index or parameter.
    ``part``: these columns of a fused projection. ``heads``: which head count divides the width.
    ``rather``: an op among ``same``; where it is computed, the other ops of its forward there are other tensors.
    ``runs_in``: in some families the module is called by this one, out of sight of the tree, and puts out one column a
    row of its weight."""

    at: str
    residual: int | str | None = None
    part: Part | None = None
    heads: Heads | None = None
    same: tuple[str, ...] = ()
    rather: str | None = None
    runs_in: str | None = None

    @property
    def layered(self) -> bool:
        return "{i}" in self.at


@dataclass(frozen=True)
class Table:
    """``layers`` is the path of the decoder layers.

    ``embed_is_stream``: the first layer is fed the embedding as it is, so that ``resid_pre[0]`` and ``embed``
    are one tensor; else ``resid_pre`` has a row of its own, used at layer 0 only (``resid_pre[i]`` is
    ``resid_post[i-1]``).
    """

    layers: str
    embed_is_stream: bool
    rules: dict[str, Rule]


_L = "model.layers.{i}"
_A = f"{_L}.self_attn"
_M = f"{_L}.mlp"
_S = f"{_A}.source"

# vLLM's decoder layers carry (hidden, residual), whose sum is the stream. Layer 0 gets residual=None and uses
# the embedding itself as the residual. Each norm adds the pair up before it norms, and donates both: hence
# resid_mid is taken at the norm's input, before the call.
_LLAMA = Table(
    layers="model.layers",
    embed_is_stream=True,
    rules={
        "embed": Rule(
            "model.embed_tokens.output",
            same=(
                "model.layers.0.input.hidden_states",
                "model.layers.0.input_layernorm.input.x",
                "model.source.self_embed_input_ids_0.output",
            ),
        ),
        "resid_mid": Rule(f"{_L}.post_attention_layernorm.input.x", residual="residual"),
        "resid_post": Rule(f"{_L}.output", residual=1),
        "ln1": Rule(
            f"{_L}.input_layernorm.output",
            same=(f"{_A}.input.hidden_states", f"{_A}.qkv_proj.input.input_"),
        ),
        "ln2": Rule(
            f"{_L}.post_attention_layernorm.output",
            same=(f"{_M}.input.x", f"{_M}.gate_up_proj.input.input_"),
        ),
        "attn_out": Rule(f"{_A}.output", same=(f"{_A}.o_proj.output", f"{_L}.post_attention_layernorm.input.x")),
        "mlp_out": Rule(f"{_M}.output", same=(f"{_M}.down_proj.output",)),
        "q": Rule(f"{_A}.qkv_proj.output", part="q", heads="heads", same=(f"{_S}.qkv_split_0.output[0]",)),
        "k": Rule(f"{_A}.qkv_proj.output", part="k", heads="kv_heads", same=(f"{_S}.qkv_split_0.output[1]",)),
        "v": Rule(
            f"{_A}.qkv_proj.output",
            part="v",
            heads="kv_heads",
            same=(f"{_A}.attn.input.value", f"{_S}.qkv_split_0.output[2]"),
        ),
        "rot_q": Rule(f"{_A}.attn.input.query", heads="heads", same=(f"{_S}.self_rotary_emb_0.output[0]",)),
        "rot_k": Rule(f"{_A}.attn.input.key", heads="kv_heads", same=(f"{_S}.self_rotary_emb_0.output[1]",)),
        "z": Rule(f"{_A}.o_proj.input.input_", heads="heads", same=(f"{_A}.attn.output",)),
        "mlp_post": Rule(
            f"{_M}.down_proj.input.input_",
            same=(
                f"{_M}.act_fn.output",
                f"{_M}.source.maybe_fused_act_quant_0.output",
                f"{_M}.source.self_act_fn_0.output",
            ),
        ),
        "final_norm": Rule("model.norm.output", same=("model.output",)),
    },
)

# Mistral may scale the rotated queries by their position (`llama_4_scaling`): attention multiplies what that gives.
_MISTRAL = replace(
    _LLAMA,
    rules=_LLAMA.rules
    | {
        "rot_q": Rule(
            f"{_A}.attn.input.query",
            heads="heads",
            same=(f"{_S}.self_rotary_emb_0.output[0]", f"{_S}.to_0.output"),
            rather="to_0",
        ),
        # Its forward is LlamaModel's, called.
        "final_norm": Rule("model.norm.output", same=("model.output", "model.source.forward_0.output")),
    },
)


def _moe(block: str) -> Table:
    """Llama's layers with a mixture of experts at ``block``, or an MLP in some of them.  The experts' hidden
    activations are rows of no token's own."""
    at = f"{_L}.{block}"
    rules = {alias: rule for alias, rule in _LLAMA.rules.items() if alias != "mlp_post"}
    return replace(
        _LLAMA,
        rules=rules
        | {
            "ln2": Rule(
                f"{_L}.post_attention_layernorm.output",
                same=(f"{at}.input.hidden_states", f"{at}.input.x", f"{at}.gate_up_proj.input.input_"),
            ),
            "mlp_out": Rule(f"{at}.output", same=(f"{at}.down_proj.output",)),
            "router_logits": Rule(f"{at}.gate.output", runs_in=f"{at}.experts"),
        },
    )


# The first Gemma scales the embedding before the first layer.
_SCALED = replace(
    _LLAMA,
    embed_is_stream=False,
    rules=_LLAMA.rules
    | {
        "embed": Rule("model.embed_tokens.output"),
        "resid_pre": Rule(
            "model.layers.0.input.hidden_states",
            same=("model.layers.0.input_layernorm.input.x", "model.source.self_embed_input_ids_0.output"),
        ),
    },
)

# Later ones norm each sub-block's output once more before adding it to the stream.
_GEMMA = replace(
    _SCALED,
    rules=_SCALED.rules
    | {
        "resid_mid": Rule(f"{_L}.pre_feedforward_layernorm.input.x", residual="residual"),
        "ln2": Rule(
            f"{_L}.pre_feedforward_layernorm.output",
            same=(f"{_M}.input.x", f"{_M}.gate_up_proj.input.input_"),
        ),
        "attn_out": Rule(f"{_L}.post_attention_layernorm.output", same=(f"{_L}.pre_feedforward_layernorm.input.x",)),
        "mlp_out": Rule(f"{_L}.post_feedforward_layernorm.output"),
    },
)

_H = "transformer.h.{i}"

# No residual beside the stream and no rotary embedding. `resid_pre` has a row at every layer because the
# block's input is the whole stream, the same tensor as the output of the block before.
_GPT2 = Table(
    layers="transformer.h",
    embed_is_stream=False,
    rules={
        "embed": Rule("transformer.wte.output", same=("transformer.source.self_embed_input_ids_0.output",)),
        "resid_pre": Rule(
            f"{_H}.input.hidden_states", same=(f"{_H}.ln_1.input.x", "transformer.source.binop_add_0.output")
        ),
        "resid_mid": Rule(f"{_H}.ln_2.input.x", same=(f"{_H}.source.binop_add_0.output",)),
        "resid_post": Rule(f"{_H}.output", same=(f"{_H}.source.binop_add_1.output",)),
        "ln1": Rule(
            f"{_H}.ln_1.output",
            same=(f"{_H}.attn.input.hidden_states", f"{_H}.attn.c_attn.input.input_"),
        ),
        "ln2": Rule(f"{_H}.ln_2.output", same=(f"{_H}.mlp.input.hidden_states", f"{_H}.mlp.c_fc.input.input_")),
        "attn_out": Rule(f"{_H}.attn.output", same=(f"{_H}.attn.c_proj.output",)),
        "mlp_out": Rule(f"{_H}.mlp.output", same=(f"{_H}.mlp.c_proj.output",)),
        "q": Rule(
            f"{_H}.attn.c_attn.output",
            part="q",
            heads="heads",
            same=(f"{_H}.attn.attn.input.query", f"{_H}.attn.source.qkv_chunk_0.output[0]"),
        ),
        "k": Rule(
            f"{_H}.attn.c_attn.output",
            part="k",
            heads="kv_heads",
            same=(f"{_H}.attn.attn.input.key", f"{_H}.attn.source.qkv_chunk_0.output[1]"),
        ),
        "v": Rule(
            f"{_H}.attn.c_attn.output",
            part="v",
            heads="kv_heads",
            same=(f"{_H}.attn.attn.input.value", f"{_H}.attn.source.qkv_chunk_0.output[2]"),
        ),
        "z": Rule(f"{_H}.attn.c_proj.input.input_", heads="heads", same=(f"{_H}.attn.attn.output",)),
        "mlp_post": Rule(
            f"{_H}.mlp.c_proj.input.input_", same=(f"{_H}.mlp.act.output", f"{_H}.mlp.source.self_act_0.output")
        ),
        "final_norm": Rule("transformer.ln_f.output", same=("transformer.output",)),
    },
)

TABLES: dict[str, Table] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "GPT2LMHeadModel": _GPT2,
    "Ernie4_5ForCausalLM": _LLAMA,
    "GemmaForCausalLM": _SCALED,
    "Phi3ForCausalLM": _LLAMA,
    "MixtralForCausalLM": _moe("block_sparse_moe"),
    "OlmoeForCausalLM": _moe("mlp"),
    "Qwen2MoeForCausalLM": _moe("mlp"),
    "Qwen3MoeForCausalLM": _moe("mlp"),
}

ALIASES = (
    "embed",
    "resid_pre",
    "resid_mid",
    "resid_post",
    "ln1",
    "ln2",
    "attn_out",
    "mlp_out",
    "q",
    "k",
    "v",
    "rot_q",
    "rot_k",
    "z",
    "mlp_post",
    "router_logits",
    "final_norm",
)
"""Every alias of this version, whichever architectures have it."""

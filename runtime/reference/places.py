"""Where a Hugging Face model holds what an alias names: one table per architecture, modules by path.

Written down beside :mod:`vtaps.spec.alias_tables`, not derived from it.  A place is read and edited by a hook: what a
module puts out (``.output``), what it takes in (``.input``), or, of ``rot_q`` and ``rot_k``, what the rotary embedding
gives to a layer's attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Side = Literal["output", "input", "rotated"]


@dataclass(frozen=True)
class Place:
    """``part``: these columns of a fused projection of queries, keys and values; ``unscaled``: the module multiplies
    by its ``embed_scale`` at the end, and vLLM's does so later."""

    module: str
    side: Side
    part: Literal["q", "k", "v"] | None = None
    unscaled: bool = False


def _place(text: str, part: Literal["q", "k", "v"] | None = None, unscaled: bool = False) -> Place:
    module, _, side = text.rpartition(".")
    return Place(module, "input" if side == "input" else "output", part, unscaled)


_L = "model.layers.{i}"
_LLAMA: Mapping[str, Place] = {
    "embed": _place("model.embed_tokens.output"),
    "resid_pre": _place(f"{_L}.input"),
    "resid_mid": _place(f"{_L}.post_attention_layernorm.input"),
    "resid_post": _place(f"{_L}.output"),
    "ln1": _place(f"{_L}.input_layernorm.output"),
    "ln2": _place(f"{_L}.post_attention_layernorm.output"),
    "attn_out": _place(f"{_L}.self_attn.output"),
    "mlp_out": _place(f"{_L}.mlp.output"),
    "q": _place(f"{_L}.self_attn.q_proj.output"),
    "k": _place(f"{_L}.self_attn.k_proj.output"),
    "v": _place(f"{_L}.self_attn.v_proj.output"),
    "rot_q": Place(f"{_L}.self_attn", "rotated", "q"),
    "rot_k": Place(f"{_L}.self_attn", "rotated", "k"),
    "z": _place(f"{_L}.self_attn.o_proj.input"),
    "mlp_post": _place(f"{_L}.mlp.down_proj.input"),
    "final_norm": _place("model.norm.output"),
}
_MOE: Mapping[str, Place] = {
    **{alias: place for alias, place in _LLAMA.items() if alias != "mlp_post"},
    "router_logits": _place(f"{_L}.mlp.gate.output"),
}
_PHI3: Mapping[str, Place] = {
    **_LLAMA,
    "q": _place(f"{_L}.self_attn.qkv_proj.output", "q"),
    "k": _place(f"{_L}.self_attn.qkv_proj.output", "k"),
    "v": _place(f"{_L}.self_attn.qkv_proj.output", "v"),
}
_GEMMA1: Mapping[str, Place] = {**_LLAMA, "embed": _place("model.embed_tokens.output", unscaled=True)}
_GEMMA: Mapping[str, Place] = {
    **_GEMMA1,
    "resid_mid": _place(f"{_L}.pre_feedforward_layernorm.input"),
    "ln2": _place(f"{_L}.pre_feedforward_layernorm.output"),
    "attn_out": _place(f"{_L}.post_attention_layernorm.output"),
    "mlp_out": _place(f"{_L}.post_feedforward_layernorm.output"),
}
_H = "transformer.h.{i}"
_GPT2: Mapping[str, Place] = {
    "embed": _place("transformer.wte.output"),
    "resid_pre": _place(f"{_H}.input"),
    "resid_mid": _place(f"{_H}.ln_2.input"),
    "resid_post": _place(f"{_H}.output"),
    "ln1": _place(f"{_H}.ln_1.output"),
    "ln2": _place(f"{_H}.ln_2.output"),
    "attn_out": _place(f"{_H}.attn.output"),
    "mlp_out": _place(f"{_H}.mlp.output"),
    "q": _place(f"{_H}.attn.c_attn.output", "q"),
    "k": _place(f"{_H}.attn.c_attn.output", "k"),
    "v": _place(f"{_H}.attn.c_attn.output", "v"),
    "z": _place(f"{_H}.attn.c_proj.input"),
    "mlp_post": _place(f"{_H}.mlp.c_proj.input"),
    "final_norm": _place("transformer.ln_f.output"),
}


@dataclass(frozen=True)
class Family:
    """``layers``: the path of the decoder layers; ``norm`` and ``head``: what the lens goes through."""

    places: Mapping[str, Place]
    layers: str
    norm: str
    head: str = "lm_head"


_OF_LLAMA = Family(_LLAMA, "model.layers", "model.norm")
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _OF_LLAMA,
    "MistralForCausalLM": _OF_LLAMA,
    "Qwen2ForCausalLM": _OF_LLAMA,
    "Qwen3ForCausalLM": _OF_LLAMA,
    "Ernie4_5ForCausalLM": _OF_LLAMA,
    "MixtralForCausalLM": Family(_MOE, "model.layers", "model.norm"),
    "OlmoeForCausalLM": Family(_MOE, "model.layers", "model.norm"),
    "Qwen2MoeForCausalLM": Family(_MOE, "model.layers", "model.norm"),
    "Qwen3MoeForCausalLM": Family(_MOE, "model.layers", "model.norm"),
    "Phi3ForCausalLM": Family(_PHI3, "model.layers", "model.norm"),
    "GemmaForCausalLM": Family(_GEMMA1, "model.layers", "model.norm"),
    "Gemma2ForCausalLM": Family(_GEMMA, "model.layers", "model.norm"),
    "Gemma3ForCausalLM": Family(_GEMMA, "model.layers", "model.norm"),
    "GPT2LMHeadModel": Family(_GPT2, "transformer.h", "transformer.ln_f"),
}
"""By the architecture's name, which is Hugging Face's class too."""


def place_of(architecture: str, site: str) -> tuple[Place, int | None] | None:
    """The place of a site by its canonical name (``resid_post[3]``, ``embed``) and its layer; None where there is none:
    no table for the architecture, or a location that is no alias."""
    family = FAMILIES.get(architecture)
    alias, bracket, rest = site.partition("[")
    if family is None or alias not in family.places:
        return None
    if not bracket:
        return family.places[alias], None
    number = rest.removesuffix("]")
    return (family.places[alias], int(number)) if number.isdecimal() else None

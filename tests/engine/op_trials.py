"""Edits through ops, a family at a time, and what they come to in the Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

WIDTH = 128
PUSH = np.random.default_rng(5).standard_normal(WIDTH).astype(np.float32)


@dataclass(frozen=True)
class ByHand:
    """``change`` of the rows ``[…, n, columns]`` of a module's input or output in the Hugging Face model: in place,
    or of an ``argument`` for this module alone."""

    module: str
    side: str
    change: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """Edits of a spec, name → edit without its rows, and what they come to in the Hugging Face model."""

    edits: dict[str, dict[str, Any]]
    by_hand: tuple[ByHand, ...]


def scaled(by: float, columns: slice = slice(None)) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[..., columns] *= by
        return out

    return change


ZERO: dict[str, Any] = {"zero": {}}
PUSHED: dict[str, Any] = {"add": {"vector": "push"}}
ATTENTION = "model.layers.1.self_attn"
TRIALS: dict[str, dict[str, Trial]] = {
    "llama": {
        "scale_embedding": Trial(
            {"scale": {"at": "model.source.hidden_states_1", "scale": {"by": -0.5}}},  # the alias embed
            (ByHand("model.embed_tokens", "output", scaled(-0.5)),),
        ),
        "scale_normed": Trial(
            {"scale": {"at": "model.source.self_norm_0.output[0]", "scale": {"by": -0.5}}},  # final_norm
            (ByHand("model.norm", "output", scaled(-0.5)),),
        ),
        "zero_q": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_0", **ZERO}},  # the alias q[1]
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "scale_act": Trial(  # in a function of another file
            {
                "scale": {
                    "at": "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0",
                    "scale": {"by": -0.5},
                }
            },
            (ByHand("model.layers.1.mlp.down_proj", "output", scaled(-0.5)),),
        ),
    },
    "qwen3": {
        "zero_q": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_0", **ZERO}},  # the alias q[1]
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "zero_head": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_view_0", "zero": {"heads": [1]}}},
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0, slice(32, 64))),),
        ),
    },
    "gemma3": {
        "scale_embedding": Trial(  # after Gemma's own scaling: resid_pre[0]
            {"scale": {"at": "model.source.self_embed_input_ids_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0", "input", scaled(-0.5)),),
        ),
        "scale_k": Trial(
            {"scale": {"at": f"{ATTENTION}.source.k_flatten_0", "scale": {"by": -1.5}}},
            (ByHand(f"{ATTENTION}.k_norm", "output", scaled(-1.5)),),
        ),
    },
    "cohere": {
        "zero_head": Trial(  # in the function that the forward calls
            {"zero": {"at": f"{ATTENTION}.source.self__apply_qk_norm_0.source.k_view_0", "zero": {"heads": [1]}}},
            (ByHand(f"{ATTENTION}.k_proj", "output", scaled(0.0, slice(32, 64))),),
        ),
        "zero_q": Trial(  # what is normed to nothing was nothing
            {"zero": {"at": f"{ATTENTION}.source.self__apply_qk_norm_0.source.q_2", **ZERO}},
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "scale_attended": Trial(  # what the sum takes in, no other
            {"scale": {"at": "model.layers.1.source.binop_add_0.input[0]", "scale": {"by": -0.5}}},
            (ByHand("model.layers.1.self_attn", "output", scaled(-0.5)),),
        ),
    },
    "gpt2": {
        "scale_positions": Trial(
            {"scale": {"at": "transformer.source.position_embeds_0", "scale": {"by": -0.5}}},
            (ByHand("transformer.wpe", "output", scaled(-0.5)),),
        ),
        "scale_sum": Trial(
            {"scale": {"at": "transformer.h.1.source.binop_add_0", "scale": {"by": -0.5}}},
            (ByHand("transformer.h.1.ln_2", "input", scaled(-0.5)),),
        ),
        # Two names of what goes in, two of what comes out; each order of two gives another value.
        "around": Trial(
            {
                "scale_before": {"at": "transformer.h.0.input.hidden_states", "scale": {"by": 2.0}},
                "add_first": {"at": "transformer.h.0.source.residual_0", **PUSHED},
                "scale_last": {"at": "transformer.h.0.source.binop_add_1", "scale": {"by": -3.0}},
                "add_after": {"at": "transformer.h.0.output", **PUSHED},
            },
            (
                ByHand("transformer.h.0", "input", lambda x: x * 2.0 + torch.from_numpy(PUSH)),
                ByHand("transformer.h.0", "output", lambda x: x * -3.0 + torch.from_numpy(PUSH)),
            ),
        ),
    },
    "qwen3_moe": {
        "scale_embedding": Trial(  # no alias table: the model's own forward gets a tap
            {"scale": {"at": "model.source.self_embed_input_ids_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0", "input", scaled(-0.5)),),
        ),
        "zero_q": Trial(
            {"zero": {"at": f"{ATTENTION}.source.q_0", **ZERO}},  # no alias table: an element of what the split gives
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "scale_fed": Trial(
            {"scale": {"at": "model.layers.0.mlp.source.hidden_states_view_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0.mlp", "input", scaled(-0.5)),),
        ),
    },
    "granitemoehybrid": {
        "zero_query": Trial(
            {"zero": {"at": f"{ATTENTION}.source.query_0", **ZERO}},
            (ByHand(f"{ATTENTION}.q_proj", "output", scaled(0.0)),),
        ),
        "scale_gate": Trial(  # a slice of what the projection gives
            {"scale": {"at": "model.layers.0.mamba.source.gate_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0.mamba.in_proj", "output", scaled(-0.5, slice(0, 256))),),
        ),
        "scale_copy": Trial(  # what the shared MLP is given is another tensor
            {"scale": {"at": "model.layers.1.source.hidden_states_clone_0", "scale": {"by": -0.5}}},
            (ByHand("model.layers.1.block_sparse_moe", "argument", scaled(-0.5)),),
        ),
        "scale_embedding": Trial(  # behind an augmented assignment
            {"scale": {"at": "model.source.hidden_states_2", "scale": {"by": -0.5}}},
            (ByHand("model.layers.0", "input", scaled(-0.5)),),
        ),
    },
    "lfm2": {
        "push_embedding": Trial(
            {"add": {"at": "model.source.hidden_states_1", **PUSHED}},
            (ByHand("model.layers.0", "input", lambda x: x + torch.from_numpy(PUSH)),),
        ),
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

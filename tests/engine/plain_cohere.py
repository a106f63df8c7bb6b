"""Cohere's forward by hand: attention and MLP side by side, and a function that norms queries and keys a head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.plain_forwards import Plain


class Cohere(Plain):
    """What ops take in is kept too, and what the ops of the function compute that an op calls."""

    def logits(self, ids: Tensor) -> Tensor:
        embedding = self.weights["model.embed_tokens.weight"]
        say = self.say("model")
        hidden_states = say("self_embed_input_ids_0", embedding[ids], "hidden_states_1")
        self.say("model.source.self_embed_input_ids_0")("self_embed_tokens_0", hidden_states)
        residual = hidden_states
        for number in range(self.config.num_hidden_layers):
            # A layer hands on what went in as the residual.
            residual, hidden_states = hidden_states, self._layer(f"model.layers.{number}", hidden_states)
        say("self_norm_0.input[0]", hidden_states)
        say("self_norm_0.input[1]", residual)
        normed = self._layer_norm(hidden_states, "model.norm"), residual
        hidden_states, _ = say("self_norm_0", normed, "hidden_states_4", "_")
        return functional.linear(hidden_states, embedding) * self.config.logit_scale

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.layer_norm_eps)
            * self.weights[f"{name}.weight"]
        )

    def _layer(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        residual = say("residual_0", hidden_states)
        say("self_input_layernorm_0.input[0]", hidden_states)
        say("self_input_layernorm_0.input[1]", residual)
        normed = self._layer_norm(hidden_states, f"{path}.input_layernorm")
        hidden_states, residual = say("self_input_layernorm_0", (normed, residual), "hidden_states_0", "residual_1")
        say("self_self_attn_0.input.hidden_states", hidden_states)
        attended = say(
            "self_self_attn_0", self._attention(f"{path}.self_attn", hidden_states), "hidden_states_attention_0"
        )
        say("self_mlp_0.input[0]", hidden_states)
        fed = say("self_mlp_0", self._mlp(f"{path}.mlp", hidden_states), "hidden_states_mlp_0")
        say("binop_add_0.input[0]", attended)
        say("binop_add_0.input[1]", fed)
        block = say("binop_add_0", attended + fed, "parallel_block_output_0")
        say("binop_add_1.input[0]", residual)
        say("binop_add_1.input[1]", block)
        out: Tensor = say("binop_add_1", residual + block, "hidden_states_1")
        return out

    def _attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        say("self_qkv_proj_0.input[0]", hidden_states)
        q, k, v = self.qkv_of(path, hidden_states)
        say("self__apply_qk_norm_0.input[0]", q)
        say("self__apply_qk_norm_0.input[1]", k)
        q, k = say("self__apply_qk_norm_0", self._normed(path, q, k), "q_1", "k_1")
        say("self_rotary_emb_0.input[1]", q)
        say("self_rotary_emb_0.input[2]", k)
        turned = self._interleaved(q), self._interleaved(k)
        q, k = say("self_rotary_emb_0", turned, "q_2", "k_2")
        for number, x in enumerate((q, k, v)):
            say(f"self_attn_0.input[{number}]", x)
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        say("self_o_proj_0.input[0]", attn_output)
        output: Tensor = say("self_o_proj_0", self.linear(attn_output, f"{path}.o_proj"), "output_0", "_")
        return output

    def _normed(self, path: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``_apply_qk_norm``"""
        say = self.say(f"{path}.source.self__apply_qk_norm_0")
        q = say("q_view_0", q.view(len(q), -1, self.head_dim), "q_0")
        k = say("k_view_0", k.view(len(k), -1, self.head_dim), "k_0")
        say("self_q_norm_0.input[0]", q)
        q = say("self_q_norm_0", (self._layer_norm(q, f"{path}.q_norm"), None), "q_1", "_")
        say("self_k_norm_0.input[0]", k)
        k = say("self_k_norm_0", (self._layer_norm(k, f"{path}.k_norm"), None), "k_1", "_")
        q = say("q_view_1", q.reshape(len(q), -1), "q_2")
        k = say("k_view_1", k.reshape(len(k), -1), "k_2")
        return q, k

    def _interleaved(self, x: Tensor) -> Tensor:
        """Neighbours of each head, turned by ``position × theta^(-2j / head_dim)``."""
        rates = self.config.rope_parameters["rope_theta"] ** (
            -torch.arange(self.head_dim // 2, dtype=torch.float64) / (self.head_dim // 2)
        )
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
        one, two = x.reshape(len(x), -1, self.head_dim // 2, 2).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).reshape(x.shape)

    def _mlp(self, path: str, x: Tensor) -> Tensor:
        say = self.say(path)
        say("self_gate_up_proj_0.input[0]", x)
        gate_up = say("self_gate_up_proj_0", self.linear(x, f"{path}.gate_proj", f"{path}.up_proj"), "gate_up_0", "_")
        say("self_act_fn_0.input[0]", gate_up)
        x = say("self_act_fn_0", self.gated(gate_up), "x_0")
        say("self_down_proj_0.input[0]", x)
        x = say("self_down_proj_0", self.linear(x, f"{path}.down_proj"), "x_1", "_")
        return x

"""The forwards of hybrids by hand: layers that attend, and layers that carry a state instead."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.plain_forwards import Llama, Pair, Plain


def causal_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """A convolution a column of ``x`` ``[rows, columns]`` with ``kernel`` ``[columns, 1, taps]``, whose last tap is the
    row's own."""
    taps = kernel.shape[-1]
    padded = functional.pad(x, (0, 0, taps - 1, 0))
    return sum((padded[tap : tap + len(x)] * kernel[:, 0, tap] for tap in range(taps)), torch.zeros_like(x))


class Lfm2(Llama):
    """Short convolutions, which fill a tensor in place: that one has no value of its own to compare."""

    last_norm, eps = "embedding_norm", "norm_eps"

    def layer(self, path: str, number: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        say = self.say(path)
        hidden_states, residual = self.first_norm(path, "operator_norm", hidden_states, residual)
        attends = self.config.layer_types[number] == "full_attention"
        if attends:
            attended = self.attend(f"{path}.self_attn", hidden_states)
            hidden_states = say("self_self_attn_0", attended, "hidden_states_2")
        else:
            hidden_states = self._short_conv(f"{path}.conv", hidden_states)
        hidden_states, residual = say(
            "self_ffn_norm_0",
            self.add_norm(hidden_states, residual, f"{path}.ffn_norm"),
            f"hidden_states_{3 if attends else 2}",
            "residual_2",
        )
        fed = self.feed(f"{path}.feed_forward", hidden_states)
        return say("self_feed_forward_0", fed, *(() if attends else ("hidden_states_3",))), residual

    def _short_conv(self, path: str, hidden_states: Tensor) -> Tensor:
        b, c, x = self.linear(hidden_states, f"{path}.in_proj")[0].chunk(3, -1)
        return self.linear(c * causal_conv(b * x, self.weights[f"{path}.conv.weight"]), f"{path}.out_proj")[0]

    def attend(self, path: str, hidden_states: Tensor) -> Tensor:
        say, rows = self.say(path), len(hidden_states)
        q, k, v = self.qkv_of(path, hidden_states)
        q = say("q_view_0", q.view(rows, self.heads, self.head_dim), "q_1")
        k = say("k_view_0", k.view(rows, self.kv_heads, self.head_dim), "k_1")
        q = say("self_q_layernorm_0", self.norm(q, f"{path}.q_layernorm"), "q_2")
        k = say("self_k_layernorm_0", self.norm(k, f"{path}.k_layernorm"), "k_2")
        theta = self.config.rope_parameters["rope_theta"]
        q, k = say("self_rotary_emb_0", self.rotary(q, k, theta), "q_3", "k_3")
        q = say("q_view_1", q.view(rows, self.heads * self.head_dim), "q_4")
        k = say("k_view_1", k.view(rows, self.kv_heads * self.head_dim), "k_4")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        output: Tensor = say("self_out_proj_0", self.linear(attn_output, f"{path}.out_proj"), "output_0", "_")
        return output

    def feed(self, path: str, x: Tensor) -> Tensor:
        say = self.say(path)
        gate_up = say("self_w13_0", self.linear(x, f"{path}.w1", f"{path}.w3"), "gate_up_0", "_")
        x = say("self_act_fn_0", self.gated(gate_up), "x_0")
        x = say("self_w2_0", self.linear(x, f"{path}.w2"), "x_1", "_")
        return x


class GraniteHybrid(Plain):
    """Mamba 2 and attention, each with experts and a shared MLP."""

    def logits(self, ids: Tensor) -> Tensor:
        say = self.say("model")
        hidden_states = say("self_embed_input_ids_0", self.weights["model.embed_tokens.weight"][ids], "hidden_states_1")
        hidden_states = say("hidden_states_2", hidden_states * self.config.embedding_multiplier)
        for number, kind in enumerate(self.config.layer_types):
            layer = self._attention_layer if kind == "full_attention" else self._mamba_layer
            hidden_states = layer(f"model.layers.{number}", hidden_states)
        hidden_states = say("self_norm_0", self.norm(hidden_states, "model.norm"), "hidden_states_5")
        return self.linear(hidden_states, "lm_head")[0] / self.config.logits_scaling

    def _mamba_layer(self, path: str, hidden_states: Tensor) -> Tensor:
        say, by = self.say(path), self.config.residual_multiplier
        residual = say("residual_0", hidden_states)
        normed = self.norm(hidden_states, f"{path}.input_layernorm")
        hidden_states = say("self_input_layernorm_0", normed, "hidden_states_0")
        output = say("self_mamba_0", self._mamba(f"{path}.mamba", hidden_states), "output_0")
        hidden_states = say("binop_add_0", residual + say("binop_mul_0", output * by), "hidden_states_1")
        return self._fed(path, hidden_states, 2)

    def _attention_layer(self, path: str, hidden_states: Tensor) -> Tensor:
        say, by = self.say(path), self.config.residual_multiplier
        residual = say("residual_0", hidden_states)
        normed = self.norm(hidden_states, f"{path}.input_layernorm")
        hidden_states = say("self_input_layernorm_0", normed, "hidden_states_0")
        hidden_states = say("self_self_attn_0", self._attend(f"{path}.self_attn", hidden_states), "hidden_states_1")
        hidden_states = say("binop_add_0", residual + say("binop_mul_0", hidden_states * by), "hidden_states_2")
        return self._fed(path, hidden_states, 3)

    def _fed(self, path: str, hidden_states: Tensor, number: int) -> Tensor:
        """The second half of both layers; ``number`` is that of the next ``hidden_states``.  Two branches that are not
        taken here have one each."""
        say, by = self.say(path), self.config.residual_multiplier
        residual = say("residual_1", hidden_states)
        normed = self.norm(hidden_states, f"{path}.post_attention_layernorm")
        hidden_states = say("self_post_attention_layernorm_0", normed, f"hidden_states_{number}")
        moe_hidden_states = say("hidden_states_clone_0", hidden_states.clone(), "moe_hidden_states_0")
        mixed = self._moe(f"{path}.block_sparse_moe", moe_hidden_states)
        moe_hidden_states = say("self_block_sparse_moe_1", mixed, "moe_hidden_states_1")
        shared = say("self_shared_mlp_0", self._mlp(f"{path}.shared_mlp", hidden_states))
        hidden_states = say("binop_add_1", moe_hidden_states + shared, f"hidden_states_{number + 2}")
        hidden_states = residual + say("binop_mul_1", hidden_states * by)
        out: Tensor = say("binop_add_2", hidden_states, f"hidden_states_{number + 4}")
        return out

    def _moe(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        hidden_states = say("hidden_states_view_0", hidden_states.view(hidden_states.shape), "hidden_states_0")
        router_logits = say("self_gate_0", self.linear(hidden_states, f"{path}.router"), "router_logits_0", "_")
        mixed = say("self_experts_0", self.experts(path, hidden_states, router_logits), "final_hidden_states_0")
        out: Tensor = say("final_hidden_states_view_0", mixed.view(mixed.shape))
        return out

    def _mlp(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        hidden_states = say(
            "self_input_linear_0", self.linear(hidden_states, f"{path}.input_linear"), "hidden_states_0", "_"
        )
        hidden_states = say("self_act_fn_0", self.gated(hidden_states), "hidden_states_1")
        hidden_states = say(
            "self_output_linear_0", self.linear(hidden_states, f"{path}.output_linear"), "hidden_states_2", "_"
        )
        return hidden_states

    def _attend(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        query, key, value = self.qkv_of(path, hidden_states, ("query_0", "key_0", "value_0"))
        theta = self.config.rope_parameters["rope_theta"]
        query, key = say("self_rotary_emb_0", self.rotary(query, key, theta), "query_1", "key_1")
        attended = self.attention(query, key, value, self.config.attention_multiplier)
        hidden_states = say("self_attn_0", attended, "hidden_states_0")
        hidden_states = say("self_o_proj_0", self.linear(hidden_states, f"{path}.o_proj"))
        return say("hidden_states_1", hidden_states)

    def _mamba(self, path: str, hidden_states: Tensor) -> Tensor:
        """``MambaMixer2``, whose kernel fills a tensor in place, as a recurrence over the rows."""
        say, size = self.say(path), self.config
        inner, heads, states = size.mamba_expand * size.hidden_size, size.mamba_n_heads, size.mamba_d_state
        projected = say("self_in_proj_0", self.linear(hidden_states, f"{path}.in_proj"), "projected_states_0", "_")
        gate, xbc, dt = projected.split([inner, inner + 2 * states, heads], -1)
        gate = say("gate_0", gate)
        xbc = causal_conv(xbc, self.weights[f"{path}.conv1d.weight"]) + self.weights[f"{path}.conv1d.bias"]
        x, b, c = functional.silu(xbc).split([inner, states, states], -1)
        x = x.view(len(x), heads, -1)
        dt = functional.softplus(dt + self.weights[f"{path}.dt_bias"])[..., None]
        kept = torch.exp(-dt * self.weights[f"{path}.A_log"].exp()[:, None])
        state = torch.zeros(heads, x.shape[-1], states, dtype=x.dtype)
        rows = []
        for row in range(len(x)):
            state = kept[row, ..., None] * state + (dt[row] * x[row])[..., None] * b[row]
            rows.append(state @ c[row] + self.weights[f"{path}.D"][:, None] * x[row])
        ssm_output = torch.stack(rows).flatten(1)
        normed = self.norm(ssm_output * functional.silu(gate), f"{path}.norm")
        hidden_states = say("self_norm_0", normed, "hidden_states_0")
        output: Tensor = say("self_out_proj_0", self.linear(hidden_states, f"{path}.out_proj"), "output_0", "_")
        return output

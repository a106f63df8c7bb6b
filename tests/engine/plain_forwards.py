"""Forwards of vLLM's models once more, by hand: ordinary torch in float64 over a whole sequence, from Hugging Face's
weights, with the value of every op kept under the location that a spec gives it.

Written after ``vllm/model_executor/models``, statement for statement; one rank, no cache, no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.runs import Floats

Pair = tuple[Tensor, Tensor]


class Say:
    """Keeps what the ops of one module's forward compute: ``say("q_view_0", x, "q_1")`` is a value and the names that
    it is bound to, or of a tuple the names of its elements (``_``: none)."""

    def __init__(self, values: dict[str, Tensor], path: str) -> None:
        self._values, self._source = values, f"{path}.source."

    def __call__(self, op: str, value: Any, *bound: str) -> Any:
        items = value if isinstance(value, tuple) and bound else [value] * len(bound)
        for name, item in zip(bound, items, strict=True):
            if name != "_":
                self._keep(name, item)
        if isinstance(value, tuple):
            for number, item in enumerate(value):
                self._keep(f"{op}.output[{number}]", item)
            value = tuple(item for item in value if item is not None)
            if len(value) > 1:
                return value
            (value,) = value
        self._keep(op, value)
        return value

    def _keep(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            self._values[self._source + name] = value.clone()


class Plain:
    """The forward of a Hugging Face model over one sequence: a family's own :meth:`logits`, and its parts."""

    eps = "rms_norm_eps"
    """The configuration's name for what is added under a norm's root."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.values: dict[str, Tensor] = {}
        self.heads: int = self.config.num_attention_heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", self.heads)

    def forward(self, ids: Sequence[int]) -> tuple[Floats, Mapping[str, Floats]]:
        """Logits ``[rows, vocab]``, and location → ``[rows, columns]``, further axes side by side."""
        self.values = {}
        with torch.no_grad():
            logits = self.logits(torch.tensor(list(ids)))
        found = {name: value.reshape(len(value), -1).float().numpy() for name, value in self.values.items()}
        return logits.float().numpy(), found

    def logits(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def say(self, path: str) -> Say:
        return Say(self.values, path)

    def linear(self, x: Tensor, *names: str) -> tuple[Tensor, None]:
        """Side by side, as vLLM fuses them; with the bias that it returns instead of adding, which is none."""
        weights = [self.weights[f"{name}.weight"] for name in names]
        return functional.linear(x, torch.cat(weights)), None

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(self.config, self.eps))
        return x * scale * self.weights[f"{name}.weight"]

    def add_norm(self, x: Tensor, residual: Tensor, name: str) -> Pair:
        return self.norm(x + residual, name), x + residual

    def act(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def gated(self, x: Tensor) -> Tensor:
        """The first half of the columns, activated, times the second."""
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up

    def experts(self, path: str, x: Tensor, scores: Tensor) -> Tensor:
        """Each row through its best experts, weighted by the softmax of their ``scores`` ``[rows, experts]``."""
        best, chosen = scores.topk(self.config.num_experts_per_tok, -1)
        gate_up, down = (self.weights[f"{path}.experts.{name}_proj"][chosen] for name in ("gate_up", "down"))
        inner = self.gated(torch.einsum("th,teih->tei", x, gate_up))
        return (torch.einsum("tei,tehi->teh", inner, down) * best.softmax(-1)[..., None]).sum(1)

    def rotary(self, q: Tensor, k: Tensor, theta: float) -> Pair:
        """Halves of each head, turned by ``position × theta^(-2j / head_dim)``; shapes stay what they are."""
        half = self.head_dim // 2
        rates = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(q), dtype=torch.float64)[:, None, None] * rates
        cos, sin = angles.cos(), angles.sin()

        def turn(x: Tensor) -> Tensor:
            one, two = x.reshape(len(x), -1, self.head_dim).split(half, -1)
            return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).reshape(x.shape)

        return turn(q), turn(k)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Causal softmax attention ``[rows, heads × head_dim]``; a window is how many positions a row sees, itself
        one of them."""
        q = q.reshape(len(q), self.heads, self.head_dim).transpose(0, 1)
        k, v = (
            x.reshape(len(x), self.kv_heads, self.head_dim)
            .transpose(0, 1)
            .repeat_interleave(self.heads // self.kv_heads, 0)
            for x in (k, v)
        )
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        hidden = (back < 0) | (back >= (window or len(back)))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def qkv_of(
        self, path: str, hidden_states: Tensor, names: tuple[str, str, str] = ("q_0", "k_0", "v_0")
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected side by side and split, bound to ``names``."""
        say = self.say(path)
        projections = [f"{path}.{part}_proj" for part in "qkv"]
        qkv = say("self_qkv_proj_0", self.linear(hidden_states, *projections), "qkv_0", "_")
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = say("qkv_split_0", qkv.split(sizes, -1), *names)
        return q, k, v


class Llama(Plain):
    """Models whose layers hand on hidden states and a residual, whose sum is the stream; here Llama's own layer."""

    last_norm = "norm"

    def logits(self, ids: Tensor) -> Tensor:
        say, residual = self.say("model"), None
        hidden_states = say("self_embed_input_ids_0", self.embed(ids), "hidden_states_1")
        self.say("model.source.self_embed_input_ids_0")("self_embed_tokens_0", hidden_states)
        for number in range(self.config.num_hidden_layers):
            hidden_states, residual = self.layer(f"model.layers.{number}", number, hidden_states, residual)
        normed = self.add_norm(hidden_states, residual, f"model.{self.last_norm}")
        hidden_states, _ = say(f"self_{self.last_norm}_0", normed, "hidden_states_4", "_")
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.linear(hidden_states, head)[0]

    def embed(self, ids: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][ids]

    def first_norm(self, path: str, name: str, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        say = self.say(path)
        if residual is None:
            residual = say("residual_0", hidden_states)
            hidden_states = say(f"self_{name}_0", self.norm(hidden_states, f"{path}.{name}"), "hidden_states_0")
        else:
            hidden_states, residual = say(
                f"self_{name}_1",
                self.add_norm(hidden_states, residual, f"{path}.{name}"),
                "hidden_states_1",
                "residual_1",
            )
        return hidden_states, residual

    def layer(self, path: str, number: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        say = self.say(path)
        hidden_states, residual = self.first_norm(path, "input_layernorm", hidden_states, residual)
        hidden_states = say("self_self_attn_0", self.attend(f"{path}.self_attn", hidden_states), "hidden_states_2")
        hidden_states, residual = say(
            "self_post_attention_layernorm_0",
            self.add_norm(hidden_states, residual, f"{path}.post_attention_layernorm"),
            "hidden_states_3",
            "residual_2",
        )
        return say("self_mlp_0", self.feed(f"{path}.mlp", hidden_states), "hidden_states_4"), residual

    def attend(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        q, k, v = self.qkv_of(path, hidden_states)
        theta = self.config.rope_parameters["rope_theta"]
        q, k = say("self_rotary_emb_0", self.rotary(q, k, theta), "q_1", "k_1")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        output: Tensor = say("self_o_proj_0", self.linear(attn_output, f"{path}.o_proj"), "output_0", "_")
        return output

    def feed(self, path: str, x: Tensor) -> Tensor:
        say = self.say(path)
        x = say("self_gate_up_proj_0", self.linear(x, f"{path}.gate_proj", f"{path}.up_proj"), "x_0", "_")
        x = say("maybe_fused_act_quant_0", self.gated(x), "x_1")
        self.say(f"{path}.source.maybe_fused_act_quant_0")("act_fn_0", x)
        x = say("self_down_proj_0", self.linear(x, f"{path}.down_proj"), "x_2", "_")
        return x


class Qwen3(Llama):
    def attend(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        q, k, v = self.qkv_of(path, hidden_states)
        q_by_head = say("q_view_0", q.view(len(q), self.heads, self.head_dim), "q_by_head_0")
        q_by_head = say("self_q_norm_0", self.norm(q_by_head, f"{path}.q_norm"), "q_by_head_1")
        q = say("q_by_head_view_0", q_by_head.view(q.shape), "q_1")
        k_by_head = say("k_view_0", k.view(len(k), self.kv_heads, self.head_dim), "k_by_head_0")
        k_by_head = say("self_k_norm_0", self.norm(k_by_head, f"{path}.k_norm"), "k_by_head_1")
        k = say("k_by_head_view_0", k_by_head.view(k.shape), "k_1")
        theta = self.config.rope_parameters["rope_theta"]
        q, k = say("self_rotary_emb_0", self.rotary(q, k, theta), "q_2", "k_2")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        output: Tensor = say("self_o_proj_0", self.linear(attn_output, f"{path}.o_proj"), "output_0", "_")
        return output

    def feed(self, path: str, x: Tensor) -> Tensor:
        say = self.say(path)
        gate_up = say("self_gate_up_proj_0", self.linear(x, f"{path}.gate_proj", f"{path}.up_proj"), "gate_up_0", "_")
        x = say("self_act_fn_0", self.gated(gate_up), "x_0")
        x = say("self_down_proj_0", self.linear(x, f"{path}.down_proj"), "x_1", "_")
        return x


class Qwen3Moe(Qwen3):
    def feed(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        hidden_states = say("hidden_states_view_0", hidden_states.view(hidden_states.shape), "hidden_states_0")
        scores = self.linear(hidden_states, f"{path}.gate")[0]
        out: Tensor = say("self_experts_0", self.experts(path, hidden_states, scores), "final_hidden_states_0")
        return out


class Gemma3(Qwen3):
    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * torch.tensor(self.config.hidden_size**0.5).double()

    def layer(self, path: str, number: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        say = self.say(path)
        hidden_states, residual = self.first_norm(path, "input_layernorm", hidden_states, residual)
        sliding = self.config.layer_types[number] == "sliding_attention"
        attended = self.attend_within(f"{path}.self_attn", hidden_states, sliding)
        hidden_states = say("self_self_attn_0", attended, "hidden_states_2")
        hidden_states = say(
            "self_post_attention_layernorm_0",
            self.norm(hidden_states, f"{path}.post_attention_layernorm"),
            "hidden_states_3",
        )
        hidden_states, residual = say(
            "self_pre_feedforward_layernorm_0",
            self.add_norm(hidden_states, residual, f"{path}.pre_feedforward_layernorm"),
            "hidden_states_4",
            "residual_2",
        )
        hidden_states = say("self_mlp_0", self.feed(f"{path}.mlp", hidden_states), "hidden_states_5")
        hidden_states = say(
            "self_post_feedforward_layernorm_0",
            self.norm(hidden_states, f"{path}.post_feedforward_layernorm"),
            "hidden_states_6",
        )
        return hidden_states, residual

    def attend_within(self, path: str, hidden_states: Tensor, sliding: bool) -> Tensor:
        say = self.say(path)
        q, k, v = self.qkv_of(path, hidden_states)
        q = say("q_unflatten_0", q.unflatten(-1, (self.heads, self.head_dim)), "q_1")
        q = say("self_q_norm_0", self.norm(q, f"{path}.q_norm"), "q_2")
        q = say("q_flatten_0", q.flatten(-2, -1), "q_3")
        k = say("k_unflatten_0", k.unflatten(-1, (self.kv_heads, self.head_dim)), "k_1")
        k = say("self_k_norm_0", self.norm(k, f"{path}.k_norm"), "k_2")
        k = say("k_flatten_0", k.flatten(-2, -1), "k_3")
        kind = "sliding_attention" if sliding else "full_attention"
        theta = self.config.rope_parameters[kind]["rope_theta"]
        q, k = say("self_rotary_emb_0", self.rotary(q, k, theta), "q_4", "k_4")
        scale = self.config.query_pre_attn_scalar**-0.5
        window = self.config.sliding_window if sliding else None
        attn_output = say("self_attn_0", self.attention(q, k, v, scale, window), "attn_output_0")
        output: Tensor = say("self_o_proj_0", self.linear(attn_output, f"{path}.o_proj"), "output_0", "_")
        return output


class Gpt2(Plain):
    def conv1d(self, x: Tensor, name: str) -> tuple[Tensor, None]:
        """GPT-2's linear layers, stored transposed."""
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"], None

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.config.layer_norm_epsilon)

    def logits(self, ids: Tensor) -> Tensor:
        say, embedding = self.say("transformer"), self.weights["transformer.wte.weight"]
        inputs_embeds = say("self_embed_input_ids_0", embedding[ids], "inputs_embeds_0")
        positions = self.weights["transformer.wpe.weight"][: len(ids)]
        position_embeds = say("self_wpe_0", positions, "position_embeds_0")
        hidden_states = say("binop_add_0", inputs_embeds + position_embeds, "hidden_states_0")
        for number in range(self.config.n_layer):
            hidden_states = self._block(f"transformer.h.{number}", hidden_states)
        hidden_states = say("self_ln_f_0", self.layer_norm(hidden_states, "transformer.ln_f"), "hidden_states_3")
        return functional.linear(hidden_states, embedding)

    def _block(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        residual = say("residual_0", hidden_states)
        hidden_states = say("self_ln_1_0", self.layer_norm(hidden_states, f"{path}.ln_1"), "hidden_states_0")
        attn_output = say("self_attn_0", self._attention(f"{path}.attn", hidden_states), "attn_output_0")
        hidden_states = say("binop_add_0", attn_output + residual, "hidden_states_1")
        residual = say("residual_1", hidden_states)
        hidden_states = say("self_ln_2_0", self.layer_norm(hidden_states, f"{path}.ln_2"), "hidden_states_2")
        fed = say("self_mlp_0", self._mlp(f"{path}.mlp", hidden_states), "feed_forward_hidden_states_0")
        out: Tensor = say("binop_add_1", residual + fed, "hidden_states_3")
        return out

    def _attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        qkv = say("self_c_attn_0", self.conv1d(hidden_states, f"{path}.c_attn"), "qkv_0", "_")
        q, k, v = say("qkv_chunk_0", qkv.chunk(3, -1), "q_0", "k_0", "v_0")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        out: Tensor = say("self_c_proj_0", self.conv1d(attn_output, f"{path}.c_proj"), "attn_output_1", "_")
        return out

    def _mlp(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        hidden_states = say("self_c_fc_0", self.conv1d(hidden_states, f"{path}.c_fc"), "hidden_states_0", "_")
        hidden_states = say("self_act_0", functional.gelu(hidden_states, approximate="tanh"), "hidden_states_1")
        out: Tensor = say("self_c_proj_0", self.conv1d(hidden_states, f"{path}.c_proj"), "hidden_states_2", "_")
        return out

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
        items = list(value) if isinstance(value, tuple) else [value] * len(bound)
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
    """The forward of a Hugging Face model's family over one sequence."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.family: str = self.config.model_type
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.values: dict[str, Tensor] = {}
        self.heads: int = self.config.num_attention_heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.kv_heads: int = getattr(self.config, "num_key_value_heads", self.heads)

    def forward(self, ids: Sequence[int]) -> tuple[Floats, Mapping[str, Floats]]:
        """Logits ``[rows, vocab]``, and location → ``[rows, columns]``, further axes side by side."""
        self.values = {}
        with torch.no_grad():
            if self.family == "gpt2":
                logits = self._gpt2(torch.tensor(list(ids)))
            else:
                logits = self._pairs(torch.tensor(list(ids)))
        found = {name: value.reshape(len(value), -1).float().numpy() for name, value in self.values.items()}
        return logits.float().numpy(), found

    # Parts -------------------------------------------------------------------------------------------------------

    def say(self, path: str) -> Say:
        return Say(self.values, path)

    def linear(self, x: Tensor, *names: str) -> tuple[Tensor, None]:
        """Side by side, as vLLM fuses them; with the bias that it returns instead of adding, which is none."""
        weights = [self.weights[f"{name}.weight"] for name in names]
        return functional.linear(x, torch.cat(weights)), None

    def conv1d(self, x: Tensor, name: str) -> tuple[Tensor, None]:
        """GPT-2's linear layers, stored transposed."""
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"], None

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.norm_eps if self.family == "lfm2" else self.config.rms_norm_eps
        weight = self.weights[f"{name}.weight"] + float(self.family.startswith("gemma"))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_norm(self, x: Tensor, residual: Tensor, name: str) -> Pair:
        return self.norm(x + residual, name), x + residual

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.config.layer_norm_epsilon)

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

    # Models ------------------------------------------------------------------------------------------------------

    def _pairs(self, ids: Tensor) -> Tensor:
        """Those whose layers hand on hidden states and a residual."""
        layer = {
            "llama": self._llama_layer,
            "qwen3": self._llama_layer,
            "qwen3_moe": self._llama_layer,
            "gemma3_text": self._gemma3_layer,
            "lfm2": self._lfm2_layer,
        }[self.family]
        hidden_states = self.weights["model.embed_tokens.weight"][ids]
        if self.family == "gemma3_text":
            hidden_states = hidden_states * torch.tensor(self.config.hidden_size**0.5).double()
        residual = None
        for number in range(self.config.num_hidden_layers):
            hidden_states, residual = layer(f"model.layers.{number}", number, hidden_states, residual)
        last = "model.embedding_norm" if self.family == "lfm2" else "model.norm"
        hidden_states, _ = self.add_norm(hidden_states, residual, last)
        tied = self.config.tie_word_embeddings
        return functional.linear(
            hidden_states, self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        )

    def _first_norm(self, path: str, name: str, hidden_states: Tensor, residual: Tensor | None) -> Pair:
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

    def _llama_layer(self, path: str, _: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        """``LlamaDecoderLayer``, ``Qwen3DecoderLayer`` and ``Qwen3MoeDecoderLayer``."""
        say = self.say(path)
        attend = self._llama_attention if self.family == "llama" else self._qwen3_attention
        feed = self._qwen3_moe if self.family == "qwen3_moe" else self._llama_mlp
        hidden_states, residual = self._first_norm(path, "input_layernorm", hidden_states, residual)
        hidden_states = say("self_self_attn_0", attend(f"{path}.self_attn", hidden_states), "hidden_states_2")
        hidden_states, residual = say(
            "self_post_attention_layernorm_0",
            self.add_norm(hidden_states, residual, f"{path}.post_attention_layernorm"),
            "hidden_states_3",
            "residual_2",
        )
        return say("self_mlp_0", feed(f"{path}.mlp", hidden_states), "hidden_states_4"), residual

    def _qkv(self, path: str, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        say, dim = self.say(path), self.head_dim
        projections = [f"{path}.{part}_proj" for part in "qkv"]
        qkv = say("self_qkv_proj_0", self.linear(hidden_states, *projections), "qkv_0", "_")
        q, k, v = say(
            "qkv_split_0", qkv.split([self.heads * dim, self.kv_heads * dim, self.kv_heads * dim], -1),
            "q_0", "k_0", "v_0",
        )  # fmt: skip
        return q, k, v

    def _llama_attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        q, k, v = self._qkv(path, hidden_states)
        theta = self.config.rope_parameters["rope_theta"]
        q, k = say("self_rotary_emb_0", self.rotary(q, k, theta), "q_1", "k_1")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        output: Tensor = say("self_o_proj_0", self.linear(attn_output, f"{path}.o_proj"), "output_0", "_")
        return output

    def _qwen3_attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        q, k, v = self._qkv(path, hidden_states)
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

    def _llama_mlp(self, path: str, x: Tensor) -> Tensor:
        """``LlamaMLP``, and Qwen's and Gemma's, which differ in two names and the activation."""
        say, llama = self.say(path), self.family == "llama"
        gate_up = say(
            "self_gate_up_proj_0", self.linear(x, f"{path}.gate_proj", f"{path}.up_proj"),
            "x_0" if llama else "gate_up_0", "_",
        )  # fmt: skip
        gate, up = gate_up.chunk(2, -1)
        gemma = self.family == "gemma3_text"
        gate = functional.gelu(gate, approximate="tanh") if gemma else functional.silu(gate)
        number = 1 if llama else 0
        x = say("maybe_fused_act_quant_0" if llama else "self_act_fn_0", gate * up, f"x_{number}")
        out: Tensor = say("self_down_proj_0", self.linear(x, f"{path}.down_proj"), f"x_{number + 1}", "_")
        return out

    def _qwen3_moe(self, path: str, hidden_states: Tensor) -> Tensor:
        """``Qwen3MoeSparseMoeBlock``: each row through its best experts, weighted by their softmax scores."""
        say = self.say(path)
        hidden_states = say("hidden_states_view_0", hidden_states.view(hidden_states.shape), "hidden_states_0")
        scores = self.linear(hidden_states, f"{path}.gate")[0].softmax(-1)
        best, chosen = scores.topk(self.config.num_experts_per_tok, -1)
        best = best / best.sum(-1, keepdim=True)
        gate_up, down = (self.weights[f"{path}.experts.{name}_proj"][chosen] for name in ("gate_up", "down"))
        gate, up = torch.einsum("th,teih->tei", hidden_states, gate_up).chunk(2, -1)
        outs = torch.einsum("tei,tehi->teh", functional.silu(gate) * up, down)
        out: Tensor = say("self_experts_0", (outs * best[..., None]).sum(1), "final_hidden_states_0")
        return out

    def _gemma3_layer(self, path: str, number: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        say = self.say(path)
        hidden_states, residual = self._first_norm(path, "input_layernorm", hidden_states, residual)
        sliding = self.config.layer_types[number] == "sliding_attention"
        attended = self._gemma3_attention(f"{path}.self_attn", hidden_states, sliding)
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
        hidden_states = say("self_mlp_0", self._llama_mlp(f"{path}.mlp", hidden_states), "hidden_states_5")
        hidden_states = say(
            "self_post_feedforward_layernorm_0",
            self.norm(hidden_states, f"{path}.post_feedforward_layernorm"),
            "hidden_states_6",
        )
        return hidden_states, residual

    def _gemma3_attention(self, path: str, hidden_states: Tensor, sliding: bool) -> Tensor:
        say = self.say(path)
        q, k, v = self._qkv(path, hidden_states)
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

    def _lfm2_layer(self, path: str, number: int, hidden_states: Tensor, residual: Tensor | None) -> Pair:
        """``Lfm2AttentionDecoderLayer`` and ``Lfm2ShortConvDecoderLayer``, whose convolution fills a tensor in place:
        that one has no value of its own to compare."""
        say = self.say(path)
        hidden_states, residual = self._first_norm(path, "operator_norm", hidden_states, residual)
        attends = self.config.layer_types[number] == "full_attention"
        if attends:
            attended = self._lfm2_attention(f"{path}.self_attn", hidden_states)
            hidden_states = say("self_self_attn_0", attended, "hidden_states_2")
        else:
            hidden_states = self._short_conv(f"{path}.conv", hidden_states)
        hidden_states, residual = say(
            "self_ffn_norm_0",
            self.add_norm(hidden_states, residual, f"{path}.ffn_norm"),
            f"hidden_states_{3 if attends else 2}",
            "residual_2",
        )
        fed = self._lfm2_mlp(f"{path}.feed_forward", hidden_states)
        return say("self_feed_forward_0", fed, *(() if attends else ("hidden_states_3",))), residual

    def _short_conv(self, path: str, hidden_states: Tensor) -> Tensor:
        """``ShortConv``: a gate, a causal convolution a channel, a gate."""
        b, c, x = self.linear(hidden_states, f"{path}.in_proj")[0].chunk(3, -1)
        kernel = self.weights[f"{path}.conv.weight"].squeeze(1)  # [channels, taps], the last tap the row's own
        bx = functional.pad(b * x, (0, 0, kernel.shape[1] - 1, 0))
        mixed = sum(bx[tap : tap + len(x)] * kernel[:, tap] for tap in range(kernel.shape[1]))
        return self.linear(c * mixed, f"{path}.out_proj")[0]

    def _lfm2_attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say, rows = self.say(path), len(hidden_states)
        q, k, v = self._qkv(path, hidden_states)
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

    def _lfm2_mlp(self, path: str, x: Tensor) -> Tensor:
        say = self.say(path)
        gate_up = say("self_w13_0", self.linear(x, f"{path}.w1", f"{path}.w3"), "gate_up_0", "_")
        gate, up = gate_up.chunk(2, -1)
        x = say("self_act_fn_0", functional.silu(gate) * up, "x_0")
        out: Tensor = say("self_w2_0", self.linear(x, f"{path}.w2"), "x_1", "_")
        return out

    def _gpt2(self, ids: Tensor) -> Tensor:
        embedding = self.weights["transformer.wte.weight"]
        hidden_states = embedding[ids] + self.weights["transformer.wpe.weight"][: len(ids)]
        for number in range(self.config.n_layer):
            hidden_states = self._gpt2_block(f"transformer.h.{number}", hidden_states)
        return functional.linear(self.layer_norm(hidden_states, "transformer.ln_f"), embedding)

    def _gpt2_block(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        residual = say("residual_0", hidden_states)
        hidden_states = say("self_ln_1_0", self.layer_norm(hidden_states, f"{path}.ln_1"), "hidden_states_0")
        attn_output = say("self_attn_0", self._gpt2_attention(f"{path}.attn", hidden_states), "attn_output_0")
        hidden_states = say("binop_add_0", attn_output + residual, "hidden_states_1")
        residual = say("residual_1", hidden_states)
        hidden_states = say("self_ln_2_0", self.layer_norm(hidden_states, f"{path}.ln_2"), "hidden_states_2")
        fed = say("self_mlp_0", self._gpt2_mlp(f"{path}.mlp", hidden_states), "feed_forward_hidden_states_0")
        out: Tensor = say("binop_add_1", residual + fed, "hidden_states_3")
        return out

    def _gpt2_attention(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        qkv = say("self_c_attn_0", self.conv1d(hidden_states, f"{path}.c_attn"), "qkv_0", "_")
        q, k, v = say("qkv_chunk_0", qkv.chunk(3, -1), "q_0", "k_0", "v_0")
        attn_output = say("self_attn_0", self.attention(q, k, v, self.head_dim**-0.5), "attn_output_0")
        out: Tensor = say("self_c_proj_0", self.conv1d(attn_output, f"{path}.c_proj"), "attn_output_1", "_")
        return out

    def _gpt2_mlp(self, path: str, hidden_states: Tensor) -> Tensor:
        say = self.say(path)
        hidden_states = say("self_c_fc_0", self.conv1d(hidden_states, f"{path}.c_fc"), "hidden_states_0", "_")
        hidden_states = say("self_act_0", functional.gelu(hidden_states, approximate="tanh"), "hidden_states_1")
        out: Tensor = say("self_c_proj_0", self.conv1d(hidden_states, f"{path}.c_proj"), "hidden_states_2", "_")
        return out

"""The reference of the engine tests: a Hugging Face forward in float32, read and edited by hooks on its modules.

One sequence at a time, without a cache: a row of such a forward is what an engine computes for that position, in
however many steps and in whatever company.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

Floats = npt.NDArray[np.float32]
Change = Callable[[torch.Tensor], torch.Tensor]
"""What is done to the rows of an edit, float32 ``[n, width]`` → the same shape."""


@dataclass(frozen=True)
class Edit:
    """``change`` at these positions of the place ``at``, an alias as in a spec (``z[10]``, ``embed``)."""

    at: str
    rows: Sequence[int]
    change: Change


@dataclass(frozen=True)
class Seen:
    """``logits`` ``[rows, vocab]``; ``values``: alias → ``[rows, width]``, edits included; ``hidden_states`` as
    Hugging Face returns them, where asked for."""

    logits: Floats
    values: Mapping[str, Floats]
    hidden_states: tuple[Floats, ...] = ()

    @cached_property
    def reached(self) -> Floats:
        """The largest value that each row's stream has held up to each layer, ``[layers, rows]``."""
        layers = [v for name, v in self.values.items() if name.startswith("resid_post[")]
        out: Floats = np.maximum.accumulate([np.abs(v).max(-1) for v in layers])
        return out

    def log_softmax(self, row: int) -> npt.NDArray[np.float64]:
        x = self.logits[row].astype(np.float64)
        out: npt.NDArray[np.float64] = x - x.max() - np.log(np.exp(x - x.max()).sum())
        return out

    def greedy(self, prompt: int) -> tuple[int, ...]:
        """The most likely token after each row from the prompt's last one on.

        Where the sequence is a prompt with an engine's continuation, equality with that continuation means, by
        induction, that greedy decoding here would have produced it.
        """
        return tuple(int(t) for t in self.logits[prompt - 1 :].argmax(-1))

    def margins(self, prompt: int) -> Floats:
        """By how much the most likely token after each of those rows leads."""
        best = np.sort(self.logits[prompt - 1 :], axis=-1)[:, -2:]
        out: Floats = best[:, 1] - best[:, 0]
        return out


class Twin:
    """The Hugging Face model of a folder with hooks at every place that has an alias."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.family: str = self.model.config.model_type
        self._edits: list[Edit] = []
        self._found: dict[str, Floats] = {}
        for name, module, side, columns in _gpt2(self.model) if self.family == "gpt2" else _llama(self.model):
            self._hook(name, module, side, columns)

    def forward(self, ids: Iterable[int], edits: Iterable[Edit] = (), *, hidden_states: bool = False) -> Seen:
        self._edits, self._found = list(edits), {}
        with torch.no_grad(), self._rotary(), _one_thread():
            out = self.model(torch.tensor([list(ids)]), output_hidden_states=hidden_states, use_cache=False)
        missing = [e.at for e in self._edits if e.at not in self._found]
        assert not missing, f"the reference has no place {missing}"
        states = tuple(h[0].numpy() for h in out.hidden_states) if hidden_states else ()
        return Seen(out.logits[0].numpy(), self._found, states)

    def _hook(self, name: str, module: torch.nn.Module, side: str, columns: slice) -> None:
        def after(_: Any, __: Any, out: Any) -> None:
            self._visit(name, (out[0] if isinstance(out, tuple) else out)[0, :, columns])

        def before(_: Any, args: Any, kwargs: Any) -> None:
            self._visit(name, (args[0] if args else kwargs["hidden_states"])[0, :, columns])

        if side == "output":
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(before, with_kwargs=True)

    def _visit(self, name: str, x: torch.Tensor) -> None:
        """Edit ``x`` ``[rows, width]`` in place, so that every later user of the tensor sees it, and copy it."""
        for edit in self._edits:
            if edit.at == name:
                rows = torch.tensor(list(edit.rows), dtype=torch.long)
                x[rows] = edit.change(x[rows])
        self._found[name] = x.numpy().copy()

    @contextmanager
    def _rotary(self) -> Iterator[None]:
        """Visits the queries and keys that the rotary embedding gives to each layer's attention."""
        module = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        original = getattr(module, "apply_rotary_pos_emb", None)
        if original is None:
            yield
            return
        layer = 0

        def apply(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            nonlocal layer
            out = []
            for name, value in zip(("rot_q", "rot_k"), original(*args, **kwargs), strict=True):
                flat = value[0].transpose(0, 1).flatten(1)  # [heads, rows, head_dim] → [rows, heads × head_dim]
                self._visit(f"{name}[{layer}]", flat)
                out.append(flat.unflatten(1, (value.shape[1], -1)).transpose(0, 1)[None])
            layer += 1
            return tuple(out)

        module.apply_rotary_pos_emb = apply  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = original  # type: ignore[attr-defined]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices of a few rows: beside an engine's threads a second one waits longer than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Place = tuple[str, torch.nn.Module, str, slice]
ALL = slice(None)


def _llama(model: Any) -> Iterator[Place]:
    """Llama, Qwen and Gemma: where a Hugging Face layer holds what an alias names."""
    trunk = model.model
    gemma = model.config.model_type.startswith("gemma")
    yield "embed", trunk.embed_tokens, "output", ALL
    yield "final_norm", trunk.norm, "output", ALL
    for i, layer in enumerate(trunk.layers):
        attention, mlp = layer.self_attn, layer.mlp
        second = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
        yield f"resid_pre[{i}]", layer, "input", ALL
        yield f"resid_mid[{i}]", second, "input", ALL
        yield f"resid_post[{i}]", layer, "output", ALL
        yield f"ln1[{i}]", layer.input_layernorm, "output", ALL
        yield f"ln2[{i}]", second, "output", ALL
        yield f"attn_out[{i}]", layer.post_attention_layernorm if gemma else attention, "output", ALL
        yield f"mlp_out[{i}]", layer.post_feedforward_layernorm if gemma else mlp, "output", ALL
        for part in "qkv":
            yield f"{part}[{i}]", getattr(attention, f"{part}_proj"), "output", ALL
        yield f"z[{i}]", attention.o_proj, "input", ALL
        yield f"mlp_post[{i}]", mlp.down_proj, "input", ALL


def _gpt2(model: Any) -> Iterator[Place]:
    trunk, width = model.transformer, model.config.n_embd
    yield "embed", trunk.wte, "output", ALL
    yield "final_norm", trunk.ln_f, "output", ALL
    for i, layer in enumerate(trunk.h):
        yield f"resid_pre[{i}]", layer, "input", ALL
        yield f"resid_mid[{i}]", layer.ln_2, "input", ALL
        yield f"resid_post[{i}]", layer, "output", ALL
        yield f"ln1[{i}]", layer.ln_1, "output", ALL
        yield f"ln2[{i}]", layer.ln_2, "output", ALL
        yield f"attn_out[{i}]", layer.attn, "output", ALL
        yield f"mlp_out[{i}]", layer.mlp, "output", ALL
        for number, part in enumerate("qkv"):
            columns = slice(number * width, (number + 1) * width)
            yield f"{part}[{i}]", layer.attn.c_attn, "output", columns
        yield f"z[{i}]", layer.attn.c_proj, "input", ALL
        yield f"mlp_post[{i}]", layer.mlp.c_proj, "input", ALL

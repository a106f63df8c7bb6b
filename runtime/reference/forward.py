"""A Hugging Face forward in float32 on the CPU, read and edited by hooks at the places of :mod:`.places`.

One sequence at a time, without a cache: a row of such a forward is what an engine computes for that position, in
however many steps and in whatever company.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.reference.places import FAMILIES, Place, place_of

Floats = npt.NDArray[np.float32]
Change = Callable[[Floats], npt.NDArray[Any]]


class NoReference(Exception):
    """There is no such reference; the message says why."""


@dataclass(frozen=True)
class Edit:
    """``change`` at these rows; ``replaces``: nothing is left of what they held."""

    name: str
    rows: Sequence[int]
    change: Change
    replaces: bool = False


@dataclass
class Seen:
    """Of one forward, by site: ``before`` and ``after`` its edits ``[rows, width]``; ``growth`` ``[rows]``: how many
    times as large as now the stream of a row has been.  Where a stream of 25,000 cancels down to 300, what is
    left carries the rounding of 25,000.  ``moved``: (edit, site) → the largest change that the edit made.
    ``attention``: layer → the probabilities ``[heads, rows, keys]``, of the layers that were asked for."""

    logits: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    before: dict[str, Floats] = field(default_factory=dict)
    after: dict[str, Floats] = field(default_factory=dict)
    growth: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    moved: dict[tuple[str, str], float] = field(default_factory=dict)
    attention: dict[int, Floats] = field(default_factory=dict)
    last: npt.NDArray[np.float64] = field(default_factory=lambda: np.ones(0))


class HuggingFace:
    """The model of a folder (or hub id) with a hook at every site of ``sites`` that has a place, and at the stream.

    Raises NoReference for an architecture without a table, or weights that transformers does not load.
    """

    def __init__(self, folder: str, architecture: str, sites: Iterable[str], revision: str | None = None) -> None:
        if architecture not in FAMILIES:
            raise NoReference(f"no table says where Hugging Face holds the aliases of {architecture}")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", revision=revision or "main"
            ).eval()
        except Exception as error:
            raise NoReference(f"transformers does not load it: {error}".splitlines()[0]) from error
        if type(self.model).__name__ != architecture:
            raise NoReference(f"transformers makes a {type(self.model).__name__} of it, not a {architecture}")
        self._family = FAMILIES[architecture]
        self._edits: Mapping[str, Sequence[Edit]] = {}
        self._seen = Seen()
        self._rotated: dict[tuple[int, str], str] = {}
        self.attention: frozenset[int] = frozenset()
        """The layers whose attention probabilities a forward keeps."""
        count = len(self.model.get_submodule(self._family.layers))
        streams = [f"{alias}[{i}]" for i in range(count) for alias in ("resid_mid", "resid_post")]
        self.wanted = frozenset(sites)
        # An embedding is a stream before the first layer; it is visited before the others.
        for name in dict.fromkeys(["embed", *streams, *self.wanted]):
            found = place_of(architecture, name)
            if found is not None:
                self._hook(name, *found)

    def forward(self, ids: Sequence[int], edits: Mapping[str, Sequence[Edit]] | None = None) -> Seen:
        """One forward over ``ids`` with ``edits`` by site, each site's in their order.  Raises NoReference for a site
        that is not visited."""
        self._edits, self._seen = edits or {}, Seen()
        self._reached = self._now = np.zeros(len(ids))
        with torch.no_grad(), self._rotary():
            out = self.model(torch.tensor([list(ids)]), use_cache=False, output_attentions=bool(self.attention))
        missing = (set(self._edits) | self.wanted) - set(self._seen.after)
        if missing:
            raise NoReference(f"the Hugging Face model has no {', '.join(sorted(missing))}")
        self._seen.attention = {layer: out.attentions[layer][0].float().numpy() for layer in self.attention}
        self._seen.logits = out.logits[0].float().numpy()
        self._seen.last = self._grown()
        return self._seen

    def lens(self, rows: Floats) -> Floats:
        """Logits ``[n, vocab]`` of rows of the stream ``[n, width]``, through the final norm and the unembedding."""
        norm, head = (self.model.get_submodule(path) for path in (self._family.norm, self._family.head))
        with torch.no_grad():
            # Called around their hooks: the lens is not to be seen.
            logits = head.forward(norm.forward(torch.from_numpy(rows)))
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
        found: Floats = logits.numpy()
        return found

    # -- hooks

    def _hook(self, name: str, place: Place, layer: int | None) -> None:
        module = self.model.get_submodule(place.module.format(i=layer))
        if place.side == "rotated":
            assert layer is not None
            self._rotated[layer, str(place.part)] = name
            return
        factor = float(module.scalar_embed_scale) if place.unscaled else 1.0

        def after(_: Any, __: Any, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            # A router works on rows: it has no axis of sequences.
            x = x if x.dim() == 2 else x[0]
            self._visit(name, x[:, self._columns(place, x.shape[1])], factor)

        def before(_: Any, args: Any, kwargs: Any) -> None:
            self._visit(name, (args[0] if args else kwargs["hidden_states"])[0])

        if place.side == "output":
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(before, with_kwargs=True)

    def _columns(self, place: Place, width: int) -> slice:
        if place.part is None:
            return slice(0, width)
        config = self.model.config
        heads = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        size = width // (heads + 2 * kv)
        starts = {"q": 0, "k": heads * size, "v": (heads + kv) * size}
        return slice(starts[place.part], starts[place.part] + (heads if place.part == "q" else kv) * size)

    def _visit(self, name: str, x: Tensor, factor: float = 1.0) -> None:
        """Edit ``x`` ``[rows, width]`` in place, so that every later user of the tensor sees it, and copy it.

        ``factor``: what the module has multiplied the value by that the alias names.
        """
        stream = name.startswith(("resid_", "embed"))
        wanted = name in self.wanted or name in self._edits
        if stream:
            self._level(_largest(x))
        if wanted:
            self._seen.before[name] = (x / factor).numpy().copy()
        for edit in self._edits.get(name, ()):
            rows = torch.tensor(list(edit.rows), dtype=torch.long)
            held = x[rows].numpy() / np.float32(factor)
            changed = edit.change(held)
            moved = float(np.abs(changed - held).max(initial=0.0))
            self._seen.moved[edit.name, name] = max(moved, self._seen.moved.get((edit.name, name), 0.0))
            x[rows] = torch.from_numpy((changed * factor).astype(np.float32))
            if stream:
                self._level(_largest(x), edit.rows if edit.replaces else ())
        if wanted:
            self._seen.after[name] = (x / factor).numpy().copy()
            self._seen.growth[name] = self._grown()

    def _level(self, now: npt.NDArray[np.float64], fresh: Sequence[int] = ()) -> None:
        self._now, self._reached = now, np.maximum(self._reached, now)
        self._reached[list(fresh)] = now[list(fresh)]

    def _grown(self) -> npt.NDArray[np.float64]:
        return np.divide(self._reached, self._now, out=np.ones_like(self._now), where=self._now > 0)

    @contextmanager
    def _rotary(self) -> Iterator[None]:
        """Visits the queries and keys that the rotary embedding gives to each layer's attention."""
        module = sys.modules[type(self.model).__module__]
        original = getattr(module, "apply_rotary_pos_emb", None)
        if original is None or not self._rotated:
            yield
            return
        layer = 0

        def apply(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            nonlocal layer
            out = []
            for part, value in zip("qk", original(*args, **kwargs), strict=True):
                name = self._rotated.get((layer, part))
                if name is not None:
                    flat = value[0].transpose(0, 1).flatten(1)  # [heads, rows, head_dim] → [rows, heads · head_dim]
                    self._visit(name, flat)
                    value = flat.unflatten(1, (value.shape[1], -1)).transpose(0, 1)[None]
                out.append(value)
            layer += 1
            return tuple(out)

        module.apply_rotary_pos_emb = apply  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = original  # type: ignore[attr-defined]


def _largest(x: Tensor) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = x.abs().amax(-1).double().numpy()
    return found

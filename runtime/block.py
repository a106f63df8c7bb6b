"""The vocabulary of a generated block: where it acts (:class:`Block`) and what it does there (the verbs).

A block holds one short function a location.  Its first argument is the location's :class:`Tap`, which the row table
fills once a step; the others are the values found there, ``[rows, width]`` in the model's dtype.  Edits write the
selected rows in place and nothing else; reads copy.  A row that is not selected is never an operand: an idle arm's
vector may be NaN, and ``-0.0`` stays ``-0.0``.

A residual stream that a model carries as a pair is ``hidden + residual``, summed in float32.  ``add`` goes to
``hidden``; verbs that replace the stream write it to ``hidden`` and zero the residual of those rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Columns = tuple[tuple[int, int], ...]
"""Half-open ranges of a location's own columns."""

SCALED_VECTORS = 8
"""How many products of vector and coefficient a tap keeps for each edit."""


@dataclass(slots=True)
class EditStep:
    """The rows of one step on which one edit acts.

    ``rows``: a slice, or int64 ``[n]``; ``coefficient``: a number, or float32 ``[n, 1]``; ``vector``: an index into
    the tap's vectors, or int64 ``[n]``.  ``fired`` counts the taps that acted.
    """

    rows: slice | Tensor
    coefficient: float | Tensor = 1.0
    vector: int | Tensor = 0
    fired: int = 0


@dataclass(slots=True)
class ReadStep:
    """The rows of one step that one read takes; ``segments`` are the half-open ranges of them that ``mean`` sums.

    What the taps read stands in ``groups``: (shape, dtype) → names of taps and their rows, ``[n, sites, …]``, so that
    what one request read everywhere is one piece of memory.
    """

    rows: slice | Tensor
    segments: tuple[tuple[int, int], ...] = ()
    sites: int = 1
    groups: dict[tuple[Any, ...], tuple[list[str], Tensor]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def place(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for what the tap ``name`` reads, ``shape`` = ``[n, …]``, on the device of ``like``.

        Raises RuntimeError for a tap that has read already.
        """
        if name in self.seen:
            raise RuntimeError(f"it was read twice at {name} in one step")
        self.seen.add(name)
        kind = dtype or like.dtype
        group = self.groups.get((shape, kind))
        if group is None:
            memory = torch.empty((shape[0], self.sites, *shape[1:]), dtype=kind, device=like.device)
            group = self.groups[shape, kind] = ([], memory)
        names, memory = group
        names.append(name)
        return memory[:, len(names) - 1]


class Tap:
    """The row table of one location.

    ``live`` is False where the step has nothing to do here.  ``vectors``: edit → float32 ``[distinct, width]``;
    ``probes``: read → float32 ``[vectors, width]``.
    """

    __slots__ = ("called", "edits", "live", "name", "probes", "reads", "scaled", "vectors")

    def __init__(self, name: str) -> None:
        self.name = name
        self.live = False
        self.called = False
        self.edits: dict[str, EditStep] = {}
        self.reads: dict[str, ReadStep] = {}
        self.vectors: dict[str, Tensor] = {}
        self.probes: dict[str, Tensor] = {}
        self.scaled: dict[str, dict[tuple[int, float], Tensor]] = {}

    def clear(self) -> None:
        self.live = self.called = False
        self.edits, self.reads = {}, {}

    def product(self, name: str, step: EditStep) -> Tensor:
        """Coefficient times vector in float32: ``[width]``, or ``[n, width]`` where rows differ.

        The product comes before the sum in both forms, so that a row's result does not depend on its neighbours.
        """
        vectors = self.vectors[name]
        if isinstance(step.vector, int) and isinstance(step.coefficient, float):
            kept = self.scaled.setdefault(name, {})
            key = (step.vector, step.coefficient)
            if key not in kept:
                if len(kept) >= SCALED_VECTORS:
                    kept.clear()
                kept[key] = vectors[step.vector] * step.coefficient
            return kept[key]
        chosen = vectors[step.vector] if isinstance(step.vector, int) else vectors.index_select(0, step.vector)
        return chosen * step.coefficient


@dataclass(frozen=True)
class Location:
    """Where a block function acts; see :meth:`Block.location`."""

    name: str
    module: str
    function: Callable[..., None]
    output: int | None
    input: str | None
    residual: int | str | None
    columns: tuple[int, int] | None


@dataclass(frozen=True)
class Block:
    """What a block file says of itself, and its locations in the order of the model."""

    spec: str
    tree: str
    structure: str
    vllm: str
    architecture: str
    locations: dict[str, Location] = field(default_factory=dict)

    def location(
        self,
        name: str,
        *,
        module: str,
        output: int | None = None,
        input: str | None = None,
        residual: int | str | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register the decorated function at ``module``: an element of its output tuple (``output``; None for an
        output that is one tensor) or an input by parameter name (``input``).

        ``residual`` is where the pair's other half is, on the same side; ``columns`` a half-open range of the last
        axis.  Raises ValueError for a name given twice or a side given twice.
        """
        if name in self.locations:
            raise ValueError(f"the block has two functions for {name}")
        if input is not None and output is not None:
            raise ValueError(f"{name}: a location is an input or an output")

        def register(function: Callable[..., None]) -> Callable[..., None]:
            self.locations[name] = Location(name, module, function, output, input, residual, columns)
            return function

        return register


def add(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, columns: Columns | None = None) -> None:
    """hidden += coefficient · vector, in float32, rounded once."""
    step = t.edits.get(name)
    if step is None:
        return
    product = t.product(name, step)
    for part, cut in _parts(hidden, columns):
        value = product[..., cut]
        if isinstance(step.rows, slice):
            # In-place addition of a float32 operand computes in float32 and rounds at the store.
            part[step.rows].add_(value)
        else:
            part.index_copy_(0, step.rows, (part.index_select(0, step.rows) + value).to(part.dtype))
    step.fired += 1


def scale(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, columns: Columns | None = None) -> None:
    """stream *= coefficient."""
    step = t.edits.get(name)
    if step is None:
        return
    other = _other(hidden, residual)
    for part, cut in _parts(hidden, columns):
        rest = None if other is None else other[..., cut]
        _write(part, rest, step.rows, _sum(part, rest, step.rows) * step.coefficient)
    step.fired += 1


def zero(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, columns: Columns | None = None) -> None:
    """stream = 0."""
    step = t.edits.get(name)
    if step is None:
        return
    other = _other(hidden, residual)
    for part, cut in _parts(hidden, columns):
        _fill_zero(part, step.rows)
        if other is not None:
            _fill_zero(other[..., cut], step.rows)
    step.fired += 1


def set_(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, columns: Columns | None = None) -> None:
    """stream = coefficient · vector."""
    step = t.edits.get(name)
    if step is None:
        return
    other = _other(hidden, residual)
    product = t.product(name, step)
    for part, cut in _parts(hidden, columns):
        _write(part, None if other is None else other[..., cut], step.rows, product[..., cut])
    step.fired += 1


def keep(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """The rows themselves, ``[n, width]`` in the model's dtype (a pair's sum rounded once)."""
    step = t.reads.get(name)
    if step is None:
        return
    picked, other = _pick(hidden, step.rows), _other(hidden, residual)
    place = step.place(t.name, tuple(picked.shape), hidden)
    if other is None:
        place.copy_(picked)
    else:
        # Addition of two half-precision tensors computes in float32 and rounds once.
        torch.add(picked, _pick(other, step.rows), out=place)


def lens(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """The rows for the logit lens: final norm and unembedding follow after the step, all locations in one batch."""
    keep(t, name, hidden, residual)


def norm(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """L2 norm of each row, float32 ``[n]``."""
    step = t.reads.get(name)
    if step is None:
        return
    rows = _sum(hidden, _other(hidden, residual), step.rows)
    place = step.place(t.name, (rows.shape[0],), hidden, torch.float32)
    torch.linalg.vector_norm(rows, dim=-1, out=place)


def project(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """Dot product of each row with each of the read's vectors, float32 ``[n, vectors]``."""
    step = t.reads.get(name)
    if step is None:
        return
    rows, vectors = _sum(hidden, _other(hidden, residual), step.rows), t.probes[name]
    place = step.place(t.name, (rows.shape[0], vectors.shape[0]), hidden, torch.float32)
    for number, vector in enumerate(vectors):
        # A matrix product would let a row's rounding depend on how many rows there are.
        torch.sum(rows * vector, dim=-1, out=place[:, number])


def mean(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """Sum over each segment of the rows, float32 ``[segments, width]``; the harvest divides by the count."""
    step = t.reads.get(name)
    if step is None:
        return
    rows = _sum(hidden, _other(hidden, residual), step.rows)
    place = step.place(t.name, (len(step.segments), rows.shape[-1]), hidden, torch.float32)
    if len(step.segments) == rows.shape[0]:
        place.copy_(rows)
        return
    for number, (start, stop) in enumerate(step.segments):
        torch.sum(rows[start:stop], dim=0, out=place[number])


def _other(hidden: Tensor, residual: Tensor | None) -> Tensor | None:
    """The second half of a pair: None where there is none yet, and where it *is* the first (at a model's first
    layer one tensor plays both parts)."""
    if residual is None or residual is hidden or residual.data_ptr() == hidden.data_ptr():
        return None
    return residual


def _parts(hidden: Tensor, columns: Columns | None) -> list[tuple[Tensor, slice]]:
    if columns is None:
        return [(hidden, slice(None))]
    cuts = [slice(a, b) for a, b in columns]
    return [(hidden[..., cut], cut) for cut in cuts]


def _pick(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _sum(hidden: Tensor, other: Tensor | None, rows: slice | Tensor) -> Tensor:
    """float32 ``[n, width]``; may alias ``hidden`` where that is float32 already, so it is only an operand."""
    picked: Tensor = _pick(hidden, rows).float()
    return picked if other is None else picked + _pick(other, rows).float()


def _write(hidden: Tensor, other: Tensor | None, rows: slice | Tensor, value: Tensor) -> None:
    """stream[rows] = value (float32 ``[n, width]`` or ``[width]``), rounded at the store."""
    if isinstance(rows, slice):
        hidden[rows].copy_(value)
    else:
        shape = (rows.shape[0], hidden.shape[-1])
        hidden.index_copy_(0, rows, value.to(hidden.dtype).expand(shape))
    if other is not None:
        _fill_zero(other, rows)


def _fill_zero(x: Tensor, rows: slice | Tensor) -> None:
    if isinstance(rows, slice):
        x[rows].zero_()
    else:
        x.index_fill_(0, rows, 0.0)

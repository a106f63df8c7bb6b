"""The slots that reads are written into, and which rows are in which of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vtaps.runtime.fills import Fill, Part
from vtaps.runtime.live import Live
from vtaps.runtime.slabs import places
from vtaps.runtime.spool import Spool
from vtaps.runtime.store import Rows

Array = npt.NDArray[Any]


@dataclass
class Ring:
    """The slots of one read on one axis, ``key`` in all.

    ``groups``: sites whose rows are equally wide, and their memory ``[slots, sites, width]``; ``head`` is the next free
    slot.
    """

    key: str
    read: str
    kind: str
    slots: int
    groups: list[tuple[tuple[str, ...], Tensor]]
    head: int = 0

    @property
    def sampled(self) -> bool:
        """Whether its rows are of sampled tokens: logits, or the tokens."""
        return self.key.endswith("/requests")

    @cached_property
    def sites(self) -> int:
        return sum(len(sites) for sites, _ in self.groups)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(memory[0].numel() * memory.element_size() for _, memory in self.groups)

    def place(self, site: str) -> tuple[Tensor, int]:
        """The memory of a site, and its number there."""
        for sites, memory in self.groups:
            if site in sites:
                return memory, sites.index(site)
        raise KeyError(site)

    def add(self, sites: tuple[str, ...], memory: Tensor) -> None:
        """Slots of more sites, ``[slots, sites, …]``."""
        self.groups.append((sites, memory))
        for counted in ("sites", "row_bytes"):
            self.__dict__.pop(counted, None)

    def take(self, count: int) -> int:
        """The first of ``count`` neighbouring slots, which are at most :attr:`slots`."""
        start = 0 if self.head + count > self.slots else self.head
        self.head = start + count
        return start


@dataclass
class Taken:
    """Slots ``start …`` of a ring: the rows of a fill, in ``repeats`` steps one after the other; the first of them
    has the number ``step`` and is ``shift`` steps after the plan's own."""

    fill: Fill
    ring: Ring
    start: int
    shift: int
    step: int
    repeats: int = 1

    @cached_property
    def count(self) -> int:
        return len(self.fill.rows)

    @property
    def stop(self) -> int:
        return self.start + self.repeats * self.count

    def split(self, step: int) -> tuple[Taken, Taken]:
        """What was taken in the steps up to ``step``, and what after it."""
        before = min(max(0, step - self.step + 1), self.repeats)
        first = replace(self, repeats=before)
        return first, replace(
            self, start=first.stop, shift=self.shift + before, step=self.step + before, repeats=self.repeats - before
        )


def neighbours(pieces: Sequence[Taken]) -> list[list[Taken]]:
    """Runs of pieces whose slots follow one another."""
    runs: list[list[Taken]] = []
    for piece in pieces:
        if runs and runs[-1][-1].stop == piece.start:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def sorter(
    ring: Ring,
    sites: tuple[str, ...],
    names: Sequence[str],
    run: Sequence[Taken],
    first: int,
    dtype: str,
    spool: Spool,
    lost: deque[tuple[Sequence[Live], Exception]],
) -> Callable[[Sequence[Array]], None]:
    """What sorts the fields of the slots ``first …``, each ``[slots, sites, …]``, by request; a request whose rows
    cannot be kept goes to ``lost``."""

    def deliver(arrays: Sequence[Array]) -> None:
        last = first + len(arrays[0])
        size = sum(array[:1].nbytes for array in arrays)
        for taken in run:
            a, b = max(first, taken.start), min(last, taken.stop)
            if a >= b:
                continue
            target = places(taken.fill, sites, dtype, size, spool)
            later, rows = np.divmod(np.arange(a - taken.start, b - taken.start), taken.count)
            fields = {name: array[a - first : b - first] for name, array in zip(names, arrays, strict=True)}
            if target.slabs:
                target.put(rows, later + taken.shift, fields)
            if target.which.min() < 0:
                for part in taken.fill.parts:
                    kept = part.live.kept[taken.fill.name, sites]
                    if not isinstance(kept, Rows) or part.live.fault is not None:
                        continue
                    try:
                        _deliver_own(kept, taken, part, a, b, fields)
                    except Exception as error:
                        lost.append(((part.live,), error))

    return deliver


def _deliver_own(kept: Rows, taken: Taken, part: Part, a: int, b: int, fields: Mapping[str, Array]) -> None:
    """The rows of slots ``a … b−1`` to one of the requests that have arrays of their own."""
    if taken.repeats == 1:
        lo, hi = max(a, taken.start + part.start), min(b, taken.start + part.stop)
        if lo < hi:
            from_, to = lo - taken.start - part.start, hi - taken.start - part.start
            kept.add(part.positions[from_:to] + taken.shift, {n: x[lo - a : hi - a] for n, x in fields.items()})
        return
    # One row a step: every ``count``-th slot from the part's own on.
    lead = taken.start + part.start
    skip = -(-max(0, a - lead) // taken.count)
    slots = np.arange(lead + skip * taken.count, b, taken.count)
    if len(slots):
        positions = part.positions[0] + taken.shift + skip + np.arange(len(slots), dtype=np.int64)
        chosen = slice(int(slots[0]) - a, b - a, taken.count)
        kept.add(positions, {n: x[chosen] for n, x in fields.items()})

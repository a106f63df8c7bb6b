"""The slots that reads are written into, and which rows are in which of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vtaps.runtime.rowtable import Fill
from vtaps.runtime.store import rows_of

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
    def bytes(self) -> int:
        return sum(memory.numel() * memory.element_size() for _, memory in self.groups)

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

    @property
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
    ring: Ring, sites: tuple[str, ...], names: Sequence[str], run: Sequence[Taken], first: int, dtype: str
) -> Callable[[Sequence[Array]], None]:
    """What sorts the fields of the slots ``first …``, each ``[slots, sites, …]``, by request."""

    def deliver(arrays: Sequence[Array]) -> None:
        last = first + len(arrays[0])
        for taken in run:
            a, b = max(first, taken.start), min(last, taken.stop)
            if a >= b:
                continue
            for part in taken.fill.parts:
                kept = rows_of(part.live, ring.read, sites, dtype)
                if taken.repeats == 1:
                    lo, hi = max(a, taken.start + part.start), min(b, taken.start + part.stop)
                    if lo < hi:
                        from_, to = lo - taken.start - part.start, hi - taken.start - part.start
                        positions = part.positions[from_:to] + taken.shift
                        kept.add(positions, {n: x[lo - first : hi - first] for n, x in zip(names, arrays, strict=True)})
                    continue
                # One row a step: every ``count``-th slot from the part's own on.
                lead = taken.start + part.start
                skip = -(-max(0, a - lead) // taken.count)
                slots = np.arange(lead + skip * taken.count, b, taken.count)
                if len(slots):
                    positions = part.positions[0] + taken.shift + skip + np.arange(len(slots), dtype=np.int64)
                    chosen = slice(int(slots[0]) - first, b - first, taken.count)
                    kept.add(positions, {n: x[chosen] for n, x in zip(names, arrays, strict=True)})

    return deliver

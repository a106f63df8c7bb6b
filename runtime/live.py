"""A step as vLLM schedules it, and the requests that are alive: numpy alone, no vLLM and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.faults import Fault
from vtaps.runtime.patch_rows import Patch
from vtaps.runtime.program import Compiled, PointEdit
from vtaps.spec.rows import OPEN, Interval, merge, subtract

Ints = npt.NDArray[np.int64]
RequestKey = tuple[str, int]
"""A request's own key and the index of the child among its ``n``."""


class TableError(Exception):
    """The step cannot be served as asked: nothing may go out unedited or unread.  ``lives``: the requests that it
    concerns, where they are known."""

    def __init__(self, message: str, lives: Sequence[Live] = ()) -> None:
        super().__init__(message)
        self.lives = tuple(lives)


@dataclass(frozen=True)
class Scheduled:
    """One request's share of a step: rows ``offset … offset+len(tokens)−1`` of the batch hold the positions from
    ``start`` on.  ``sampled``: the token sampled from its last row is kept (False for a chunk that is not the last)."""

    request_id: str
    start: int
    tokens: Ints
    offset: int
    sampled: bool = True


@dataclass(frozen=True)
class Batch:
    """A step's rows: of request ``i`` rows ``offsets[i] … offsets[i]+counts[i]−1``, which hold the positions from
    ``starts[i]`` on.  ``sampled`` ``[requests]`` bool as in :class:`Scheduled`; ``tokens(i)`` are the ids that its rows
    hold, int64 ``[counts[i]]``, and is asked of requests whose selectors look at them."""

    ids: list[str]
    starts: Ints
    counts: Ints
    offsets: Ints
    sampled: npt.NDArray[np.bool_]
    tokens: Callable[[int], Ints]

    @classmethod
    def of(cls, shares: Sequence[Scheduled]) -> Batch:
        return cls(
            [s.request_id for s in shares],
            np.array([s.start for s in shares], np.int64),
            np.array([len(s.tokens) for s in shares], np.int64),
            np.array([s.offset for s in shares], np.int64),
            np.array([s.sampled for s in shares], bool),
            lambda number: shares[number].tokens,
        )


@dataclass(frozen=True)
class Chosen:
    """What acts on one row: (edit, number of its use), reads, metrics."""

    edits: tuple[tuple[str, int], ...] = ()
    reads: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


NOTHING = Chosen()


def choose(
    compiled: Compiled, position: int, uses_of: Mapping[str, Mapping[PointEdit, int]]
) -> tuple[Interval, Chosen]:
    """What selects ``position``, and the range from it on in which that holds, for selectors that look at positions
    alone."""
    holds = [s.holds(position) for s in compiled.selections]
    until = min((s.until(position) for s in compiled.selections), default=OPEN)
    chosen = Chosen(
        tuple((e.edit, uses_of[e.edit][e]) for e, which in compiled.edits if holds[which]),
        tuple(r for r, which in compiled.reads if holds[which]),
        tuple(m for m, which in compiled.metrics if holds[which]),
    )
    return (position, until), chosen


@dataclass
class Places:
    """Positions in order, in pieces: arrays, and half-open ranges of steps of decoding."""

    pieces: list[Ints | Interval] = field(default_factory=list)
    count: int = 0

    def add(self, start: int, stop: int) -> None:
        """``start … stop−1``."""
        self.count += stop - start
        if self.pieces and isinstance(last := self.pieces[-1], tuple) and last[1] == start:
            self.pieces[-1] = (last[0], stop)
        else:
            self.pieces.append((start, stop))

    def extend(self, positions: Ints) -> None:
        self.pieces.append(positions)
        self.count += len(positions)

    def below(self, stop: int) -> Ints:
        """A new array of the positions below ``stop``."""
        if len(self.pieces) == 1 and isinstance(only := self.pieces[0], tuple):
            return np.arange(only[0], min(only[1], stop))
        found = np.concatenate([np.arange(*p) if isinstance(p, tuple) else p for p in self.pieces])
        below: Ints = found[: np.searchsorted(found, stop)]
        return below


@dataclass
class Span:
    """The steps of one plan: the number of the ``last``."""

    last: int = 0


@dataclass
class Live:
    """A request that the worker serves, with what was seen of it so far.

    ``end``: one past the last position that can ever have a row; ``planned``: number of the last step that was planned
    for it, and its last position there; ``span``: the steps of that plan; ``fired``: edit → half-open ranges of
    positions; ``taken``: read → the first position that it has not taken yet; ``places``: (read, at sampled rows) → the
    positions that it has taken; ``kept``: (read, sites) → what the harvest holds; ``chosen``: what selects the
    positions of the range ``calm``; ``seats``: request gate → the number, from 1, under which the device decides;
    ``patches``: edit → where its rows are in the memory of ``put``; ``run``: where the positions begin that were
    computed one after another up to the last step, and ``runs``: such ranges before it was preempted; ``fault``: why
    it failed: no step is planned for it any more, and what it has is nobody's.
    """

    request_id: str
    key: RequestKey
    prompt: int
    compiled: Compiled
    end: int = OPEN
    planned: tuple[int, int] = (0, -1)
    span: Span = field(default_factory=Span)
    fired: dict[str, list[Interval]] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    places: dict[tuple[str, bool], Places] = field(default_factory=dict)
    kept: dict[tuple[str, tuple[str, ...]], Any] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    overridden: set[int] = field(default_factory=set)
    calm: Interval = (0, 0)
    chosen: Chosen = NOTHING
    seats: dict[str, int] = field(default_factory=dict)
    patches: Mapping[str, Patch] = field(default_factory=dict)
    run: int = 0
    runs: list[Interval] = field(default_factory=list)
    fault: Fault | None = None

    def starts(self, position: int, number: int) -> list[Interval]:
        """Whether step ``number``, which computes it from ``position`` on, goes on where the last one stopped; the rows
        that are nowhere computed where it does not."""
        planned, last = self.planned
        if planned:
            # Past what was planned, the plan was used again: one position a step.
            stopped = last + 1 + min(self.span.last, number - 1) - planned
            if position == stopped:
                return []
            self.runs.append((self.run, stopped))
        self.run = position
        return self.cached()

    def cached(self) -> list[Interval]:
        """The positions before its last steps that were never computed: vLLM's prefix cache had them."""
        return subtract([(0, self.run)], self.runs)

    def positions(self, read: str, sampled: bool, stop: int) -> Ints:
        """What it has taken for ``read`` below the position ``stop``, in order."""
        places = self.places.get((read, sampled))
        return places.below(stop) if places is not None else np.empty(0, np.int64)

    def step_of(self, position: int) -> int:
        """The number of the last step that may have computed ``position``."""
        number, last = self.planned
        # Past what was planned, the plan was used again: one position a step.
        return number + max(0, position - last)

    def ranges_fired(self, stop: int) -> dict[str, tuple[Interval, ...]]:
        """Edit → half-open ranges of the positions below ``stop`` at which it acted."""
        return {
            name: tuple((a, min(b, stop)) for a, b in merge(found) if a < stop) for name, found in self.fired.items()
        }

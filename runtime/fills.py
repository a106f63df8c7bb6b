"""Which rows of one step each edit, read, metric and override acts on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vtaps.runtime.live import Ints, Live, TableError
from vtaps.spec.behind import SAMPLES
from vtaps.spec.rows import Interval, to_ranges


@dataclass(frozen=True)
class Part:
    """Rows ``start … stop−1`` of a fill belong to one request, at these positions."""

    live: Live
    positions: Ints
    start: int
    stop: int


@dataclass(frozen=True)
class Fill:
    """The rows of one step for one edit or read at ``sites``, in batch order, and their ``positions``.

    Rows ``bounds[i] … bounds[i+1]−1`` are of ``lives[i]``, which had taken ``before[i]`` rows for the read before;
    ``points[i]`` numbers the use of the edit at row ``i`` (see :attr:`Program.uses_of`, counted from 1), and of ``put``
    ``slots[i]`` is the 1-based slot that the row comes from.  ``sampled``:
    the sites have a row a request.  ``placed``: what the harvest knows of where its rows go, by sites.
    """

    name: str
    sites: tuple[str, ...]
    sampled: bool
    rows: Ints
    positions: Ints
    lives: tuple[Live, ...]
    bounds: Ints
    before: Ints
    points: npt.NDArray[np.int32] | None = None
    slots: npt.NDArray[np.int32] | None = None
    placed: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def single(self) -> bool:
        """Whether each request has one row."""
        return len(self.rows) == len(self.lives)

    def sound(self) -> Fill | None:
        """Without the requests that have failed; None where nothing is left."""
        left = np.array([live.fault is None for live in self.lives])
        if not left.any():
            return None
        counts = np.diff(self.bounds)
        rows = np.repeat(left, counts)
        return replace(
            self,
            rows=self.rows[rows],
            positions=self.positions[rows],
            lives=tuple(live for live in self.lives if live.fault is None),
            bounds=np.concatenate([[0], np.cumsum(counts[left])]),
            before=self.before[left],
            points=None if self.points is None else self.points[rows],
            slots=None if self.slots is None else self.slots[rows],
            placed={},
        )

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        edges = self.bounds.tolist()
        return tuple(
            Part(live, self.positions[a:b], a, b) for live, (a, b) in zip(self.lives, pairwise(edges), strict=True)
        )


@dataclass(frozen=True)
class MetricFill:
    """One metric's sampled rows: ``rows[i]`` of the step's logits belongs to ``lives[i]`` at ``positions[i]``."""

    name: str
    rows: Ints
    lives: tuple[Live, ...]
    positions: tuple[int, ...]

    def sound(self) -> MetricFill | None:
        """Without the requests that have failed; None where nothing is left."""
        left = [i for i, live in enumerate(self.lives) if live.fault is None]
        lives, positions = tuple(self.lives[i] for i in left), tuple(self.positions[i] for i in left)
        return MetricFill(self.name, self.rows[left], lives, positions) if left else None


def lives_of(fills: Iterable[Fill | MetricFill]) -> list[Live]:
    """The requests that have a row in any of ``fills``, each once."""
    return list({id(live): live for fill in fills for live in fill.lives}.values())


F = TypeVar("F", Fill, MetricFill)


def _sound(fills: Sequence[F]) -> tuple[F, ...]:
    return tuple(left for fill in fills if (left := fill.sound()) is not None)


@dataclass(frozen=True)
class Replacement:
    """The token sampled for request number ``row`` of the batch becomes ``token``."""

    row: int
    token: int
    step: int
    live: Live


@dataclass(frozen=True)
class StepPlan:
    """``edits`` and ``reads`` act on tensors with a row a token, the ``sampled`` ones on those with a row a request;
    ``speakers``: (number in the batch, request with overrides, generated step).  All positions hold for the step that
    was planned; ``shift`` steps later they are that much greater."""

    total: int
    edits: tuple[Fill, ...]
    reads: tuple[Fill, ...]
    sampled_edits: tuple[Fill, ...]
    sampled_reads: tuple[Fill, ...]
    metrics: tuple[MetricFill, ...]
    speakers: tuple[tuple[int, Live, int], ...]

    @cached_property
    def samples(self) -> tuple[Fill, ...]:
        """Its reads of what is sampled."""
        return tuple(fill for fill in self.sampled_reads if SAMPLES in fill.sites)

    @property
    def lives(self) -> list[Live]:
        """The requests that it acts on."""
        own = lives_of((*self.edits, *self.reads, *self.sampled_edits, *self.sampled_reads, *self.metrics))
        return list({id(live): live for live in (*own, *(live for _, live, _ in self.speakers))}.values())

    def sound(self) -> StepPlan | None:
        """Without the requests that have failed; None where nothing is left."""
        left = replace(
            self,
            edits=_sound(self.edits),
            reads=_sound(self.reads),
            sampled_edits=_sound(self.sampled_edits),
            sampled_reads=_sound(self.sampled_reads),
            metrics=_sound(self.metrics),
            speakers=tuple(s for s in self.speakers if s[1].fault is None),
        )
        return left if left.lives else None

    def replacements(self, shift: int = 0) -> list[Replacement]:
        out = []
        for number, live, first in self.speakers:
            step = first + shift
            for start, ids in live.compiled.overrides:
                if 0 <= step - start < len(ids):
                    out.append(Replacement(number, ids[step - start], step, live))
        return out


NOTHING = StepPlan(0, (), (), (), (), (), ())


@dataclass
class Found:
    """What a step selects for one edit or read, a piece a request: one row as a number, more as an array."""

    lives: list[Live] = field(default_factory=list)
    positions: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    points: list[int] = field(default_factory=list)

    def add(self, live: Live, position: Any, row: Any, count: int, point: int = 0) -> None:
        self.lives.append(live)
        self.positions.append(position)
        self.rows.append(row)
        self.counts.append(count)
        self.points.append(point)

    def drop_failed(self) -> None:
        """Forget what was selected of requests that have failed."""
        kept = [i for i, live in enumerate(self.lives) if live.fault is None]
        every: tuple[list[Any], ...] = (self.lives, self.positions, self.rows, self.counts, self.points)
        for of in every:
            of[:] = [of[i] for i in kept]

    def add_all(self, live: Live, positions: Ints, shift: int, point: int = 0) -> None:
        """``positions``, in rows ``shift`` further."""
        if len(positions) == 1:
            position = int(positions[0])
            self.add(live, position, position + shift, 1, point)
        else:
            self.add(live, positions, positions + shift, len(positions), point)

    def fill(self, name: str, sites: tuple[str, ...], sampled: bool, *, edit: bool, put: bool = False) -> Fill:
        """Raises TableError for rows that are not sorted, and for one of ``put`` that is in no slot."""
        rows, positions = _joined(self.rows, self.counts), _joined(self.positions, self.counts)
        if len(rows) > 1 and not np.all(np.diff(rows) > 0):
            raise TableError(f"{name}: the rows of a step are not sorted and unique", self.lives)
        points, before = None, np.zeros(len(self.lives), np.int64)
        if edit:
            points = np.repeat(np.array(self.points, np.int32), self.counts)
        else:
            key = (name, sampled)
            taken = [live.places.get(key) for live in self.lives]
            before = np.array([0 if t is None else t.count for t in taken], np.int64)
        bounds = np.concatenate([[0], np.cumsum(self.counts)])
        fill = Fill(name, sites, sampled, rows, positions, tuple(self.lives), bounds, before, points)
        return replace(fill, slots=self._slots(name, fill)) if put else fill

    def _slots(self, name: str, fill: Fill) -> npt.NDArray[np.int32]:
        found = []
        for part in fill.parts:
            patch = part.live.patches.get(name)
            slots = None if patch is None else patch.slots(part.positions)
            if slots is None:
                told = f"{name}: request {part.live.key[0]!r} has no source for its rows"
                raise TableError(told, [part.live])
            found.append(slots)
        return np.concatenate(found).astype(np.int32) + 1

    def at_samples(self, sampled_rows: Mapping[int, int]) -> Found:
        """What of it is at rows that are sampled, where a row is the request's number in the batch."""
        out = Found()
        for live, position, row, count, point in zip(
            self.lives, self.positions, self.rows, self.counts, self.points, strict=True
        ):
            # A request's only sampled row is its last one.
            if isinstance(row, np.ndarray):
                position, row, count = int(position[-1]), int(row[-1]), 1
            if (number := sampled_rows.get(row)) is not None:
                out.add(live, position, number, count, point)
        return out


@dataclass
class Selected:
    """What a step selects: edit or read → rows; metric → (number in the batch, request, position); see
    :class:`StepPlan` for ``speakers``."""

    edits: dict[str, Found] = field(default_factory=dict)
    reads: dict[str, Found] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, Live, int]]] = field(default_factory=dict)
    speakers: list[tuple[int, Live, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.edits or self.reads or self.metrics or self.speakers)

    def drop_failed(self) -> None:
        """Forget what was selected of requests that have failed."""
        for entries in (self.edits, self.reads):
            for name, found in list(entries.items()):
                found.drop_failed()
                if not found.lives:
                    del entries[name]
        for name, measured in list(self.metrics.items()):
            self.metrics[name] = [m for m in measured if m[1].fault is None]
            if not self.metrics[name]:
                del self.metrics[name]
        self.speakers[:] = [s for s in self.speakers if s[1].fault is None]


def _joined(pieces: list[Any], counts: list[int]) -> Ints:
    if max(counts, default=1) == 1:
        return np.array(pieces, np.int64)
    return np.concatenate([np.atleast_1d(np.asarray(piece, np.int64)) for piece in pieces])


def by_live(fill: Fill) -> Iterator[tuple[Live, int | Ints]]:
    """Each request of a fill with its position there, or with all of them."""
    if fill.single:
        yield from zip(fill.lives, fill.positions.tolist(), strict=True)
    else:
        yield from ((part.live, part.positions) for part in fill.parts)


def ranges(positions: int | Ints, shift: int) -> list[Interval]:
    """The half-open ranges of positions of a plan that was used ``shift`` times more, one position further each."""
    if isinstance(positions, int):
        return [(positions, positions + shift + 1)]
    return to_ranges(positions)

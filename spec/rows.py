"""Row selectors: which positions of a request an edit, a read or a metric acts on.

With P prompt tokens and n generated tokens the rows of a request are positions 0 … P+n−2 (the last generated token
has no row).  A selector is compiled once a request against :class:`Facts` into half-open intervals of absolute
positions, so a step only clips them; ``ids`` is the one form that also looks at the token a row holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

OPEN = 2**62
"""The end of an interval that lasts as long as the request."""

Word = Literal["all", "prompt", "sampling", "generated"]
WORDS: tuple[Word, ...] = ("all", "prompt", "sampling", "generated")
Interval = tuple[int, int]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """A selector; every field that is given narrows the rows.  ``steps`` and ``positions`` are inclusive ranges."""

    word: Word = "all"
    steps: tuple[Interval, ...] | None = None
    positions: tuple[Interval, ...] | None = None
    match: str | None = None
    ids: tuple[int, ...] | None = None
    turn: str | None = None
    skip: int = 0
    after: str | None = None
    exclude: Rows | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rows": self.word}
        for name in ("steps", "positions"):
            ranges = getattr(self, name)
            if ranges is not None:
                out[name] = [list(r) for r in ranges]
        if self.match is not None:
            out["match"] = self.match
        if self.ids is not None:
            out["ids"] = list(self.ids)
        if self.turn is not None:
            out["turn"], out["skip"] = self.turn, self.skip
        if self.after is not None:
            out["after"] = self.after
        if self.exclude is not None:
            out["except"] = self.exclude.to_json()
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rows:
        def ranges(name: str) -> tuple[Interval, ...] | None:
            return tuple((int(a), int(b)) for a, b in data[name]) if name in data else None

        return Rows(
            word=data["rows"],
            steps=ranges("steps"),
            positions=ranges("positions"),
            match=data.get("match"),
            ids=tuple(data["ids"]) if "ids" in data else None,
            turn=data.get("turn"),
            skip=data.get("skip", 0),
            after=data.get("after"),
            exclude=Rows.from_json(data["except"]) if "except" in data else None,
        )

    def parts(self) -> Iterable[Rows]:
        """This selector and the ones inside its ``except``."""
        yield self
        if self.exclude is not None:
            yield from self.exclude.parts()


@dataclass(frozen=True)
class Facts:
    """What a request's own text decides.  ``matches``: text → half-open intervals of prompt positions;
    ``turns``: (role, start, end) with end :data:`OPEN` for the turn being generated; ``overrides``: name →
    (first generated step, number of tokens)."""

    prompt: int
    matches: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    turns: Sequence[tuple[str, int, int]] = ()
    overrides: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """A selector compiled for one request: intervals, then an optional filter on token ids, then what is left out."""

    intervals: tuple[Interval, ...]
    ids: frozenset[int] | None = None
    exclude: Selection | None = None

    @property
    def by_position(self) -> bool:
        """Whether positions alone decide, and no token id."""
        return self.ids is None and (self.exclude is None or self.exclude.by_position)

    def holds(self, position: int) -> bool:
        """Whether it selects ``position``, for a selection :attr:`by_position`."""
        inside = any(a <= position < b for a, b in self.intervals)
        return inside and (self.exclude is None or not self.exclude.holds(position))

    def within(self, interval: Interval) -> Selection:
        """What it selects of the positions in ``interval``."""
        if interval == (0, OPEN):
            return self
        return replace(self, intervals=tuple(intersect(self.intervals, [interval])))

    def until(self, position: int) -> int:
        """The first position after ``position`` at which :meth:`holds` may answer otherwise."""
        ends = [edge for interval in self.intervals for edge in interval if edge > position]
        if self.exclude is not None:
            ends.append(self.exclude.until(position))
        return min(ends, default=OPEN)

    def select(self, start: int, tokens: Ints) -> Ints:
        """The selected positions among ``start … start+len(tokens)−1``; ``tokens[i]`` is held by row ``start+i``."""
        stop = start + len(tokens)
        clipped = [(max(a, start), min(b, stop)) for a, b in self.intervals if a < stop and b > start]
        if not clipped:
            return np.empty(0, np.int64)
        found = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in clipped])
        if self.ids is not None:
            found = found[np.isin(tokens[found - start], list(self.ids))]
        if self.exclude is not None and len(found):
            found = found[~np.isin(found, self.exclude.select(start, tokens))]
        return found


def compile_rows(rows: Rows, facts: Facts) -> Selection:
    """Compile ``rows`` for one request.

    Raises KeyError where ``facts`` lack a match text or an override that the selector names.
    """
    size = facts.prompt
    kept: list[Interval] = [_word(rows.word, size)]
    if rows.steps is not None:
        kept = intersect(kept, [(size - 1 + a, size + b) for a, b in rows.steps])
    if rows.positions is not None:
        kept = intersect(kept, [_position(r, size) for r in rows.positions])
        kept = intersect(kept, [(0, size)])
    if rows.match is not None:
        kept = intersect(kept, facts.matches[rows.match])
    if rows.turn is not None:
        kept = intersect(kept, [(a + rows.skip, b) for role, a, b in facts.turns if role == rows.turn])
    if rows.after is not None:
        start, length = facts.overrides[rows.after]
        kept = intersect(kept, [(size + start + length, OPEN)])
    ids = None if rows.ids is None else frozenset(rows.ids)
    if rows.exclude is None:
        return Selection(tuple(kept), ids)
    left_out = compile_rows(rows.exclude, facts)
    if left_out.ids is None and left_out.exclude is None:
        return Selection(tuple(subtract(kept, left_out.intervals)), ids)
    return Selection(tuple(kept), ids, left_out)


def _word(word: Word, size: int) -> Interval:
    return {"all": (0, OPEN), "prompt": (0, size), "sampling": (size - 1, OPEN), "generated": (size, OPEN)}[word]


def _position(span: Interval, size: int) -> Interval:
    first, last = (p + size if p < 0 else p for p in span)
    return max(first, 0), last + 1


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint, empty ones dropped."""
    out: list[Interval] = []
    for a, b in sorted(i for i in intervals if i[0] < i[1]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def intersect(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    right = merge(other)
    return merge((max(a, c), min(b, d)) for a, b in merge(one) for c, d in right if a < d and c < b)


def subtract(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    out: list[Interval] = []
    gaps = merge(other)
    for a, b in merge(one):
        for c, d in gaps:
            if d <= a or c >= b:
                continue
            if c > a:
                out.append((a, c))
            a = max(a, d)
        if a < b:
            out.append((a, b))
    return out


def to_ranges(positions: Ints) -> list[Interval]:
    """Sorted positions as half-open ranges, for compact transport."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(p[0]), int(p[-1]) + 1) for p in np.split(positions, cuts)]


def from_ranges(ranges: Iterable[Interval]) -> Ints:
    parts = [np.arange(a, b, dtype=np.int64) for a, b in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)

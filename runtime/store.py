"""What one request's reads have put out so far, growing as rows arrive, and what is handed over of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.live import Ints, Live, TableError
from vtaps.runtime.records import Collected, Kept
from vtaps.runtime.spool import Growing, Spool
from vtaps.spec.rows import OPEN

Array = npt.NDArray[Any]

PENDING_ROWS = 64
"""Generated rows that a mean keeps apart before they are summed: vLLM may compute that many past a stop at most."""


@dataclass
class Rows:
    """Fields ``[rows, sites, …]`` in the order of positions; ``most``: how many rows the request can have."""

    most: int
    dtype: str
    spool: Spool
    fields: dict[str, Growing] = field(default_factory=dict)
    positions: list[Ints] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(len(positions) for positions in self.positions)

    def add(self, positions: Ints, fields: Mapping[str, Array]) -> None:
        """Take ``positions``, all greater than those before, with their fields; the arrays are copied.

        Raises SpoolError.
        """
        for name, array in fields.items():
            if name not in self.fields:
                self.fields[name] = Growing(self.spool, self.most)
            self.fields[name].add(array)
        self.positions.append(positions)

    def read(self, name: str, sites: tuple[str, ...], stop: int, live: Live) -> Kept | None:
        """The rows at the positions below ``stop``, for good; None where there are none."""
        positions = np.concatenate(self.positions)
        count = int(np.searchsorted(positions, stop))
        if not count:
            return None
        return Kept(name, sites, positions[:count], {n: a.take(count) for n, a in self.fields.items()}, self.dtype)


@dataclass
class Sums:
    """A mean's sums, each ``[sites, width]`` float32 with the positions that went into it: those of the prompt at
    once, generated rows apart until it is known that they count."""

    parts: list[tuple[Ints, Array]] = field(default_factory=list)

    def add(self, positions: Ints, total: Array) -> None:
        self.parts.append((positions, total))
        if len(self.parts) > 2 * PENDING_ROWS:
            old = self.parts[: len(self.parts) - PENDING_ROWS]
            self.parts[: len(old)] = [_fold(old)]

    def read(self, name: str, sites: tuple[str, ...], stop: int, live: Live) -> Kept | None:
        """Raises TableError where rows at or past ``stop`` are in a sum already."""
        kept = [p for p in self.parts if p[0][0] < stop]
        if not kept:
            return None
        positions, total = _fold(kept)
        if positions.max() >= stop:
            raise TableError(f"read {name}: rows computed after a stop are already part of the mean")
        count = np.full((1, len(sites)), len(positions), np.int64)
        values = total / np.float32(len(positions))
        return Kept(name, sites, np.sort(positions), {"mean": values[None], "count": count}, "float32")


def _fold(parts: Sequence[tuple[Ints, Array]]) -> tuple[Ints, Array]:
    total: Array = np.stack([p[1] for p in parts]).sum(0, dtype=np.float32)
    return np.concatenate([p[0] for p in parts]), total


def most_rows(live: Live, read: str) -> int:
    """How many rows of a token the request can have for ``read``; 0 where nothing bounds them."""
    if live.end >= OPEN:
        return 0
    [which] = [w for name, w in live.compiled.reads if name == read]
    return sum(max(0, min(b, live.end) - a) for a, b in live.compiled.selections[which].intervals)


def sums_of(live: Live, read: str, sites: tuple[str, ...]) -> Sums:
    kept = live.kept.setdefault((read, sites), Sums())
    assert isinstance(kept, Sums)
    return kept


def collected(live: Live, generated: int) -> Collected:
    """What a request of ``generated`` tokens put out: rows past P + n − 2 were computed after its stop and do not
    count.  Raises TableError where a mean has already summed such rows."""
    stop = live.prompt + max(generated, 1) - 1
    found = [kept.read(read, sites, stop, live) for (read, sites), kept in live.kept.items()]
    metrics = {}
    for name, pairs in live.metrics.items():
        chosen = dict(sorted((p, v) for p, v in dict(pairs).items() if p < stop))
        metrics[name] = (np.array(list(chosen), np.int64), np.array(list(chosen.values()), np.float32))
    gates = {gate for gate, _ in live.compiled.gated.values()}
    return Collected(
        fired={name: ranges for name, ranges in live.ranges_fired(stop).items() if name not in gates},
        kept=tuple(kept for kept in found if kept is not None),
        metrics=metrics,
        overridden=tuple(sorted(s for s in live.overridden if s < generated)) if live.overridden else (),
        gated=live.compiled.gated,
        cached=tuple((a, min(b, stop)) for a, b in live.cached() if a < stop),
    )

"""What one request's reads have put out so far, growing as rows arrive, and the record made of it at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import Program
from vtaps.runtime.records import ReadRows, Record
from vtaps.runtime.rowtable import Ints, Live, TableError
from vtaps.spec.rows import OPEN

Array = npt.NDArray[Any]

PENDING_ROWS = 64
"""Generated rows that a mean keeps apart before they are summed: vLLM may compute that many past a stop at most."""


@dataclass
class Rows:
    """Fields ``[rows, sites, …]`` in the order of positions.

    Memory for all rows that the request can have is asked for at once: the system gives it as it is written, and
    nothing is copied together at the end.
    """

    most: int
    dtype: str
    fields: dict[str, Array] = field(default_factory=dict)
    positions: list[Ints] = field(default_factory=list)
    used: int = 0

    def add(self, positions: Ints, fields: Mapping[str, Array]) -> None:
        """Take ``positions``, all greater than those before, with their fields; the arrays are copied."""
        stop = self.used + len(positions)
        for name, array in fields.items():
            kept = self.fields.get(name)
            if kept is None:
                kept = np.empty((max(self.most, stop), *array.shape[1:]), array.dtype)
            elif len(kept) < stop:
                kept = np.concatenate([kept[: self.used], np.empty((stop, *array.shape[1:]), array.dtype)])
            kept[self.used : stop] = array
            self.fields[name] = kept
        self.positions.append(positions)
        self.used = stop

    def read(self, sites: Sequence[str], stop: int) -> dict[str, ReadRows]:
        """Site → its rows at the positions below ``stop``."""
        positions = np.concatenate(self.positions)
        count = int(np.searchsorted(positions, stop))
        if not count:
            return {}
        dtype = self.dtype if "rows" in self.fields else "float32"
        return {
            site: ReadRows(positions[:count], {n: a[:count, i] for n, a in self.fields.items()}, dtype)
            for i, site in enumerate(sites)
        }


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

    def read(self, name: str, sites: Sequence[str], stop: int) -> dict[str, ReadRows]:
        """Raises TableError where rows at or past ``stop`` are in a sum already."""
        kept = [p for p in self.parts if p[0][0] < stop]
        if not kept:
            return {}
        positions, total = _fold(kept)
        if positions.max() >= stop:
            raise TableError(f"read {name}: rows computed after a stop are already part of the mean")
        count = np.array([len(positions)], np.int64)
        values = total / np.float32(len(positions))
        return {
            site: ReadRows(np.sort(positions), {"mean": values[n : n + 1], "count": count}, "float32")
            for n, site in enumerate(sites)
        }


def _fold(parts: Sequence[tuple[Ints, Array]]) -> tuple[Ints, Array]:
    total: Array = np.stack([p[1] for p in parts]).sum(0, dtype=np.float32)
    return np.concatenate([p[0] for p in parts]), total


def rows_of(live: Live, read: str, sites: tuple[str, ...], dtype: str) -> Rows:
    """Where a request's rows of ``read`` at ``sites`` go."""
    kept = live.kept.get((read, sites))
    if kept is None:
        [which] = [w for name, w in live.compiled.reads if name == read]
        end = min(live.end, OPEN)
        most = sum(max(0, min(b, end) - a) for a, b in live.compiled.selections[which].intervals) if end < OPEN else 0
        kept = live.kept[read, sites] = Rows(most, dtype)
    assert isinstance(kept, Rows)
    return kept


def sums_of(live: Live, read: str, sites: tuple[str, ...]) -> Sums:
    kept = live.kept.setdefault((read, sites), Sums())
    assert isinstance(kept, Sums)
    return kept


def record_of(live: Live, generated: int, program: Program) -> Record:
    """What a request of ``generated`` tokens put out: rows past P + n − 2 were computed after its stop and do not
    count.  Raises TableError where a mean has already summed such rows."""
    stop = live.prompt + max(generated, 1) - 1
    reads: dict[tuple[str, str], ReadRows] = {}
    for (read, sites), kept in live.kept.items():
        found = kept.read(read, sites, stop) if isinstance(kept, Sums) else kept.read(sites, stop)
        reads.update({(read, site): rows for site, rows in found.items()})
    metrics = {}
    for name, pairs in live.metrics.items():
        chosen = dict(sorted((p, v) for p, v in dict(pairs).items() if p < stop))
        metrics[name] = (np.array(list(chosen), np.int64), np.array(list(chosen.values()), np.float32))
    return Record(
        fired=live.ranges_fired(stop),
        reads=reads,
        metrics=metrics,
        overridden=tuple(sorted(s for s in live.overridden if s < generated)),
    )

"""Many requests' rows in one array: what a step reads of all of them is put in place at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.fills import Fill
from vtaps.runtime.live import Ints, Live
from vtaps.runtime.records import Kept
from vtaps.runtime.spool import Spool
from vtaps.runtime.store import Rows, most_rows

Array = npt.NDArray[Any]

SHARE_BYTES = 4 << 20
"""A request with more for one read has arrays of its own."""
SLAB_BYTES = 64 << 20
"""The memory of a slab comes back when the last of its requests is let go of."""


class Slab:
    """Fields ``[rows, sites, …]``, each asked for at once."""

    def __init__(self, spool: Spool, rows: int) -> None:
        self._spool, self._rows = spool, rows
        self.fields: dict[str, Array] = {}

    def put(self, at: Ints, fields: Mapping[str, Array]) -> None:
        """Write row ``i`` of every field to row ``at[i]``."""
        where: Any = at
        if len(at) and at[-1] - at[0] + 1 == len(at) and bool(np.all(np.diff(at) == 1)):
            where = slice(int(at[0]), int(at[-1]) + 1)
        for name, rows in fields.items():
            if name not in self.fields:
                made = self.fields[name] = self._spool.array((self._rows, *rows.shape[1:]), rows.dtype)
                self._spool.count(made.nbytes)
                weakref.finalize(made.base, self._spool.free, made.nbytes).atexit = False
            self.fields[name][where] = rows


@dataclass(frozen=True)
class OnSlab:
    """One request's ``rows`` of a read: those of a slab from ``start`` on, in the order of its positions."""

    slab: Slab
    start: int
    rows: int
    sampled: bool
    dtype: str

    def read(self, name: str, sites: tuple[str, ...], stop: int, live: Live) -> Kept | None:
        """The rows at the positions below ``stop``, for good; None where there are none."""
        positions = live.positions(name, self.sampled, stop)
        if not (count := len(positions)):
            return None
        rows = slice(self.start, self.start + count)
        return Kept(name, sites, positions, {n: a[rows] for n, a in self.slab.fields.items()}, self.dtype)


@dataclass(frozen=True)
class Places:
    """Where the rows of a fill go: row ``i`` to row ``at[i]``, below ``ends[i]``, of slab number ``which[i]``; -1: to
    its request's own arrays."""

    slabs: Sequence[Slab]
    which: Ints
    at: Ints
    ends: Ints

    def put(self, rows: Ints, later: Ints, fields: Mapping[str, Array]) -> None:
        """Take the fields of the fill's ``rows``, each ``later[i]`` steps after the plan's own.

        What an engine that ran ahead computed past a request's last row is left out.
        """
        at = self.at[rows] + later
        inside = at < self.ends[rows]
        if len(self.slabs) == 1 and self.which.min() == 0 and inside.all():
            self.slabs[0].put(at, fields)
            return
        which = self.which[rows]
        for number, slab in enumerate(self.slabs):
            mine = np.flatnonzero((which == number) & inside)
            if len(mine):
                # Neighbours are a view: an index would copy them first.
                alone = mine[-1] - mine[0] + 1 == len(mine)
                some: Any = slice(int(mine[0]), int(mine[-1]) + 1) if alone else mine
                slab.put(at[some], {name: array[some] for name, array in fields.items()})


def places(fill: Fill, sites: tuple[str, ...], dtype: str, size: int, spool: Spool) -> Places:
    """Where a fill's rows at ``sites`` go, ``size`` bytes each; requests that are new get their memory."""
    found = fill.placed.get(sites)
    if found is None:
        found = fill.placed[sites] = _places(fill, sites, dtype, size, spool)
    assert isinstance(found, Places)
    return found


def _places(fill: Fill, sites: tuple[str, ...], dtype: str, size: int, spool: Spool) -> Places:
    key = (fill.name, sites)
    gathered: list[tuple[Live, int]] = []
    total = promised = 0
    for live in fill.lives:
        if key in live.kept:
            continue
        rows = most_rows(live, fill.name)
        own = rows * size
        if not rows or own > SHARE_BYTES or spool.place(own, own + total + promised) is not None:
            live.kept[key] = Rows(rows, dtype, spool)
            continue
        if gathered and total + own > SLAB_BYTES:
            _share(gathered, key, fill.sampled, dtype, spool)
            gathered, total, promised = [], 0, promised + total
        gathered.append((live, rows))
        total += own
    if gathered:
        _share(gathered, key, fill.sampled, dtype, spool)
    kept = [live.kept[key] for live in fill.lives]
    slabs = list({id(k.slab): k.slab for k in kept if isinstance(k, OnSlab)}.values())
    numbers = {id(slab): number for number, slab in enumerate(slabs)}
    counts = np.diff(fill.bounds)
    which = [numbers[id(k.slab)] if isinstance(k, OnSlab) else -1 for k in kept]
    starts = np.array([k.start if isinstance(k, OnSlab) else 0 for k in kept], np.int64)
    ends = np.array([k.start + k.rows if isinstance(k, OnSlab) else 0 for k in kept], np.int64)
    at = np.repeat(starts + fill.before - fill.bounds[:-1], counts) + np.arange(len(fill.rows), dtype=np.int64)
    return Places(slabs, np.repeat(np.array(which, np.int64), counts), at, np.repeat(ends, counts))


def _share(
    gathered: Sequence[tuple[Live, int]], key: tuple[str, tuple[str, ...]], sampled: bool, dtype: str, spool: Spool
) -> None:
    slab = Slab(spool, sum(rows for _, rows in gathered))
    start = 0
    for live, rows in gathered:
        live.kept[key] = OnSlab(slab, start, rows, sampled, dtype)
        start += rows

"""What one rank of a tensor-parallel group has of each location, and the program as that rank serves it.

The lock and the driver count a location's columns as a model on one rank has them; a rank's tables, vectors and slots
hold its own columns of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.entries import LockError, Part, ReadEntry, SiteEntry
from vtaps.runtime.program import Program
from vtaps.spec.rows import Interval

Block = tuple[int, int]
"""Columns, and how many equal units they are that no rank has a piece of: heads, or columns."""


def share(size: int, units: int, rank: int, ranks: int) -> Interval:
    """The columns of a block of ``size`` that a rank has.  Where there are fewer units than ranks, neighbours have the
    same one.  Raises ValueError where they do not divide."""
    if size % units or (units % ranks and ranks % units):
        raise ValueError(f"{units} units of {size} columns do not divide among {ranks} ranks")
    if units >= ranks:
        step = size // ranks
        return rank * step, (rank + 1) * step
    step, number = size // units, rank * units // ranks
    return number * step, (number + 1) * step


def part(blocks: Sequence[Block], columns: Interval | None, rank: int, ranks: int) -> Part:
    """What a rank has of a tensor's ``columns`` (None: of all), whose last axis is ``blocks`` one after another, each
    divided by itself.  Raises ValueError where that is no run of the rank's own columns."""
    whole, mine, here, own = 0, 0, [], []
    first, last = (0, sum(size for size, _ in blocks)) if columns is None else columns
    for size, units in blocks:
        a, b = share(size, units, rank, ranks)
        start, stop = max(whole + a, first), min(whole + b, last)
        if start < stop:
            here.append((start - first, stop - first))
            own.append((mine + start - whole - a, mine + stop - whole - a))
        whole, mine = whole + size, mine + b - a
    if not here or any(one[1] != other[0] for one, other in pairwise(own)):
        raise ValueError("a rank's columns there are no run of its own")
    return Part(last - first, tuple(here), None if columns is None else (own[0][0], own[-1][1]), rank == 0)


@dataclass(frozen=True)
class Ranks:
    """A worker among several: number ``rank`` of the ``count`` of a tensor-parallel group, on ``stage`` of the
    ``stages`` of a pipeline.  ``parts``: site of which each rank has some columns → those of each rank; ``present``:
    whether the stage runs a location; ``unembed``: the logits of this rank's part of the vocabulary, whose first token
    is then ``vocabulary``."""

    rank: int
    count: int
    parts: Callable[[Program], Mapping[str, Sequence[Part]]]
    unembed: Callable[[Any], Any]
    vocabulary: Callable[[], int]
    stage: int = 0
    stages: int = 1
    present: Callable[[SiteEntry], bool] = lambda _: True


SUMS = ("norm", "project", "probe")
"""What is made of a row's parts is added up: no column may come twice."""


def localized(program: Program, ranks: Ranks) -> Program:
    """The program as a worker serves it: the locations of its stage, its columns of each.

    Raises LockError for a site of which it has some columns and nobody says which, and for a gate whose edits are on
    another stage.
    """
    here = _on_stage(program, ranks)
    parts = ranks.parts(here) if ranks.count > 1 else {}
    for name, held in parts.items():
        try:
            mixed = any(0 < len(mine) < len(held[rank].pieces) for rank, mine in enumerate(owned(held)))
        except ValueError as error:
            raise LockError(f"sites.{name}", str(error)) from error
        summed = [r for r, read in here.reads.items() if read.kind in SUMS and name in read.sites]
        if mixed and summed:
            raise LockError(f"reads.{summed[0]}", f"of {name} some is on several ranks: read k and v for themselves")
    unknown = [name for name, site in here.sites.items() if site.shared and name not in parts]
    if unknown:
        raise LockError(f"sites.{unknown[0]}", "which of its columns this rank has is not known")
    mine = {name: held[ranks.rank] for name, held in parts.items()}
    sites = {name: _own(site, mine.get(name)) for name, site in here.sites.items()}
    if ranks.rank == 0:
        return replace(here, sites=sites)
    silent = {name for name, read in here.reads.items() if not _reported(name, read, here, sites)}
    arms = {
        name: replace(arm, metrics=(), reads=tuple(r for r in arm.reads if r not in silent))
        for name, arm in here.arms.items()
    }
    return replace(here, sites=sites, arms=arms)


def _on_stage(program: Program, ranks: Ranks) -> Program:
    """What of a program a stage of a pipeline serves."""
    if ranks.stages == 1:
        return program
    sites = {name: site for name, site in program.sites.items() if ranks.present(site)}
    edits = {n: replace(e, sites=tuple(s for s in e.sites if s in sites)) for n, e in program.edits.items()}
    reads = {n: replace(r, sites=tuple(s for s in r.sites if s in sites)) for n, r in program.reads.items()}
    for name, edit in edits.items():
        if edit.sites and edit.when is not None and not reads[edit.when].sites:
            raise LockError(f"edits.{name}", f"its gate {edit.when} is on another stage of the pipeline")
    last = ranks.stage == ranks.stages - 1
    arms = {}
    for name, arm in program.arms.items():
        points = []
        for point in arm.points:
            cut = (replace(e, sites=tuple(s for s in e.sites if s in sites)) for e in point.edits)
            points.append(
                replace(point, edits=tuple(e for e in cut if e.sites), overrides=point.overrides if last else {})
            )
        kept = tuple(r for r in arm.reads if reads[r].sites)
        arms[name] = replace(arm, points=tuple(points), reads=kept, metrics=arm.metrics if last else ())
    return replace(
        program,
        sites=sites,
        edits={n: e for n, e in edits.items() if e.sites},
        reads={n: r for n, r in reads.items() if r.sites},
        arms=arms,
        gates={n: g for n, g in program.gates.items() if reads[n].sites},
        lens_norm=program.lens_norm if last else None,
    )


def _own(site: SiteEntry, mine: Part | None) -> SiteEntry:
    if mine is None:
        return site
    if mine.width != site.width:
        raise LockError(f"sites.{site.name}", f"it is {mine.width} wide here; {site.width} was compiled")
    return replace(site, width=mine.size, columns=mine.columns, part=mine)


def _reported(name: str, read: ReadEntry, program: Program, sites: Mapping[str, SiteEntry]) -> bool:
    """Whether another rank than the first has to report a read: for its columns, or its part of the vocabulary; a gate
    decides on each."""
    if read.kind == "lens":
        return any(not sites[s].sampled for s in read.sites)
    return name in program.gates or any(sites[s].part is not None for s in read.sites)


def joined(width: int, held: Sequence[tuple[Part, npt.NDArray[Any]]]) -> npt.NDArray[Any]:
    """``[n, width]`` of what ranks have of it, ``[n, size]`` each.  Columns that several have are the first one's."""
    out = np.empty((len(held[0][1]), width), held[0][1].dtype)
    for mine, array in reversed(held):
        start = 0
        for a, b in mine.pieces:
            out[:, a:b] = array[:, start : start + b - a]
            start += b - a
    return out


def owned(parts: Sequence[Part]) -> list[tuple[Interval, ...]]:
    """Of each rank, the columns that no rank before it has.  Raises ValueError where some are nobody's."""
    seen = np.zeros(parts[0].width, bool)
    out = []
    for mine in parts:
        fresh = [piece for piece in mine.pieces if not seen[piece[0] : piece[1]].any()]
        for a, b in mine.pieces:
            if (a, b) not in fresh and not seen[a:b].all():
                raise ValueError("ranks overlap in a part of what one of them has")
            seen[a:b] = True
        out.append(tuple(fresh))
    if not seen.all():
        raise ValueError(f"{int((~seen).sum())} of {len(seen)} columns are on no rank")
    return out

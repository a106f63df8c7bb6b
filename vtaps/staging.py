"""Arms that need what other arms kept: their requests go in when it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vtaps.runtime.records import Failure, Request
from vtaps.runtime.results.kept import EarlierRun
from vtaps.runtime.results.load import RunError
from vtaps.runtime.results.means import RunMean
from vtaps.spec.plan import Plan, PromptKey
from vtaps.spec.rows import to_ranges
from vtaps.spec.spec import RowsOf
from vtaps.spec.stages import vectors_of

Floats = npt.NDArray[np.float32]

Rows = Mapping[str, Any]
"""Site → ``[rows, width]``, bfloat16 as its bits."""


class Kept(Protocol):
    """What finished requests kept: a run folder."""

    def rows(self, key: str, read: str) -> tuple[Any, Rows] | None:
        """Positions ``[rows]`` of a read and its rows; None where the request is not there or kept none."""

    def mean(self, keys: Sequence[str], read: str) -> RunMean | None:
        """The mean that requests kept, over all of their rows; None where one of them is not there."""


class Memory(Protocol):
    """What takes rows and vectors: an engine."""

    def patch(self, edit: str, first: int, rows: Rows) -> None: ...

    def define(self, vector: str, numbers: Rows) -> None: ...


def key_of(group: str, prompt: str, arm: str, point: int) -> str:
    return f"{group}/{prompt}/{arm}/{point}"


def batches(plan: Plan, requests: Iterable[Request]) -> Iterator[list[Request]]:
    """The requests by stage, each in the order given; stages without one are left out."""
    stage = {arm: number for number, arms in enumerate(plan.stages) for arm in arms}
    out: list[list[Request]] = [[] for _ in plan.stages]
    for request in requests:
        out[stage[request.arm]].append(request)
    return (batch for batch in out if batch)


class Sources:
    """Brings what a stage needs to the engine.  ``failed``: key of a request → why it failed, which is added to."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        requests: Sequence[Request],
        kept: Kept,
        memory: Memory,
        failed: dict[str, Failure],
    ) -> None:
        """``folder`` is where the names of earlier runs start."""
        self._plan, self._kept, self._memory, self._failed = plan, kept, memory, failed
        self._there: dict[tuple[str, PromptKey], str] = {}
        self._defined: dict[str, str] = {}
        self._folder = folder
        self._runs: dict[RowsOf, EarlierRun] = {}
        self._keys = keys_by_arm(requests)
        self._vectors = {name: vectors_of(plan.spec, arm) for name, arm in plan.spec.arms.items()}

    def ready(self, batch: Iterable[Request]) -> Iterator[Request]:
        """The requests with where the rows are that they set; one whose rows are not there fails and is left out."""
        for request in batch:
            point = self._plan.arms[request.arm].points[request.point]
            patches = {}
            wrong = next((w for v in self._vectors[request.arm] if (w := self._define(v))), "")
            for name in (edit.edit for edit in point.edits):
                source = self._plan.edits[name].source
                if source is None:
                    continue
                pair = source.pairs[request.group, request.prompt_id]
                wrong = wrong or self._fill(name, pair)
                first, positions = source.blocks[pair]
                patches[name] = (first, tuple(to_ranges(np.array(positions, np.int64))))
            if wrong:
                self._failed[request.key] = Failure(wrong, arm=request.arm)
            else:
                yield replace(request, patches=patches) if patches else request

    def _define(self, vector: str) -> str:
        """Give a vector its numbers, once; what is wrong, or nothing."""
        if vector not in self._plan.means:
            return ""
        if vector not in self._defined:
            numbers = numbers_of(self._plan, vector, self._keys, self._kept)
            if isinstance(numbers, str):
                self._defined[vector] = numbers
            else:
                self._memory.define(vector, numbers)
                self._defined[vector] = ""
        return self._defined[vector]

    def _fill(self, name: str, pair: PromptKey) -> str:
        """Bring the rows of one source prompt to an edit's memory, once; what is wrong, or nothing."""
        if (name, pair) not in self._there:
            self._there[name, pair] = self._brought(name, pair)
        return self._there[name, pair]

    def _earlier(self, rows: RowsOf) -> EarlierRun:
        if rows not in self._runs:
            self._runs[rows] = EarlierRun(self._folder / Path(str(rows.run)).expanduser(), rows.arm, rows.read)
        return self._runs[rows]

    def _brought(self, name: str, pair: PromptKey) -> str:
        plan = self._plan.edits[name]
        assert plan.source is not None and plan.edit.rows is not None
        rows, (first, positions) = plan.edit.rows, plan.source.blocks[pair]
        if not positions:
            return ""
        key = key_of(*pair, rows.arm, 0)
        if rows.run is not None:
            try:
                found = self._earlier(rows).rows(pair, [site.name for site in plan.sites])
            except RunError as error:
                return f"edit {name} has no rows to set: {error}"
            key = f"{key} of {rows.run}"
        else:
            found = self._kept.rows(key, rows.read)
        if found is None:
            why = f"failed: {self._failed[key].reason}" if key in self._failed else f"kept no rows of {rows.read}"
            return f"edit {name} has no rows to set, since request {key} {why}"
        index = {int(position): number for number, position in enumerate(found[0])}
        missing = [p for p in positions if p not in index]
        if missing:
            return f"edit {name} has no row to set at position {missing[0]}: request {key} kept none of {rows.read}"
        chosen = [index[p] for p in positions]
        self._memory.patch(name, first, {site.name: found[1][site.name][chosen] for site in plan.sites})
        return ""


def keys_by_arm(requests: Iterable[Request]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for request in requests:
        out.setdefault(request.arm, []).append(request.key)
    return out


def numbers_of(plan: Plan, vector: str, keys: Mapping[str, Sequence[str]], kept: Kept) -> dict[str, Floats] | str:
    """Location of use → float32 ``[width]``, or why a vector cannot be made of what the run kept."""
    totals: dict[str, npt.NDArray[np.float64]] = {}
    for key, source in plan.means[vector].items():
        found = kept.mean(keys.get(source.arm, ()), source.read)
        if found is None:
            return (
                f"vector {vector} cannot be made: {source.arm}.{source.read} lacks a request of the arm, or has no row"
            )
        for use, site in source.sites.items():
            totals[use] = found.mean(site) if key == "read" else totals[use] - found.mean(site)
    norm = plan.spec.vectors[vector].norm
    for use, numbers in totals.items():
        length = float(np.linalg.norm(numbers))
        if not np.isfinite(length):
            return f"vector {vector} is not finite at {use}"
        if norm is not None:
            if not length:
                return f"vector {vector} is zero at {use}: it cannot be scaled to a norm of {norm:g}"
            totals[use] = numbers * (norm / length)
    return {use: numbers.astype(np.float32) for use, numbers in totals.items()}


def made_vectors(plan: Plan, requests: Iterable[Request], kept: Kept) -> dict[str, dict[str, Floats]]:
    """Every vector that the run could make of its reads."""
    keys = keys_by_arm(requests)
    found = {name: numbers_of(plan, name, keys, kept) for name in plan.means}
    return {name: numbers for name, numbers in found.items() if not isinstance(numbers, str)}

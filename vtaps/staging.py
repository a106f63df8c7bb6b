"""Arms that need what other arms kept: their requests go in when it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from vtaps.runtime.records import Request
from vtaps.spec.plan import Plan, PromptKey
from vtaps.spec.rows import to_ranges

Rows = Mapping[str, Any]
"""Site → ``[rows, width]``, bfloat16 as its bits."""


class Kept(Protocol):
    """What finished requests kept: a run folder."""

    def rows(self, key: str, read: str) -> tuple[Any, Rows] | None:
        """Positions ``[rows]`` of a read and its rows; None where the request is not there or kept none."""


class Memory(Protocol):
    """What takes the rows: an engine."""

    def patch(self, edit: str, first: int, rows: Rows) -> None: ...


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

    def __init__(self, plan: Plan, kept: Kept, memory: Memory, failed: dict[str, str]) -> None:
        self._plan, self._kept, self._memory, self._failed = plan, kept, memory, failed
        self._there: dict[tuple[str, PromptKey], str] = {}

    def ready(self, batch: Iterable[Request]) -> Iterator[Request]:
        """The requests with where the rows are that they set; one whose rows are not there fails and is left out."""
        for request in batch:
            point = self._plan.arms[request.arm].points[request.point]
            patches = {}
            wrong = ""
            for name in (edit.edit for edit in point.edits):
                source = self._plan.edits[name].source
                if source is None:
                    continue
                pair = source.pairs[request.group, request.prompt_id]
                wrong = wrong or self._fill(name, pair)
                first, positions = source.blocks[pair]
                patches[name] = (first, tuple(to_ranges(_array(positions))))
            if wrong:
                self._failed[request.key] = wrong
            else:
                yield replace(request, patches=patches) if patches else request

    def _fill(self, name: str, pair: PromptKey) -> str:
        """Bring the rows of one source prompt to an edit's memory, once; what is wrong, or nothing."""
        if (name, pair) not in self._there:
            self._there[name, pair] = self._brought(name, pair)
        return self._there[name, pair]

    def _brought(self, name: str, pair: PromptKey) -> str:
        plan = self._plan.edits[name]
        assert plan.source is not None and plan.edit.rows is not None
        rows, (first, positions) = plan.edit.rows, plan.source.blocks[pair]
        if not positions:
            return ""
        key = key_of(*pair, rows.arm, 0)
        found = self._kept.rows(key, rows.read)
        if found is None:
            why = f"failed: {self._failed[key]}" if key in self._failed else f"kept no rows of {rows.read}"
            return f"edit {name} has no rows to set, since request {key} {why}"
        index = {int(position): number for number, position in enumerate(found[0])}
        missing = [p for p in positions if p not in index]
        if missing:
            return f"edit {name} has no row to set at position {missing[0]}: request {key} kept none of {rows.read}"
        chosen = [index[p] for p in positions]
        self._memory.patch(name, first, {site.name: found[1][site.name][chosen] for site in plan.sites})
        return ""


def _array(positions: tuple[int, ...]) -> Any:
    import numpy as np

    return np.array(positions, np.int64)

"""Which rows of a step each edit, read, metric and override acts on: numpy alone, no vLLM and no torch.

Rows are chosen by absolute position and the true prompt length, so neither chunked prefill nor a repetition after
preemption moves them.  A step of decoding that differs from the last one only in that every request is one position
further costs no planning: the last plan is used again with its ``shift`` counted up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import Compiled, Program
from vtaps.spec.rows import OPEN, Interval, Selection, merge, to_ranges

Ints = npt.NDArray[np.int64]
RequestKey = tuple[str, int]
"""A request's own key and the index of the child among its ``n``."""


class TableError(Exception):
    """The step cannot be served as asked: nothing may go out unedited or unread."""


@dataclass(frozen=True)
class Scheduled:
    """One request's share of a step: rows ``offset … offset+len(tokens)−1`` of the batch hold the positions from
    ``start`` on.  ``sampled``: the token sampled from its last row is kept (False for a chunk that is not the last)."""

    request_id: str
    start: int
    tokens: Ints
    offset: int
    sampled: bool = True

    @property
    def last(self) -> int:
        return self.start + len(self.tokens) - 1


@dataclass
class Live:
    """A request that the worker serves, with what was seen of it so far.

    ``end``: one past the last position that can ever have a row; ``planned``: number of the last step that was planned
    for it, and its last position there; ``fired``: edit → half-open ranges of positions;
    ``taken``: read → the first position that it has not taken yet; ``kept``: (read, sites) → what the harvest holds.
    """

    request_id: str
    key: RequestKey
    prompt: int
    compiled: Compiled
    end: int = OPEN
    planned: tuple[int, int] = (0, -1)
    fired: dict[str, list[Interval]] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    kept: dict[tuple[str, tuple[str, ...]], Any] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    overridden: set[int] = field(default_factory=set)

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


@dataclass(frozen=True)
class Part:
    """Rows ``start … stop−1`` of a fill belong to one request, at these positions."""

    live: Live
    positions: Ints
    start: int
    stop: int


@dataclass(frozen=True)
class Fill:
    """The rows of one step for one edit or read at ``sites``, in batch order; ``points[i]`` numbers the use of the
    edit at row ``i`` (see :attr:`Program.uses_of`, counted from 1)."""

    name: str
    sites: tuple[str, ...]
    rows: Ints
    parts: tuple[Part, ...]
    points: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class MetricFill:
    """One metric's sampled rows: ``rows[i]`` of the step's logits belongs to ``lives[i]`` at ``positions[i]``."""

    name: str
    rows: Ints
    lives: tuple[Live, ...]
    positions: tuple[int, ...]


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

    def replacements(self, shift: int = 0) -> list[Replacement]:
        out = []
        for number, live, first in self.speakers:
            step = first + shift
            for start, ids in live.compiled.overrides:
                if 0 <= step - start < len(ids):
                    out.append(Replacement(number, ids[step - start], step, live))
        return out


@dataclass
class _Entry:
    live: Live
    positions: Ints
    rows: Ints
    point: int = 0


@dataclass
class _Open:
    """The plan of the last step, while steps like it may follow: ``left`` more of them select the same rows."""

    plan: StepPlan | None
    ids: list[str]
    starts: Ints
    left: int
    shift: int = 0


class RowTable:
    """The live requests of one worker, and the plan of each step; ``number`` counts the steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.live: dict[str, Live | None] = {}
        self.done: dict[RequestKey, Live] = {}
        self.alive: dict[RequestKey, str] = {}
        self.number = 0
        self._open: _Open | None = None
        sites = program.sites

        def split(names: Sequence[str], sampled: bool) -> tuple[str, ...]:
            return tuple(s for s in names if sites[s].sampled == sampled)

        self._edit_sites = {n: (split(e.sites, False), split(e.sites, True)) for n, e in program.edits.items()}
        self._read_sites = {n: (split(r.sites, False), split(r.sites, True)) for n, r in program.reads.items()}

    def admit(self, request_id: str, asked: Mapping[str, Any] | None, prompt: int, end: int = OPEN) -> None:
        """Take a request in at its first step; ``asked`` is its ``extra_args["vtaps"]``, None for a plain one.

        Raises TableError for a key that is alive, LockError for what the lock does not know.
        """
        if request_id in self.live:
            return
        if asked is None:
            self.live[request_id] = None
            return
        key = (str(asked["key"]), int(asked.get("child", 0)))
        if key in self.alive or key in self.done:
            raise TableError(f"request key {key[0]!r} (child {key[1]}) is alive twice")
        compiled = self.program.compile(str(asked["arm"]), int(asked["point"]), prompt, asked)
        self.live[request_id] = Live(request_id, key, prompt, compiled, end)
        self.alive[key] = request_id

    def finish(self, request_id: str) -> None:
        """The scheduler is done with a request: its record stays until it is collected."""
        live = self.live.pop(request_id, None)
        if live is not None and self.alive.get(live.key) == request_id:
            del self.alive[live.key]
            self.done[live.key] = live

    def collect(self, key: RequestKey) -> Live:
        """Hand over what was seen of a request and forget it; rows that it still computes are no longer recorded.

        Raises TableError for a key that this worker never served.
        """
        self.close()
        if key in self.done:
            return self.done.pop(key)
        request_id = self.alive.pop(key, None)
        live = None if request_id is None else self.live[request_id]
        if request_id is None or live is None:
            raise TableError(f"request key {key[0]!r} (child {key[1]}) was never served here")
        self.live[request_id] = None
        return live

    def forget(self, keys: set[str]) -> None:
        """Drop requests that were given up, wherever they are."""
        for key in [k for k in (*self.done, *self.alive) if k[0] in keys]:
            self.collect(key)

    def needs_tokens(self, request_id: str) -> bool:
        """Whether some selector of the request looks at token ids."""
        live = self.live[request_id]
        return live is not None and not live.compiled.by_position

    def step(
        self, ids: list[str], starts: Ints, counts: Ints, batch: Callable[[], Sequence[Scheduled]]
    ) -> tuple[StepPlan | None, int]:
        """The plan of the next step and its shift; ``ids``, ``starts`` and ``counts`` in the order of the batch.
        ``batch`` tells the rest where the last plan does not hold any more."""
        last, single = self._open, bool(len(counts)) and int(counts.max()) == 1
        self.number += 1
        if last is not None:
            if single and last.left > 0 and last.ids == ids and np.array_equal(starts, last.starts + last.shift + 1):
                last.left -= 1
                last.shift += 1
                return last.plan, last.shift
            self.close()
        plan, left = self._plan(batch())
        self._open = _Open(plan, list(ids), starts.copy(), left - 1 if single else 0)
        return plan, 0

    def close(self) -> None:
        """Write the steps of the open plan into its requests."""
        last, self._open = self._open, None
        if last is None or last.plan is None:
            return
        for fill in (*last.plan.edits, *last.plan.sampled_edits):
            for part in fill.parts:
                part.live.fired.setdefault(fill.name, []).extend(_ranges(part.positions, last.shift))
        for fill in (*last.plan.reads, *last.plan.sampled_reads):
            for part in fill.parts:
                part.live.taken[fill.name] = int(part.positions[-1]) + last.shift + 1

    def plan(self, batch: Sequence[Scheduled]) -> StepPlan | None:
        """The rows of one step that stands alone; None where it has nothing to do."""
        self.close()
        self.number += 1
        plan, _ = self._plan(batch)
        self._open = _Open(plan, [], np.empty(0, np.int64), 0)
        return plan

    @staticmethod
    def _pick(selection: Selection, share: Scheduled) -> tuple[Ints, Ints] | None:
        """The selected positions of a share and their rows."""
        positions = selection.select(share.start, share.tokens)
        return (positions, positions - share.start + share.offset) if len(positions) else None

    def _plan(self, batch: Sequence[Scheduled]) -> tuple[StepPlan | None, int]:
        """The plan, and how many steps of decoding it holds for."""
        edits: dict[str, list[_Entry]] = {}
        reads: dict[str, list[_Entry]] = {}
        metrics: dict[str, list[tuple[int, Live, int]]] = {}
        speakers: list[tuple[int, Live, int]] = []
        sampled_rows: dict[int, int] = {}
        left = OPEN
        for number, share in enumerate(batch):
            live = self.live[share.request_id]
            if live is None or live.compiled.idle:
                continue
            compiled, count = live.compiled, len(share.tokens)
            live.planned = (self.number, share.last)
            picks: list[tuple[Ints, Ints] | None]
            if count == 1 and compiled.by_position:
                at = share.start
                here = (np.array([at], np.int64), np.array([share.offset], np.int64))
                picks = [here if s.holds(at) else None for s in compiled.selections]
                left = min([left, *(s.until(at) - at for s in compiled.selections)])
            else:
                picks = [self._pick(s, share) for s in compiled.selections]
                left = 1
            for edit, which in compiled.edits:
                if (pick := picks[which]) is not None:
                    point = self.program.uses_of[edit.edit][edit]
                    edits.setdefault(edit.edit, []).append(_Entry(live, *pick, point))
            for read, which in compiled.reads:
                if (pick := picks[which]) is not None:
                    taken = live.taken.get(read, 0)
                    if pick[0][0] < taken:
                        # The next step's rows are new ones.
                        left, new = 1, pick[0] >= taken
                        pick = (pick[0][new], pick[1][new])
                    if len(pick[0]):
                        reads.setdefault(read, []).append(_Entry(live, *pick))
            if not share.sampled or share.last < live.prompt - 1:
                left = 1
                continue
            sampled_rows[share.offset + count - 1] = number
            for metric, which in compiled.metrics:
                if (pick := picks[which]) is not None and pick[0][-1] == share.last:
                    metrics.setdefault(metric, []).append((number, live, share.last))
            if compiled.overrides:
                speakers.append((number, live, share.last - live.prompt + 1))
        if not (edits or reads or metrics or speakers):
            return None, left
        fills: dict[bool, tuple[list[Fill], list[Fill]]] = {False: ([], []), True: ([], [])}
        for kind, table, entries in ((0, self._edit_sites, edits), (1, self._read_sites, reads)):
            for name, found in entries.items():
                for sampled, sites in enumerate(table[name]):
                    mine = _sampled_only(found, sampled_rows) if sampled and sites else found
                    if sites and mine:
                        fills[bool(sampled)][kind].append(_fill(name, sites, mine, edit=kind == 0))
        plan = StepPlan(
            total=sum(len(share.tokens) for share in batch),
            edits=tuple(fills[False][0]),
            reads=tuple(fills[False][1]),
            sampled_edits=tuple(fills[True][0]),
            sampled_reads=tuple(fills[True][1]),
            metrics=tuple(
                MetricFill(
                    name, np.array([n for n, _, _ in found]), tuple(f[1] for f in found), tuple(f[2] for f in found)
                )
                for name, found in metrics.items()
            ),
            speakers=tuple(speakers),
        )
        return plan, left


def _sampled_only(entries: list[_Entry], sampled_rows: Mapping[int, int]) -> list[_Entry]:
    """The entries at the rows that are sampled, where a row is the request's number in the batch."""
    kept = []
    for e in entries:
        is_sampled = np.array([int(r) in sampled_rows for r in e.rows], bool)
        if is_sampled.any():
            rows = np.array([sampled_rows[int(r)] for r in e.rows[is_sampled]], np.int64)
            kept.append(_Entry(e.live, e.positions[is_sampled], rows, e.point))
    return kept


def _fill(name: str, sites: tuple[str, ...], entries: list[_Entry], *, edit: bool) -> Fill:
    rows = np.concatenate([e.rows for e in entries]) if len(entries) > 1 else entries[0].rows
    if len(rows) > 1 and not np.all(np.diff(rows) > 0):
        raise TableError(f"{name}: the rows of a step are not sorted and unique")
    parts, start = [], 0
    for e in entries:
        parts.append(Part(e.live, e.positions, start, start + len(e.rows)))
        start += len(e.rows)
    points = None
    if edit:
        points = np.repeat(np.array([e.point for e in entries], np.int32), [len(e.rows) for e in entries])
    return Fill(name, sites, rows, tuple(parts), points)


def _ranges(positions: Ints, shift: int) -> list[Interval]:
    """The half-open ranges of positions of a plan that was used ``shift`` times more, one position further each."""
    if shift:
        return [(int(positions[0]), int(positions[0]) + shift + 1)]
    return to_ranges(positions)

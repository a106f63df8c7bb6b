"""Which rows of a step each edit, read, metric and override acts on: numpy alone, no vLLM and no torch.

Rows are chosen by absolute position and the true prompt length, so neither chunked prefill nor a repetition after
preemption moves them.  Each distinct selector of a request is evaluated once a step, however many locations use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import Compiled, PointEdit, Program
from vtaps.spec.rows import Interval, to_ranges

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Chunk = tuple[Ints, Mapping[str, npt.NDArray[Any]]]
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

    ``chunks``: (read, sites) → (positions ``[n]``, field → ``[n, sites, …]``) of each step; ``counted``: the first
    position that each mean has not summed yet.
    """

    request_id: str
    key: RequestKey
    prompt: int
    compiled: Compiled
    fired: dict[str, list[Ints]] = field(default_factory=dict)
    chunks: dict[tuple[str, tuple[str, ...]], list[Chunk]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    overridden: set[int] = field(default_factory=set)

    def ranges_fired(self, stop: int) -> dict[str, tuple[Interval, ...]]:
        """Edit → half-open ranges of the positions below ``stop`` at which it acted."""
        out: dict[str, tuple[Interval, ...]] = {}
        for name, found in self.fired.items():
            positions = np.unique(np.concatenate(found))
            out[name] = tuple(to_ranges(positions[positions < stop]))
        return out


@dataclass(frozen=True)
class Part:
    """Rows ``start … stop−1`` of a fill belong to one request, at these positions."""

    live: Live
    positions: Ints
    start: int
    stop: int


@dataclass(frozen=True)
class Fill:
    """The rows of one step for one edit or read at ``sites``, in batch order.  ``coefficient`` and ``vector`` are
    one value for all rows, or an array ``[n]``; ``segments`` are what a mean sums."""

    name: str
    sites: tuple[str, ...]
    rows: Ints
    parts: tuple[Part, ...]
    coefficient: float | Floats = 1.0
    vector: int | Ints = 0
    segments: tuple[Interval, ...] = ()

    @property
    def span(self) -> slice | None:
        """The rows as a slice, where they are neighbours."""
        first, last = int(self.rows[0]), int(self.rows[-1])
        return slice(first, last + 1) if last - first + 1 == len(self.rows) else None


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
    total: int
    edits: tuple[Fill, ...]
    reads: tuple[Fill, ...]
    metrics: tuple[MetricFill, ...]
    replacements: tuple[Replacement, ...]


@dataclass
class _Entry:
    live: Live
    positions: Ints
    rows: Ints
    edit: PointEdit | None = None


class RowTable:
    """The live requests of one worker, and the plan of each step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.live: dict[str, Live | None] = {}
        self.done: dict[RequestKey, Live] = {}
        self.alive: dict[RequestKey, str] = {}
        self._vector_index = {
            edit: {name: i for i, name in enumerate(names)} for edit, names in program.vectors_of.items()
        }
        self._any_sampled = any(s.sampled for s in program.sites.values())

    def admit(self, request_id: str, asked: Mapping[str, Any] | None, prompt: int) -> None:
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
        self.live[request_id] = Live(request_id, key, prompt, compiled)
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

    def plan(self, batch: Sequence[Scheduled]) -> StepPlan | None:
        """The step's rows; ``batch`` in the order of the rows.  None where the step has nothing to do."""
        edits: dict[str, list[_Entry]] = {}
        reads: dict[str, list[_Entry]] = {}
        metrics: dict[str, list[tuple[int, Live, int]]] = {}
        replacements: list[Replacement] = []
        sampled_rows: dict[int, int] = {}
        for number, share in enumerate(batch):
            live = self.live[share.request_id]
            if live is None or live.compiled.idle:
                continue
            compiled = live.compiled
            chosen = [s.select(share.start, share.tokens) for s in compiled.selections]
            for edit, which in compiled.edits:
                if len(chosen[which]):
                    rows = chosen[which] - share.start + share.offset
                    edits.setdefault(edit.edit, []).append(_Entry(live, chosen[which], rows, edit))
            for read, which in compiled.reads:
                positions = chosen[which]
                if len(positions) and self.program.reads[read].kind == "mean":
                    positions = positions[positions >= live.counted.get(read, 0)]
                if len(positions):
                    rows = positions - share.start + share.offset
                    reads.setdefault(read, []).append(_Entry(live, positions, rows))
            if not share.sampled or share.last < live.prompt - 1:
                continue
            sampled_rows[share.offset + len(share.tokens) - 1] = number
            for metric, which in compiled.metrics:
                if len(chosen[which]) and chosen[which][-1] == share.last:
                    metrics.setdefault(metric, []).append((number, live, share.last))
            step = share.last - live.prompt + 1
            for start, ids in compiled.overrides:
                if 0 <= step - start < len(ids):
                    replacements.append(Replacement(number, ids[step - start], step, live))
        if not (edits or reads or metrics or replacements):
            return None
        fills = [f for name, entries in edits.items() for f in self._edit_fills(name, entries, sampled_rows)]
        taken = [f for name, entries in reads.items() for f in self._read_fills(name, entries, sampled_rows)]
        return StepPlan(
            total=sum(len(share.tokens) for share in batch),
            edits=tuple(fills),
            reads=tuple(taken),
            metrics=tuple(
                MetricFill(
                    name, np.array([n for n, _, _ in found]), tuple(f[1] for f in found), tuple(f[2] for f in found)
                )
                for name, found in metrics.items()
            ),
            replacements=tuple(replacements),
        )

    def _edit_fills(self, name: str, entries: list[_Entry], sampled_rows: dict[int, int]) -> list[Fill]:
        fills: list[Fill] = []
        for sites, chosen in _by_sites(entries):
            for some, kept in self._by_axis(sites, chosen, sampled_rows):
                uses = [e.edit for e in kept if e.edit is not None]
                index = self._vector_index[name]
                lengths = [len(e.rows) for e in kept]
                coefficients = [1.0 if u.coefficient is None else float(u.coefficient) for u in uses]
                vectors = [0 if u.vector is None else index[u.vector] for u in uses]
                rows, parts = _concatenate(name, kept)
                fills.append(
                    Fill(
                        name,
                        some,
                        rows,
                        parts,
                        coefficient=coefficients[0]
                        if len(set(coefficients)) == 1
                        else np.repeat(np.array(coefficients, np.float32), lengths),
                        vector=vectors[0]
                        if len(set(vectors)) == 1
                        else np.repeat(np.array(vectors, np.int64), lengths),
                    )
                )
        return fills

    def _read_fills(self, name: str, entries: list[_Entry], sampled_rows: dict[int, int]) -> list[Fill]:
        entry = self.program.reads[name]
        fills: list[Fill] = []
        for sites, kept in self._by_axis(entry.sites, entries, sampled_rows):
            rows, parts = _concatenate(name, kept)
            segments = _segments(parts) if entry.kind == "mean" else ()
            fills.append(Fill(name, sites, rows, parts, segments=segments))
        return fills

    def _by_axis(
        self, sites: tuple[str, ...], entries: list[_Entry], sampled_rows: dict[int, int]
    ) -> list[tuple[tuple[str, ...], list[_Entry]]]:
        """Split off the locations whose tensors have one row a request: there a row is the request's number."""
        if not self._any_sampled:
            return [(sites, entries)]
        table = self.program.sites
        out = []
        if full := tuple(s for s in sites if not table[s].sampled):
            out.append((full, entries))
        if narrow := tuple(s for s in sites if table[s].sampled):
            kept = []
            for e in entries:
                is_sampled = np.array([int(r) in sampled_rows for r in e.rows], bool)
                if is_sampled.any():
                    rows = np.array([sampled_rows[int(r)] for r in e.rows[is_sampled]], np.int64)
                    kept.append(_Entry(e.live, e.positions[is_sampled], rows, e.edit))
            if kept:
                out.append((narrow, kept))
        return out


def _by_sites(entries: list[_Entry]) -> list[tuple[tuple[str, ...], list[_Entry]]]:
    """Group the sites by which requests are edited there: one group unless sweep points differ in their sites."""
    first = entries[0].edit
    if first is not None and all(e.edit is not None and e.edit.sites == first.sites for e in entries):
        return [(first.sites, entries)]
    members: dict[str, list[int]] = {}
    for number, e in enumerate(entries):
        for site in e.edit.sites if e.edit is not None else ():
            members.setdefault(site, []).append(number)
    groups: dict[tuple[int, ...], list[str]] = {}
    for site, numbers in members.items():
        groups.setdefault(tuple(numbers), []).append(site)
    return [(tuple(sites), [entries[n] for n in numbers]) for numbers, sites in groups.items()]


def _concatenate(name: str, entries: list[_Entry]) -> tuple[Ints, tuple[Part, ...]]:
    rows = np.concatenate([e.rows for e in entries]) if len(entries) > 1 else entries[0].rows
    if len(rows) > 1 and not np.all(np.diff(rows) > 0):
        raise TableError(f"{name}: the rows of a step are not sorted and unique")
    parts, start = [], 0
    for e in entries:
        parts.append(Part(e.live, e.positions, start, start + len(e.rows)))
        start += len(e.rows)
    return rows, tuple(parts)


def _segments(parts: Sequence[Part]) -> tuple[Interval, ...]:
    """A request's prompt rows are summed at once; each generated row stays alone until it is known to have counted."""
    segments: list[Interval] = []
    for part in parts:
        split = part.start + int(np.count_nonzero(part.positions < part.live.prompt))
        if split > part.start:
            segments.append((part.start, split))
        segments.extend((row, row + 1) for row in range(split, part.stop))
    return tuple(segments)

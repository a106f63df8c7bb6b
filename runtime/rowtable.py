"""The requests of one worker, step by step: which rows each edit, read, metric and override acts on.

Rows are chosen by absolute position and the true prompt length, so neither chunked prefill nor a repetition after
preemption moves them.  A step of decoding that differs from the last one only in that every request is one position
further costs no planning: the last plan is used again with its ``shift`` counted up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtaps.runtime.faults import PLANNED, Fault, in_words
from vtaps.runtime.fills import Fill, Found, MetricFill, Selected, StepPlan, by_live, ranges
from vtaps.runtime.live import (
    Batch,
    Chosen,
    Ints,
    Live,
    Places,
    RequestKey,
    Scheduled,
    Span,
    TableError,
    choose,
)
from vtaps.runtime.patch_rows import patches_of
from vtaps.runtime.program import LockError, Program
from vtaps.spec.rows import OPEN, Interval


@dataclass
class _Seats:
    """The numbers, from 1, that the live requests of one gate have; what is free is given again."""

    free: list[int] = field(default_factory=list)
    most: int = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.most += 1
        return self.most


@dataclass
class _Open:
    """The plan of the last step, while steps like it may follow: ``left`` more of them select the same rows, each
    with the ``next`` positions."""

    plan: StepPlan | None
    ids: list[str]
    next: Ints
    left: int
    span: Span
    shift: int = 0


class RowTable:
    """The live requests of one worker, and the plan of each step; ``number`` counts the steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.live: dict[str, Live | None] = {}
        self.done: dict[RequestKey, Live] = {}
        self.alive: dict[RequestKey, str] = {}
        self.failing: dict[str, tuple[Fault, int | None]] = {}
        """What has failed and nobody was told of: request id → why, and ``since`` as in :meth:`fail`."""
        self.number = 0
        self._open: _Open | None = None
        self._seats = {name: _Seats() for name, gate in program.gates.items() if gate.reduce is not None}
        self._put = frozenset(name for name, edit in program.edits.items() if edit.verb == "put")
        sites = program.sites

        def split(names: Sequence[str], sampled: bool) -> tuple[str, ...]:
            return tuple(s for s in names if sites[s].sampled == sampled)

        self._edit_sites = {n: (split(e.sites, False), split(e.sites, True)) for n, e in program.edits.items()}
        self._read_sites = {n: (split(r.sites, False), split(r.sites, True)) for n, r in program.reads.items()}

    def admit(self, request_id: str, asked: Mapping[str, Any] | None, prompt: int, end: int = OPEN) -> None:
        """Take a request in at its first step; ``asked`` is its ``extra_args["vtaps"]``, None for a plain one.

        Raises TableError for a key that is alive, LockError for what the lock does not know, or a row that is to be set
        from one that is not there.
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
        patches = patches_of(asked)
        self.live[request_id] = Live(request_id, key, prompt, compiled, end, patches=patches)
        self.alive[key] = request_id

    def refuse(self, request_id: str, fault: Fault) -> None:
        """A request that cannot be taken in: it is computed as a plain one until its driver hears of it."""
        self.live[request_id] = None
        self.failing[request_id] = (fault, 0)

    def lose(self, lives: Iterable[Live], error: Exception, starts: Mapping[str, int]) -> None:
        """Requests that cannot be planned have failed, from where the step starts on; raises what is the device's."""
        told = in_words(error, TableError, LockError)
        for live in lives:
            self.fail(live, Fault(PLANNED, told), starts[live.request_id])

    def fail(self, live: Live, fault: Fault, since: int | None = None) -> None:
        """No step is planned for the request any more, and collecting it tells the fault; of several the first counts.

        ``since``: the first position whose rows were not edited as they should have been; None where all were.
        """
        if live.fault is not None:
            return
        live.fault = fault
        if self._open is not None:
            self._open.left = 0  # what was planned for it is not used again
        if live.request_id in self.live:
            self.live[live.request_id] = None
            self.failing[live.request_id] = (fault, since)
        if self.alive.get(live.key) == live.request_id:
            del self.alive[live.key]
            self.done[live.key] = live
            self._leave(live)

    def finish(self, request_id: str) -> None:
        """The scheduler is done with a request: its record stays until it is collected."""
        live = self.live.pop(request_id, None)
        self.failing.pop(request_id, None)
        if live is not None and self.alive.get(live.key) == request_id:
            del self.alive[live.key]
            self.done[live.key] = live
            self._leave(live)

    def _leave(self, live: Live) -> None:
        """It is planned no more.  Whoever gets its seats decides anew, after all of its steps."""
        for gate, seat in live.seats.items():
            self._seats[gate].free.append(seat)
        live.seats.clear()

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
        self._leave(live)
        return live

    def forget(self, keys: set[str]) -> None:
        """Drop requests that were given up, wherever they are."""
        for key in [k for k in (*self.done, *self.alive) if k[0] in keys]:
            self.collect(key)

    def needs_tokens(self, request_id: str) -> bool:
        """Whether some selector of the request looks at token ids."""
        live = self.live[request_id]
        return live is not None and not live.compiled.by_position

    def step(self, batch: Batch) -> tuple[StepPlan | None, int]:
        """The plan of the next step and its shift."""
        last, single = self._open, bool(len(batch.counts)) and int(batch.counts.max()) == 1
        self.number += 1
        if last is not None:
            if single and last.left > 0 and last.ids == batch.ids and bool((batch.starts == last.next).all()):
                last.left -= 1
                last.shift += 1
                last.next += 1
                last.span.last = self.number
                return last.plan, last.shift
            self.close()
        span = Span(self.number)
        plan, left = self._plan(batch, span)
        self._open = _Open(plan, list(batch.ids), batch.starts + 1, left - 1 if single else 0, span)
        return plan, 0

    def close(self) -> None:
        """Write the steps of the open plan into its requests."""
        last, self._open = self._open, None
        if last is None or last.plan is None:
            return
        shift = last.shift
        for fill in (*last.plan.edits, *last.plan.sampled_edits):
            for live, found in by_live(fill):
                live.fired.setdefault(fill.name, []).extend(ranges(found, shift))
        for fill in (*last.plan.reads, *last.plan.sampled_reads):
            key = (fill.name, fill.sampled)
            for live, found in by_live(fill):
                if (places := live.places.get(key)) is None:
                    places = live.places[key] = Places()
                if isinstance(found, int):
                    live.taken[fill.name] = stop = found + shift + 1
                    places.add(found, stop)
                else:
                    live.taken[fill.name] = int(found[-1]) + 1
                    places.extend(found)

    def plan(self, batch: Sequence[Scheduled]) -> StepPlan | None:
        """The rows of one step that stands alone; None where it has nothing to do."""
        self.close()
        self.number += 1
        span = Span(self.number)
        plan, _ = self._plan(Batch.of(batch), span)
        self._open = _Open(plan, [], np.empty(0, np.int64), 0, span)
        return plan

    def _plan(self, batch: Batch, span: Span) -> tuple[StepPlan | None, int]:
        """The plan, and how many steps of decoding it holds for."""
        # Many requests are alike: same selectors, same positions.
        alike: dict[tuple[int, int], tuple[Interval, Chosen]] = {}
        picked: dict[tuple[int, int, int], list[Ints]] = {}
        selected = Selected()
        edits, reads = selected.edits, selected.reads
        sampled_rows: dict[int, int] = {}
        left = OPEN
        for number, (request_id, start, count, offset, sampled) in enumerate(
            zip(
                batch.ids,
                batch.starts.tolist(),
                batch.counts.tolist(),
                batch.offsets.tolist(),
                batch.sampled.tolist(),
                strict=True,
            )
        ):
            live = self.live[request_id]
            if live is None:
                continue
            try:
                compiled = live.compiled
                if skipped := live.starts(start, self.number):
                    self._check_skipped(live, skipped)
                last = start + count - 1
                live.planned, live.span = (self.number, last), span
                if compiled.idle:
                    continue
                if count == 1 and compiled.by_position:
                    if not live.calm[0] <= start < live.calm[1]:
                        which = (id(compiled), start)
                        if which not in alike:
                            alike[which] = choose(compiled, start, self.program.uses_of)
                        live.calm, live.chosen = alike[which]
                    left = min(left, live.calm[1] - start)
                    chosen = live.chosen
                    if chosen.edits and not self._put.isdisjoint(e for e, _ in chosen.edits):
                        left = 1  # the next row is in another slot
                    for edit, point in chosen.edits:
                        edits.setdefault(edit, Found()).add(live, start, offset, 1, point)
                    for read in chosen.reads:
                        if start < live.taken.get(read, 0):
                            # The next step's rows are new ones.
                            left = 1
                        else:
                            if read not in reads:
                                reads[read] = Found()
                            reads[read].add(live, start, offset, 1)
                    measured: Sequence[str] = chosen.metrics
                else:
                    left = 1
                    if compiled.by_position:
                        share = (id(compiled), start, count)
                        if share not in picked:
                            picked[share] = [s.select(start, np.empty(count, np.int64)) for s in compiled.selections]
                        picks = picked[share]
                    else:
                        # Asking for tokens may wait for the device.
                        tokens = batch.tokens(number)
                        picks = [s.select(start, tokens) for s in compiled.selections]
                    measured = self._rows(live, picks, last, offset - start, edits, reads)
                if not sampled or last < live.prompt - 1:
                    left = 1
                    continue
                sampled_rows[offset + count - 1] = number
                for metric in measured:
                    selected.metrics.setdefault(metric, []).append((number, live, last))
                if live.compiled.overrides:
                    selected.speakers.append((number, live, last - live.prompt + 1))
            except Exception as error:
                self.lose([live], error, {request_id: start})
                selected.drop_failed()
                left = 1
        total = int(batch.counts.sum())
        while selected:
            try:
                return self._filled(selected, sampled_rows, total), left
            except TableError as error:
                if not error.lives:
                    raise
                self.lose(error.lives, error, dict(zip(batch.ids, batch.starts.tolist(), strict=True)))
                selected.drop_failed()
                left = 1
        return None, left

    def _filled(self, selected: Selected, sampled_rows: Mapping[int, int], total: int) -> StepPlan:
        """Raises TableError."""
        for gate, seats in self._seats.items():
            for live in selected.reads[gate].lives if gate in selected.reads else ():
                if gate not in live.seats:
                    live.seats[gate] = seats.take()
        fills: dict[bool, tuple[list[Fill], list[Fill]]] = {False: ([], []), True: ([], [])}
        kinds = ((self._edit_sites, selected.edits), (self._read_sites, selected.reads))
        for kind, (table, entries) in enumerate(kinds):
            for name, found in entries.items():
                for sampled, sites in zip((False, True), table[name], strict=True):
                    mine = found.at_samples(sampled_rows) if sampled and sites else found
                    if sites and mine.lives:
                        put = kind == 0 and name in self._put
                        fills[sampled][kind].append(mine.fill(name, sites, sampled, edit=kind == 0, put=put))
        return StepPlan(
            total=total,
            edits=tuple(fills[False][0]),
            reads=tuple(fills[False][1]),
            sampled_edits=tuple(fills[True][0]),
            sampled_reads=tuple(fills[True][1]),
            metrics=tuple(
                MetricFill(
                    name, np.array([n for n, _, _ in found]), tuple(f[1] for f in found), tuple(f[2] for f in found)
                )
                for name, found in selected.metrics.items()
            ),
            speakers=tuple(selected.speakers),
        )

    def _check_skipped(self, live: Live, skipped: Sequence[Interval]) -> None:
        """Raises TableError where a read needs a row that vLLM did not compute."""
        for read, which in live.compiled.reads:
            selection = live.compiled.selections[which]
            if not (self._read_sites[read][0] and selection.by_position):
                continue
            for a, b in skipped:
                if len(selection.within((a, b)).select(0, np.empty(b, np.int64))):
                    raise TableError(f"read {read}: the rows {a} … {b - 1} came from the prefix cache")

    def _rows(
        self,
        live: Live,
        picks: Sequence[Ints],
        last: int,
        shift: int,
        edits: dict[str, Found],
        reads: dict[str, Found],
    ) -> list[str]:
        """Add what each selector picked of the positions up to ``last``, which are in rows ``shift`` further; returns
        the metrics that select the last of them."""
        compiled = live.compiled
        for edit, which in compiled.edits:
            if len(found := picks[which]):
                point = self.program.uses_of[edit.edit][edit]
                edits.setdefault(edit.edit, Found()).add_all(live, found, shift, point)
        for read, which in compiled.reads:
            new = picks[which]
            if len(new) and new[0] < (taken := live.taken.get(read, 0)):
                new = new[new >= taken]
            if len(new):
                reads.setdefault(read, Found()).add_all(live, new, shift)
        return [m for m, which in compiled.metrics if len(picks[which]) and picks[which][-1] == last]

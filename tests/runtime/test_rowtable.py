"""The row table under schedules that vLLM can make: chunked prefill, many requests, preemption and repetition."""

# long because: one program of every kind of use stands behind all of its schedules
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

from tests.runtime import schedules as sch
from vtaps.runtime.fills import Fill, StepPlan
from vtaps.runtime.live import Batch, Scheduled, TableError
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.program import LockError, Program
from vtaps.runtime.rowtable import RowTable
from vtaps.spec.rows import OPEN

SITES = ("a", "b", "c")
WIDE = {"rows": "all"}
SAMPLING = {"rows": "sampling"}


def use(edit: str, *sites: str, coefficient: float = 1.0, vector: str | None = "v") -> dict[str, Any]:
    return {"edit": edit, "sites": list(sites), "coefficient": coefficient, "vector": vector}


def program(**more: Any) -> Program:
    lock: dict[str, Any] = {
        "lock": 1,
        "block": {"digest": "", "structure": ""},
        "sites": {
            **{s: {"module": s, "output": 0, "width": 4} for s in SITES},
            "logits": {"module": "l", "output": None, "width": 9, "rows": "sampled"},
        },
        "edits": {
            "push": {"verb": "add", "sites": list(SITES), "tokens": SAMPLING},
            "even": {"verb": "add", "sites": list(SITES), "tokens": {"rows": "all", "ids": [0, 2, 4]}},
        },
        "reads": {
            "all": {"kind": "rows", "sites": list(SITES), "tokens": WIDE},
            "some": {"kind": "rows", "sites": ["a"], "tokens": {"rows": "generated"}},
            "mean": {"kind": "mean", "sites": ["b"], "tokens": WIDE},
            "out": {"kind": "rows", "sites": ["logits"], "tokens": WIDE},
        },
        "overrides": {"say": {"ids": [7, 8]}},
        "metrics": {"m": {"kind": "rank", "ids": [1], "tokens": SAMPLING}},
        "vectors": {"v": {"random": {}}, "w": {"random": {}}},
        "arms": {
            "idle": {"points": [{}]},
            "pushed": {"points": [{"edits": [use("push", "a", "b")]}]},
            "read": {"reads": ["all", "some", "mean", "out"], "metrics": ["m"], "points": [{}]},
            "edit": {
                "reads": ["all"],
                "points": [
                    {"edits": [use("push", "a", "b"), use("even", *SITES)]},
                    {"edits": [use("push", "b", coefficient=3.0, vector="w")]},
                    {"edits": [], "overrides": [{"override": "say", "start": 1}]},
                ],
            },
        },
        **more,
    }
    return parse_program(lock, Path("."))


def share(request: str, start: int, count: int, offset: int, sampled: bool = True) -> Scheduled:
    return Scheduled(request, start, np.arange(start, start + count) % 5, offset, sampled)


def asked(key: str, arm: str, point: int = 0, child: int | None = None) -> dict[str, Any]:
    return {"key": key, "arm": arm, "point": point, **({} if child is None else {"child": child})}


def computed(table: RowTable, **upto: int) -> None:
    """Steps before the first one of a test have computed the rows of these requests below a position."""
    for request, position in upto.items():
        live = table.live[request]
        assert live is not None
        live.runs.append((0, position))


def uses(program: Program, fill: Fill) -> list[Any]:
    """Sites, coefficient and vector of the edit at each row."""
    assert fill.points is not None
    by_number = {number: use for use, number in program.uses_of[fill.name].items()}
    return [(u.sites, u.coefficient, u.vector) for u in (by_number[int(n)] for n in fill.points)]


def plan(table: RowTable, *batch: Scheduled) -> StepPlan:
    made = table.plan(batch)
    assert made is not None
    return made


def test_a_mixed_step() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k0", "read"), 4)
    table.admit("r1", None, 3)
    table.admit("r2", asked("k2", "edit", 0), 3)
    table.admit("r3", asked("k3", "edit", 1), 2)
    table.admit("r4", asked("k4", "edit", 2), 2)
    computed(table, r2=3, r3=2, r4=2)
    # r0 prefills its first three tokens; r1 is plain; the others decode their second generated token.
    made = plan(
        table, share("r0", 0, 3, 0, False), share("r1", 0, 3, 3), share("r2", 3, 1, 6), share("r3", 2, 1, 7),
        share("r4", 2, 1, 8),
    )  # fmt: skip
    assert made.total == 9
    # Row 6 holds token 3, which `even` does not select.
    [push] = made.edits
    assert (push.name, push.sites, push.rows.tolist()) == ("push", SITES, [6, 7])
    # The points differ in sites, coefficient and vector: each row says whose it is.
    assert uses(table.program, push) == [(("a", "b"), 1.0, "v"), (("b",), 3.0, "w")]
    reads = {fill.name: fill for fill in made.reads}
    assert reads["all"].rows.tolist() == [0, 1, 2, 6, 7, 8] and reads["all"].sites == SITES
    assert [(p.live.key[0], p.positions.tolist()) for p in reads["all"].parts] == [
        ("k0", [0, 1, 2]), ("k2", [3]), ("k3", [2]), ("k4", [2]),
    ]  # fmt: skip
    assert [(p.start, p.stop) for p in reads["all"].parts] == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert reads["mean"].rows.tolist() == [0, 1, 2]
    assert "some" not in reads
    # A chunk that is not the last samples nothing.
    assert made.metrics == () and made.sampled_reads == ()
    assert [(r.row, r.token, r.step) for r in made.replacements()] == [(4, 7, 1)]


def test_sampled_locations_count_requests() -> None:
    table = RowTable(program())
    table.admit("r0", None, 3)
    table.admit("r1", asked("k1", "read"), 2)
    made = plan(table, share("r0", 0, 3, 0), share("r1", 0, 2, 3))
    [out] = made.sampled_reads
    assert (out.name, out.sites) == ("out", ("logits",))
    assert out.rows.tolist() == [1] and out.parts[0].positions.tolist() == [1]
    assert made.metrics[0].rows.tolist() == [1] and made.metrics[0].positions == (1,)


def test_an_idle_step_has_no_plan() -> None:
    table = RowTable(program())
    table.admit("r0", None, 3)
    table.admit("r1", asked("k", "idle"), 3)
    assert table.plan([share("r0", 0, 3, 0), share("r1", 0, 3, 3)]) is None


def test_requests_of_a_batch_that_is_not_in_order_fail() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k0", "read"), 4)
    table.admit("r1", asked("k1", "read"), 4)
    assert table.plan([share("r0", 0, 4, 4), share("r1", 0, 4, 0)]) is None
    assert table.failing.keys() == {"r0", "r1"}
    assert all("not sorted and unique" in fault.message for fault, _ in table.failing.values())


def test_a_request_that_fails_leaves_the_plan_as_it_would_be_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it was planned before the fault, in each step."""

    def planned(names: Sequence[str], fails: str = "") -> list[Any]:
        table = RowTable(program())
        for name in names:
            n = "abc".index(name)
            table.admit(name, asked(name, "edit" if n % 2 else "pushed", n % 2), 4)
        rows = RowTable._rows

        def broken(self: RowTable, live: Any, *args: Any) -> Any:
            found = rows(self, live, *args)
            if live.key[0] == fails:
                raise IndexError("late")
            return found

        told = []
        with monkeypatch.context() as patch:
            patch.setattr(RowTable, "_rows", broken)
            for start, count in ((0, 4), (4, 1), (5, 1)):
                shares = [share(name, start, count, count * n) for n, name in enumerate("abc") if name in names]
                plan, shift = table.step(Batch.of(shares))
                assert plan is not None
                fills = (*plan.edits, *plan.reads, *plan.sampled_edits, *plan.sampled_reads)
                told.append([(f.name, f.rows.tolist(), f.positions.tolist(), f.bounds.tolist()) for f in fills])
                told[-1] += [(m.name, [live.key for live in m.lives]) for m in plan.metrics] + [shift]
        if fails:
            assert table.failing.keys() == {fails} and table.failing[fails][1] == 0
            assert table.collect((fails, 0)).fault is table.failing[fails][0]
        return told

    assert planned("abc", "b") == planned("ac") != planned("abc")


def test_keys_are_alive_once() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k", "idle", child=0), 3)
    table.admit("r1", asked("k", "idle", child=1), 3)
    with pytest.raises(TableError, match=r"'k' \(child 1\) is alive twice"):
        table.admit("r2", asked("k", "idle", child=1), 3)
    table.finish("r1")
    with pytest.raises(TableError, match="alive twice"):
        table.admit("r2", asked("k", "idle", child=1), 3)
    table.collect(("k", 1))
    table.admit("r2", asked("k", "idle", child=1), 3)
    with pytest.raises(TableError, match="never served"):
        table.collect(("other", 0))
    with pytest.raises(LockError, match="no such arm"):
        table.admit("r3", asked("z", "gone"), 3)
    table.forget({"k"})
    assert not table.alive and not table.done


def test_rows_after_collection_are_nobodys() -> None:
    """An engine that has run ahead of a stop computes a collected request once more."""
    table = RowTable(program())
    table.admit("r0", asked("k", "read"), 3)
    plan(table, share("r0", 0, 3, 0))
    table.collect(("k", 0))
    assert table.plan([share("r0", 3, 1, 0)]) is None
    table.finish("r0")
    assert not table.done


def decode(table: RowTable, starts: dict[str, int], count: int = 1) -> tuple[StepPlan | None, int, bool]:
    """``count`` tokens of each request: the plan, its shift, and whether it was made for this step."""
    batch = Batch.of([share(request, start, count, n * count) for n, (request, start) in enumerate(starts.items())])
    with mock.patch.object(table, "_plan", wraps=table._plan) as planned:
        made, shift = table.step(batch)
    # The runner's own, which it goes on to use.
    batch.ids[:], batch.starts[:], batch.counts[:] = [], -1, -1
    return made, shift, planned.called


def test_steady_decoding_is_planned_once() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k0", "read"), 2)
    table.admit("r1", asked("k1", "edit", 1), 4)
    table.admit("r2", None, 2)
    computed(table, r0=2, r1=13)
    first, shift, told = decode(table, {"r0": 2, "r1": 4})
    assert (shift, told) == (0, True)
    for n in (1, 2, 3):
        assert decode(table, {"r0": 2 + n, "r1": 4 + n}) == (first, n, False)
    # Not the same request, not one position further, not one row each, not the same requests.
    assert decode(table, {"r2": 6, "r1": 8})[1:] == (0, True)
    assert decode(table, {"r2": 7, "r1": 10})[1:] == (0, True)
    assert decode(table, {"r2": 8, "r1": 11}, count=2)[1:] == (0, True)
    assert decode(table, {"r1": 13})[1:] == (0, True)
    assert decode(table, {"r1": 14})[1:] == (1, False)
    live = table.collect(("k1", 0))
    assert live.ranges_fired(OPEN) == {"push": ((4, 9), (10, 15))} and live.taken == {"all": 15}
    assert [live.step_of(p) for p in (13, 14)] == [8, 9]
    # Nobody's rows: the plan is made anew, and holds nothing.
    assert decode(table, {"r1": 15}) == (None, 0, True)
    assert decode(table, {"r1": 16}) == (None, 1, False)


def test_a_plan_ends_where_a_selector_changes() -> None:
    reads = {"steps": {"kind": "rows", "sites": ["a"], "tokens": {"rows": "all", "steps": [[2, 4]]}}}
    arms = {"x": {"reads": ["steps"], "points": [{}]}}
    table = RowTable(program(reads=reads, arms=arms, edits={}, metrics={}))
    table.admit("r", asked("k", "x"), 3)
    plans = [decode(table, {"r": 2 + step}) for step in range(7)]
    # Generated steps 0 and 1 | 2, 3 and 4 | 5 and on.
    assert [told for *_, told in plans] == [True, False, True, False, False, True, False]
    assert [made is None for made, *_ in plans] == [True] * 2 + [False] * 3 + [True] * 2


def test_a_selector_of_tokens_is_asked_every_step() -> None:
    table = RowTable(program())
    table.admit("r", asked("k", "edit", 0), 2)
    computed(table, r=2)
    assert table.needs_tokens("r")
    told = [decode(table, {"r": 2 + n}) for n in range(5)]
    assert all(t for *_, t in told)
    assert table.collect(("k", 0)).ranges_fired(OPEN)["even"] == ((2, 3), (4, 6))


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_sampled_row_computed_again_does_not_end_its_reads(chunk: int) -> None:
    """A token that was under way at a preemption is not kept: its row is the last of the second prefill too."""
    table = RowTable(program())
    table.admit("r", asked("k", "read"), 2)
    table.plan([share("r", 0, 2, 0)])
    for position in (2, 3):
        decode(table, {"r": position})
    # Positions 0 … 3 again; 3 is sampled again.
    table.plan([share("r", 0, 4 - chunk, 0, sampled=False)])
    table.step(Batch.of([share("r", 4 - chunk, chunk, 0)]))
    for position in (4, 5):
        made, *_ = decode(table, {"r": position})
        assert made is not None and {f.name for f in made.reads} == {"all", "some", "mean"}
    assert table.collect(("k", 0)).taken["all"] == 6


# Schedules at random, against rows one by one.

ARMS: dict[str, Any] = {
    "plain": {"points": [{}]},
    "idle": {"points": [{}]},
    "read": {
        "reads": ["all", "generated", "steps", "out", "both"], "metrics": ["m sampling", "m steps"], "points": [{}],
    },
    "tokens": {"reads": ["all", "even"], "metrics": ["m even"], "points": [{"edits": [use("even", "a", "logits")]}]},
    "edit": {
        "reads": ["all", "but"],
        "metrics": ["m but"],
        "points": [
            {"edits": [use("push", "a", "b"), use("steps", "c"), use("top", "logits", coefficient=0.5)]},
            {"edits": [use("push", "b", coefficient=3.0, vector="w")],
             "overrides": [{"override": "say", "start": sch.SAY_AT}]},
        ],
    },
    "say": {
        "reads": ["after"],
        "points": [{"edits": [use("after", "a")], "overrides": [{"override": "say", "start": sch.SAY_AT}]}],
    },
}  # fmt: skip
EDITS = {
    "push": ("generated", SITES), "steps": ("steps", ["c"]), "even": ("even", ["a", "logits"]),
    "top": ("but", ["logits"]), "after": ("after", ["a"]),
}  # fmt: skip
READS = {
    "all": ("all", SITES), "generated": ("generated", ["a"]), "steps": ("steps", ["b"]), "but": ("but", ["a"]),
    "even": ("even", ["b"]), "after": ("after", ["c"]), "out": ("all", ["logits"]), "both": ("ends", ["a", "logits"]),
}  # fmt: skip
METRICS = ("sampling", "steps", "but", "even")
AXES = (False, True)


def random_program() -> Program:
    return program(
        edits={n: {"verb": "add", "sites": list(s), "tokens": sch.tokens(t)} for n, (t, s) in EDITS.items()},
        reads={n: {"kind": "rows", "sites": list(s), "tokens": sch.tokens(t)} for n, (t, s) in READS.items()},
        metrics={f"m {t}": {"kind": "rank", "ids": [1], "tokens": sch.tokens(t)} for t in METRICS},
        overrides={"say": {"ids": list(sch.SAY)}},
        arms={name: arm for name, arm in ARMS.items() if name != "plain"},
    )


def on_axis(sites: Any, sampled: bool) -> tuple[str, ...]:
    return tuple(s for s in sites if (s == "logits") == sampled)


class OneByOne:
    """What the rows of each step are, with no plan and no memory but of what was taken."""

    def __init__(self, asks: list[sch.Ask]) -> None:
        self.asks = asks
        self.taken: dict[int, dict[str, list[int]]] = {i: {} for i in range(len(asks))}
        self.fired: dict[int, dict[str, set[int]]] = {i: {} for i in range(len(asks))}
        self.computed: dict[int, dict[int, int]] = {i: {} for i in range(len(asks))}
        self.collected: set[int] = set()
        self.number = 0

    def step(self, shares: tuple[sch.Share, ...]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {"edits": [], "reads": [], "metrics": [], "replacements": []}
        self.number += 1
        row = 0
        for number, share in enumerate(shares):
            for position in range(share.start, share.start + share.count):
                last = share.sampled and position == share.start + share.count - 1
                if share.request not in self.collected:
                    self.computed[share.request].setdefault(position, self.number)
                    self._row(out, share.request, position, row, number if last else None)
                row += 1
        return {name: sorted(found) for name, found in out.items()}

    def _row(self, out: dict[str, list[Any]], i: int, position: int, row: int, sampled: int | None) -> None:
        ask = self.asks[i]
        arm = ARMS[ask.arm]
        point = arm["points"][ask.point]
        rows = ((False, row), (True, sampled))
        for chosen in point.get("edits", ()):
            selector, sites = EDITS[chosen["edit"]]
            if sch.holds(selector, ask, i, position):
                what = (tuple(chosen["sites"]), chosen["coefficient"], chosen["vector"])
                for axis, place in rows:
                    if place is not None and on_axis(sites, axis):
                        out["edits"].append((chosen["edit"], axis, place, f"k{i}", position, what))
                        self.fired[i].setdefault(chosen["edit"], set()).add(position)
        for read in arm.get("reads", ()):
            selector, sites = READS[read]
            if sch.holds(selector, ask, i, position) and position not in self.taken[i].setdefault(read, []):
                for axis, place in rows:
                    if place is not None and on_axis(sites, axis):
                        out["reads"].append((read, axis, place, f"k{i}", position))
                        if position not in self.taken[i][read]:
                            self.taken[i][read].append(position)
        if sampled is None:
            return
        for metric in arm.get("metrics", ()):
            if sch.holds(metric.removeprefix("m "), ask, i, position):
                out["metrics"].append((metric, sampled, f"k{i}", position))
        step = position - ask.prompt + 1
        if point.get("overrides") and sch.SAY_AT <= step < sch.SAY_AT + len(sch.SAY):
            out["replacements"].append((sampled, sch.SAY[step - sch.SAY_AT], step, f"k{i}"))


def told(made: StepPlan | None, shift: int, program: Program) -> dict[str, list[Any]]:
    """A plan as the rows of its step."""
    out: dict[str, list[Any]] = {"edits": [], "reads": [], "metrics": [], "replacements": []}
    if made is None:
        return out
    for kind, table, axes in (
        ("edits", EDITS, (made.edits, made.sampled_edits)), ("reads", READS, (made.reads, made.sampled_reads)),
    ):  # fmt: skip
        for sampled, fills in zip(AXES, axes, strict=True):
            for fill in fills:
                assert fill.sites == on_axis(table[fill.name][1], sampled)
                assert np.all(np.diff(fill.rows) > 0)
                assert [p.start for p in fill.parts] + [len(fill.rows)] == [0, *(p.stop for p in fill.parts)]
                owners = [(p.live.key[0], int(at) + shift) for p in fill.parts for at in p.positions]
                what = [(w,) for w in uses(program, fill)] if kind == "edits" else [()] * len(owners)
                out[kind] += [
                    (fill.name, sampled, int(row), key, position, *w)
                    for row, (key, position), w in zip(fill.rows, owners, what, strict=True)
                ]
    for metric in made.metrics:
        out["metrics"] += [
            (metric.name, int(row), live.key[0], position + shift)
            for row, live, position in zip(metric.rows, metric.lives, metric.positions, strict=True)
        ]
    out["replacements"] = [(r.row, r.token, r.step, r.live.key[0]) for r in made.replacements(shift)]
    return {name: sorted(found) for name, found in out.items()}


def as_ranges(positions: set[int], stop: int) -> tuple[tuple[int, int], ...]:
    kept = {p for p in positions if p < stop}
    starts = sorted(p for p in kept if p - 1 not in kept)
    return tuple((a, next(b for b in range(a, stop + 1) if b not in kept)) for a in starts)


@settings(max_examples=300, deadline=None)
@given(sch.schedules({name: len(arm["points"]) for name, arm in ARMS.items()}))
def test_every_step_is_its_rows_one_by_one(case: sch.Schedule) -> None:
    asks, events = case
    table, naive = RowTable(random_program()), OneByOne(asks)
    runner = sch.Runner(asks, table)
    for event in events:
        match event:
            case sch.Step(shares):
                with runner.step(shares) as batch:
                    made, shift = table.step(batch)
                assert told(made, shift, table.program) == naive.step(shares)
            case sch.Dummy():
                table.close()
            case sch.Finish(i):
                table.finish(f"r{i}")
            case sch.Collect(i) if asks[i].arm != "plain":
                ask, live = asks[i], table.collect((f"k{i}", 0))
                naive.collected.add(i)
                for stop in (ask.stop, OPEN):
                    expected = {name: as_ranges(found, min(stop, 99)) for name, found in naive.fired[i].items()}
                    assert live.ranges_fired(stop) == expected
                assert live.taken == {name: found[-1] + 1 for name, found in naive.taken[i].items() if found}
                for name, found in naive.taken[i].items():
                    wanted = [p for p in range(ask.stop) if sch.holds(READS[name][0], ask, i, p)]
                    if name == "out":
                        wanted = [p for p in wanted if p >= ask.prompt - 1]
                    assert [p for p in found if p < ask.stop] == wanted
                if ask.arm != "idle":
                    assert all(live.step_of(p) >= number for p, number in naive.computed[i].items())
    assert not table.done and not table.alive and not table.live


def test_rows_from_the_prefix_cache_are_counted_and_never_missing_from_a_read() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k0", "edit", 1), 8)
    table.admit("r1", asked("k1", "idle"), 8)
    table.plan([share("r0", 4, 4, 0), share("r1", 0, 1, 4)])
    assert table.failing.keys() == {"r0"}
    assert table.failing["r0"][0].message == "read all: the rows 0 … 3 came from the prefix cache"
    table = RowTable(program())
    table.admit("r0", asked("k0", "pushed"), 8)
    table.admit("r1", asked("k1", "idle"), 8)
    table.plan([share("r0", 4, 2, 0, False), share("r1", 4, 4, 2)])
    # Preempted in its prompt: by now another request has left more of it in the cache.
    table.plan([share("r0", 7, 1, 0), share("r1", 8, 1, 1)])
    for n in (8, 9, 10):
        decode(table, {"r0": n, "r1": n + 1})
    # Preempted again: what it takes up was computed by itself, and what the cache had lost it computes.
    table.plan([share("r0", 2, 1, 0, False), share("r1", 8, 4, 1)])
    table.plan([share("r0", 9, 2, 0)])
    table.plan([share("r0", 11, 1, 0)])
    assert table.collect(("k0", 0)).cached() == [(0, 2), (3, 4), (6, 7)]
    assert table.collect(("k1", 0)).cached() == [(0, 4)]

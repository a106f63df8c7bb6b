"""The row table under schedules that vLLM can make: chunked prefill, many requests, preemption and repetition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtaps.runtime.program import LockError, Program, parse_program
from vtaps.runtime.rowtable import RowTable, Scheduled, StepPlan, TableError

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
    # r0 prefills its first three tokens; r1 is plain; the others decode their second generated token.
    made = plan(
        table, share("r0", 0, 3, 0, False), share("r1", 0, 3, 3), share("r2", 3, 1, 6), share("r3", 2, 1, 7),
        share("r4", 2, 1, 8),
    )  # fmt: skip
    assert made.total == 9
    push = {fill.sites: fill for fill in made.edits if fill.name == "push"}
    # The points differ in their sites: `a` has one request, `b` two with their own coefficients and vectors.
    assert set(push) == {("a",), ("b",)}
    assert push["a",].rows.tolist() == [6] and push["a",].coefficient == 1.0 and push["a",].vector == 0
    assert push["b",].rows.tolist() == [6, 7]
    assert np.asarray(push["b",].coefficient).tolist() == [1.0, 3.0]
    assert np.asarray(push["b",].vector).tolist() == [0, 1]
    # Row 6 holds token 3, which `even` does not select.
    assert not [f for f in made.edits if f.name == "even"]
    reads = {fill.name: fill for fill in made.reads}
    assert reads["all"].rows.tolist() == [0, 1, 2, 6, 7, 8] and reads["all"].sites == SITES
    assert [(p.live.key[0], p.positions.tolist()) for p in reads["all"].parts] == [
        ("k0", [0, 1, 2]), ("k2", [3]), ("k3", [2]), ("k4", [2]),
    ]  # fmt: skip
    assert reads["mean"].segments == ((0, 3),)
    assert "some" not in reads and "out" not in reads
    # A chunk that is not the last samples nothing.
    assert made.metrics == ()
    assert [(r.row, r.token, r.step) for r in made.replacements] == [(4, 7, 1)]


def test_sampled_locations_count_requests() -> None:
    table = RowTable(program())
    table.admit("r0", None, 3)
    table.admit("r1", asked("k1", "read"), 2)
    made = plan(table, share("r0", 0, 3, 0), share("r1", 0, 2, 3))
    out = next(f for f in made.reads if f.name == "out")
    assert out.rows.tolist() == [1] and out.parts[0].positions.tolist() == [1]
    assert made.metrics[0].rows.tolist() == [1] and made.metrics[0].positions == (1,)


def test_an_idle_step_has_no_plan() -> None:
    table = RowTable(program())
    table.admit("r0", None, 3)
    table.admit("r1", asked("k", "idle"), 3)
    assert table.plan([share("r0", 0, 3, 0), share("r1", 0, 3, 3)]) is None


def test_neighbouring_rows_are_a_slice() -> None:
    table = RowTable(program())
    table.admit("r0", asked("k0", "read"), 4)
    fill = plan(table, share("r0", 0, 4, 2)).reads[0]
    assert fill.span == slice(2, 6)


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


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[list[tuple[int, int, int]]]]:
    """Requests (arm, prompt, generated) and steps of (request, start, count): chunks of any size, any subset of the
    requests in a step, any order, and requests that are preempted and start again from position 0."""
    count = draw(st.integers(1, 4))
    arms = st.sampled_from(["read", "edit", "idle", "plain"])
    requests = [(draw(arms), draw(st.integers(1, 9)), draw(st.integers(1, 6))) for _ in range(count)]
    done = [0] * count  # rows computed
    known = [p for _, p, _ in requests]  # tokens there are
    steps: list[list[tuple[int, int, int]]] = []
    preemptions = draw(st.integers(0, 3))
    while any(known[i] < p + n for i, (_, p, n) in enumerate(requests)) and len(steps) < 400:
        step = []
        for i in draw(st.permutations(range(count))):
            _, p, n = requests[i]
            if known[i] >= p + n or draw(st.booleans()):
                continue
            if preemptions and done[i] and draw(st.integers(0, 5)) == 0:
                preemptions -= 1
                done[i] = 0
                continue
            take = draw(st.integers(1, known[i] - done[i]))
            step.append((i, done[i], take))
            done[i] += take
            if done[i] == known[i]:
                known[i] += 1
        if step:
            steps.append(step)
    return requests, steps


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_selected_position_is_delivered(
    case: tuple[list[tuple[str, int, int]], list[list[tuple[int, int, int]]]],
) -> None:
    requests, steps = case
    table = RowTable(program())
    known = [p for _, p, _ in requests]
    seen: dict[tuple[str, str], set[int]] = {}
    summed: dict[str, list[int]] = {}
    for step in steps:
        batch, offset = [], 0
        truth: dict[int, tuple[str, int]] = {}
        for i, start, count in step:
            arm, p, _ = requests[i]
            table.admit(f"r{i}", None if arm == "plain" else asked(f"k{i}", arm), p)
            sampled = start + count == known[i]
            batch.append(share(f"r{i}", start, count, offset, sampled))
            truth.update({offset + j: (f"k{i}", start + j) for j in range(count)})
            offset += count
            known[i] += sampled
        made = table.plan(batch)
        for fill in (*made.edits, *made.reads) if made is not None else ():
            if fill.name == "out":
                continue
            assert np.all(np.diff(fill.rows) > 0)
            for part in fill.parts:
                for row, position in zip(fill.rows[part.start : part.stop], part.positions, strict=True):
                    assert truth[int(row)] == (part.live.key[0], int(position))
                if fill.name == "mean":
                    summed.setdefault(part.live.key[0], []).extend(part.positions.tolist())
                    part.live.counted["mean"] = int(part.positions[-1]) + 1
                seen.setdefault((part.live.key[0], fill.name), set()).update(part.positions.tolist())
        for metric in made.metrics if made is not None else ():
            for live, position in zip(metric.lives, metric.positions, strict=True):
                seen.setdefault((live.key[0], "m"), set()).add(position)
    for i, (arm, p, n) in enumerate(requests):
        key, rows = f"k{i}", range(p + n - 1)
        assert known[i] == p + n
        expected: dict[str, set[int]] = {}
        if arm == "read":
            expected = {"all": set(rows), "some": set(rows[p:]), "mean": set(rows), "m": set(rows[p - 1 :])}
            # A mean counts a position once, however often it is computed.
            assert sorted(summed[key]) == list(rows)
        elif arm == "edit":
            expected = {"all": set(rows), "push": set(rows[p - 1 :]), "even": {r for r in rows if r % 5 in (0, 2, 4)}}
        assert {name: found for (k, name), found in seen.items() if k == key} == {
            name: found for name, found in expected.items() if found
        }

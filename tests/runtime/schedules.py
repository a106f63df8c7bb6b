"""Selectors with their meaning, schedules that vLLM can make, and what drives a table through them as vLLM does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from vtaps.runtime.live import Batch
from vtaps.runtime.rowtable import RowTable

Holds = Callable[[int, int, int], bool]
"""Whether a row is selected, by its position, the length of its prompt and its token."""

SAY, SAY_AT = (7, 8), 1
"""The override ``say``: its tokens, and the first generated step that they replace."""


def step_within(first: int, last: int) -> Holds:
    return lambda position, prompt, token: first <= position - prompt + 1 <= last


SELECTORS: dict[str, tuple[dict[str, Any], Holds]] = {
    "all": ({"rows": "all"}, lambda position, prompt, token: True),
    "prompt": ({"rows": "prompt"}, lambda position, prompt, token: position < prompt),
    "generated": ({"rows": "generated"}, lambda position, prompt, token: position >= prompt),
    "sampling": ({"rows": "sampling"}, lambda position, prompt, token: position >= prompt - 1),
    "steps": (
        {"rows": "all", "steps": [[1, 2], [4, 9]]},
        lambda *row: step_within(1, 2)(*row) or step_within(4, 9)(*row),
    ),
    "ends": (
        {"rows": "all", "positions": [[0, 0], [-1, -1]]},
        lambda position, prompt, token: position in (0, prompt - 1),
    ),
    "even": ({"rows": "all", "ids": [0, 2, 4]}, lambda position, prompt, token: token % 2 == 0),
    "but": (
        {"rows": "sampling",
         "except": {"rows": "all", "steps": [[1, 6]], "except": {"rows": "all", "steps": [[3, 3]]}}},
        lambda *row: step_within(0, 10**9)(*row) and (not step_within(1, 6)(*row) or step_within(3, 3)(*row)),
    ),
    "but even": (
        {"rows": "all", "except": {"rows": "all", "ids": [0, 2, 4]}},
        lambda position, prompt, token: token % 2 == 1,
    ),
    "after": (
        {"rows": "all", "after": "say"},
        lambda position, prompt, token: position >= prompt + SAY_AT + len(SAY),
    ),
}  # fmt: skip


def tokens(selector: str) -> dict[str, Any]:
    """As a lock spells it."""
    return SELECTORS[selector][0]


@dataclass(frozen=True)
class Ask:
    """A request of ``arm``; ``plain`` is one without a block."""

    arm: str
    point: int
    prompt: int
    generated: int

    @property
    def stop(self) -> int:
        """One past the last position whose row counts."""
        return self.prompt + self.generated - 1


def token(request: int, position: int) -> int:
    return (2 * request + 3 * position) % 5


def holds(selector: str, ask: Ask, request: int, position: int) -> bool:
    return SELECTORS[selector][1](position, ask.prompt, token(request, position))


@dataclass(frozen=True)
class Share:
    """``count`` rows of a request from position ``start`` on; ``sampled``: the token of the last one is kept."""

    request: int
    start: int
    count: int
    sampled: bool


@dataclass(frozen=True)
class Step:
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Finish:
    """The scheduler is done with a request."""

    request: int


@dataclass(frozen=True)
class Collect:
    request: int


@dataclass(frozen=True)
class Dummy:
    """vLLM runs the model on nothing."""


Event: TypeAlias = Step | Finish | Collect | Dummy
Schedule: TypeAlias = tuple[list[Ask], list[Event]]

LEAVING = ("finish, collect", "collect, finish", "collect, step, finish", "finish, collect last")


@st.composite
def schedules(
    draw: st.DrawFn, arms: dict[str, int], *, budget: st.SearchStrategy[int] | None = None, seats: int = 4
) -> Schedule:
    """Requests of ``arms`` (name → sweep points), and what happens to them: they join when a seat is free, prefill in
    chunks within ``budget`` rows a step, decode, are left out of a step, change places, are preempted (also with the
    last token not kept, as under async scheduling), and are computed for up to two steps past their stop.
    """
    kinds = [(name, point) for name, points in arms.items() for point in range(points)]
    most = 64 if budget is None else draw(budget)
    asks = [
        Ask(*draw(st.sampled_from(kinds)), prompt=draw(st.integers(1, 9)), generated=draw(st.integers(1, 24)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    ahead = [draw(st.integers(0, 2)) for _ in asks]
    leaving = [draw(st.sampled_from(LEAVING)) for _ in asks]
    waiting, batch = deque(range(len(asks))), list[int]()
    done, known = [0] * len(asks), [ask.prompt for ask in asks]  # rows that were computed, tokens that there are
    events: list[Event] = []
    at_the_end: list[Event] = []
    preemptions = 3

    def compute(left_out: int | None) -> None:
        shares, left = [], most
        for i in batch:
            owed = min(known[i] - done[i], left)
            if i == left_out or not owed:
                continue
            count = 1 if owed == 1 else draw(st.integers(1, owed))
            sampled = done[i] + count == known[i]
            shares.append(Share(i, done[i], count, sampled))
            done[i] += count
            known[i] += sampled
            left -= count
        if shares:
            events.append(Step(tuple(shares)))
        for i in [i for i in batch if known[i] >= asks[i].prompt + asks[i].generated + ahead[i]]:
            leave(i)

    def leave(i: int) -> None:
        first, *rest = leaving[i].split(", ")
        if rest == ["step", "finish"]:
            events.append(Collect(i))
            ahead[i], leaving[i] = ahead[i] + 1, "finish"
            return
        # vLLM puts the last request of a batch into the seat that falls free.
        batch[batch.index(i)] = batch[-1]
        batch.pop()
        events.append(Finish(i) if first == "finish" else Collect(i))
        if rest:
            target = at_the_end if rest == ["collect last"] else events
            target.append(Finish(i) if rest == ["finish"] else Collect(i))

    while waiting or batch:
        left_out = None
        what = draw(
            st.sampled_from(["go on"] * 4 + ["join"] * 3 + ["preempt", "preempt", "leave out", "shuffle", "rest"])
        )
        if waiting and (not batch or (what == "join" and len(batch) < seats)):
            batch.append(waiting.popleft())
        elif what == "preempt" and preemptions:
            running = [i for i in batch if done[i] and known[i] < asks[i].prompt + asks[i].generated]
            if running:
                preemptions -= 1
                i = draw(st.sampled_from(running))
                if known[i] > asks[i].prompt and done[i] == known[i] - 1 and draw(st.booleans()):
                    known[i] -= 1  # the step that sampled it was still under way
                done[i] = 0
                batch.remove(i)
                waiting.appendleft(i)
        elif what == "leave out" and len(batch) > 1:
            left_out = draw(st.sampled_from(batch))
        elif what == "shuffle":
            batch[:] = draw(st.permutations(batch))
        elif what == "rest":
            events.append(Dummy())
        compute(left_out)
        for _ in range(draw(st.integers(0, 7))):
            compute(None)
    return asks, events + at_the_end


class Runner:
    """Asks a table for its steps as the V1 runner does: it tells the tokens of a request only where it is asked to, and
    its arrays change after the call."""

    def __init__(self, asks: Sequence[Ask], table: RowTable) -> None:
        self.asks, self.table = asks, table
        self.told = 0
        self._starts = np.zeros(len(asks), np.int64)

    @contextmanager
    def step(self, shares: Sequence[Share]) -> Iterator[Batch]:
        """What ``RowTable.step`` and ``Session.step`` take, good for as long as the context lasts."""
        for share in shares:
            ask = self.asks[share.request]
            asked = {"key": f"k{share.request}", "arm": ask.arm, "point": ask.point}
            self.table.admit(f"r{share.request}", None if ask.arm == "plain" else asked, ask.prompt, ask.stop)
        ids = [f"r{share.request}" for share in shares]
        starts = self._starts[: len(shares)]
        starts[:] = [share.start for share in shares]
        offsets = np.cumsum([0, *(share.count for share in shares)])
        over = False

        def tokens(number: int) -> Any:
            assert not over and self.table.needs_tokens(ids[number])
            self.told += 1
            share = shares[number]
            return np.array([token(share.request, share.start + j) for j in range(share.count)], np.int64)

        sampled = np.array([share.sampled for share in shares], bool)
        yield Batch(ids, starts, np.diff(offsets), offsets[:-1], sampled, tokens)
        over = True
        starts[:] = -99

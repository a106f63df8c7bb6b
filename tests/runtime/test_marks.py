"""Events and pinned memory that are used again: never before what they stand for has passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vtaps.runtime import marks  # noqa: E402
from vtaps.runtime.marks import KEPT, STAGED, Marks, Upload  # noqa: E402


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log, self.at = log, 0

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.at}")


class Stream:
    """Numbers what is recorded on it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.count = 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.log)
        event.at = self.count = self.count + 1
        return event


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made)
    return made


def test_a_mark_says_as_much_as_its_step(stream: Stream) -> None:
    made = Marks()
    assert made.after(None) is None and made.after(3) is None
    # The event recorded as number n is of step 2n: every other step has reads.
    for number in range(1, 40):
        made.put(2 * number)
        assert len(made) <= KEPT
        oldest = max(1, number - KEPT + 1)
        assert made.after(None).at == number
        for step in range(2 * number + 3):
            assert made.after(step).at == max(oldest, min(step // 2, number))


def test_a_table_on_its_way_is_not_written_again(stream: Stream) -> None:
    host, table = np.zeros((5, 3), np.int32), torch.zeros(5, 3, dtype=torch.int32)
    made = Upload(host, table, pinned=False)
    sent = []
    for number in range(1, 4 * STAGED):
        count = 1 + number % 5
        host[:count] = number
        made.send(count)
        sent.append(made._staged[-1])
        assert table[:count].eq(number).all()
    assert all(staged is sent[n % STAGED] for n, staged in enumerate(sent))
    assert len(set(map(id, sent))) == STAGED
    assert stream.log == [f"wait for {n}" for n in range(1, 3 * STAGED)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_step_sees_its_own_table() -> None:
    """With a device that is far behind."""
    host = np.zeros((64, 3), np.int32)
    table = torch.zeros(64, 3, dtype=torch.int32, device="cuda")
    made, seen = Upload(host, table), []
    for number in range(1, 50):
        count = 1 + (7 * number) % 64
        torch.cuda._sleep(1_000_000)
        host[:count] = number
        made.send(count)
        seen.append((number, table[:count].clone()))
    for number, copy in seen:
        assert copy.eq(number).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_mark_that_is_recorded_again_holds_nobody_up_and_lets_nobody_by() -> None:
    made, side = Marks(), torch.cuda.Stream()
    value = torch.zeros((), dtype=torch.int64, device="cuda")
    found: list[tuple[int, Any]] = []
    for step in range(1, 5 * marks.KEPT):
        torch.cuda._sleep(1_000_000)
        value += 1
        made.put(step)
        side.wait_event(made.after(step))
        with torch.cuda.stream(side):
            found.append((step, value.clone()))
    torch.cuda.synchronize()
    assert all(int(copy) >= step for step, copy in found)

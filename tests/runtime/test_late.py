"""The schedules of test_session with a stream that copies as late as it may, and the sorting thread at work."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from tests.runtime.test_session import compare, manifests, replaced  # noqa: E402, F401
from vtaps.runtime import harvest, memory, ops, slabs, spool  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402
from vtaps.spec import slots  # noqa: E402


class Side:
    """Work waits until somebody needs it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.work: deque[Any] = deque()
        self.sent = self.done = 0

    def put(self, f: Any) -> None:
        with self.lock:
            self.work.append(f)
            self.sent += 1

    def run_to(self, n: int) -> None:
        with self.lock, torch.inference_mode():
            while self.done < n:
                self.work.popleft()()
                self.done += 1

    def record_event(self) -> Any:
        return Ev(self, self.sent)

    def wait_event(self, e: Any) -> None:
        pass


class Ev:
    def __init__(self, side: Any, n: int) -> None:
        self.side, self.n = side, n

    def synchronize(self) -> None:
        if random.random() < 0.5:
            time.sleep(0.002)
        self.side.run_to(self.n)

    def query(self) -> bool:
        return self.side is None or self.side.done >= self.n


class Main:
    def record_event(self, event: Any = None) -> Any:
        return event or Ev(None, 0)

    def wait_event(self, e: Any) -> None:
        if e.side is not None:
            e.side.run_to(e.n)

    def wait_stream(self, s: Any) -> None:
        s.run_to(s.sent)


def late(t: Any, side: Any) -> Any:
    host = torch.empty(t.shape, dtype=t.dtype)
    side.put(lambda: host.copy_(t))
    return host


BOUNDS: dict[Any, dict[str, list[int]]] = {
    harvest: {
        "PIECE_BYTES": [1, 300, 32 << 20],
        "GATHERED_METRICS": [1, 3, 256],
        "GATHERED_BYTES": [1, 300, 4 << 20],
        "LENS_ROWS": [1, 5, 32],
        "ON_WAY_BYTES": [1, 500, 1 << 30],
    },
    slabs: {"SHARE_BYTES": [1, 500, 4 << 20], "SLAB_BYTES": [1, 700, 64 << 20]},
    slots: {"GATHERED_STEPS": [1, 3, 64]},
    memory: {"EAGER_SLOTS": [1, 5, 1024]},
    spool: {"SMALL": [1, 300], "MESSAGE": [1, 100]},
}


@pytest.mark.parametrize("mode", ["eager", "taps"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=sch.schedules({n: len(a["points"]) for n, a in toy.ARMS.items()}, budget=st.sampled_from([4, 6, 11, 40])),
    data=st.data(),
)
def test_rows_are_right_however_late_they_leave(
    mode: str,
    manifests: Any,  # noqa: F811
    case: Any,
    data: Any,
) -> None:
    main = Main()
    with ExitStack() as patches:
        for module, bounds in BOUNDS.items():
            for name, choices in bounds.items():
                patches.enter_context(patch.object(module, name, data.draw(st.sampled_from(choices), name)))
        patches.enter_context(patch.object(harvest, "_to_host", late))
        patches.enter_context(patch.object(harvest.Harvest, "_aside", lambda self, after: harvest.nullcontext()))
        patches.enter_context(patch.object(torch.cuda, "current_stream", lambda *a: main))
        patches.enter_context(patch.object(torch.Tensor, "record_stream", lambda self, s: None))
        made = play(mode, manifests[mode], case, data)
    gc.collect()
    made.place(0, 0)
    assert made.alive == 0
    assert not [p for name in ("spool", "shared") for p in manifests[mode].folder.glob(f"{name}/*")]


def play(mode: str, manifest: Any, case: Any, data: Any) -> spool.Spool:
    """A schedule from its first step to its last collected request; returns the spool that served it."""
    asks, events = toy.served(case[0], mode), case[1]
    steps = [event.shares for event in events if isinstance(event, sch.Step)]
    rows = max(sum(share.count for share in shares) for shares in steps)
    limits = Limits(rows=rows + 2, requests=max(map(len, steps)), step_rows=rows)
    folder: Path = manifest.folder
    (folder / "shared").mkdir(exist_ok=True)
    shared = data.draw(st.sampled_from([None, folder / "shared"]), "shared")
    allowed = data.draw(st.sampled_from([None, 0, 700]), "memory")
    session = Session(replace(manifest, spool=folder / "spool", memory=allowed, shared=shared))
    worker = toy.Worker(session, asks, limits, inside=toy.compiled if mode == "taps" else None)
    session.harvest._stream = Side()
    # An engine may know the last row that a request can have, or a later one, or none.
    extra = data.draw(st.sampled_from([[0], [3], [2**62], [0, 5, 2**62]]), "end")
    admit = session.table.admit

    def later(request_id: str, asked: Any, prompt: int, end: int) -> None:
        admit(request_id, asked, prompt, end + extra[int(request_id[1:]) % len(extra)])

    session.table.admit = later  # type: ignore[method-assign, assignment]
    together = data.draw(st.integers(1, 3), "together")
    given_up = data.draw(st.sets(st.integers(0, 5)), "given up")
    late_logits = data.draw(st.booleans(), "logits after the step's end")
    gone: set[int] = set()
    waiting: list[int] = []

    def collect() -> None:
        wanted = [(f"k{i}", 0, asks[i].generated) for i in waiting]
        for i, (key, found) in zip(waiting, session.collect(wanted), strict=True):
            gone.add(i)
            assert key == (f"k{i}", 0)
            compare(found, worker, i)
        waiting.clear()

    try:
        for event in events:
            match event:
                case sch.Step(shares):
                    x = worker.rows(shares, data.draw(st.integers(0, 2), "padding"))
                    assert worker.step(shares, x, late=late_logits).tolist() == replaced(asks, shares, gone)
                case sch.Dummy():
                    worker.dummy()
                case sch.Finish(i):
                    session.table.finish(f"r{i}")
                case sch.Collect(i) if asks[i].arm != "plain":
                    if i in given_up:
                        session.table.forget({f"k{i}"})
                        gone.add(i)
                        continue
                    waiting.append(i)
                    if len(waiting) >= together:
                        collect()
        collect()
        session.neutral()
        session.harvest.settle()
    finally:
        session.close()
        ops.serve(None)  # type: ignore[arg-type]
    return session.spool

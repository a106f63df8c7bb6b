"""What goes wrong on the way of rows is said, and is never a row: full disks, refused memory, refused locks."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.runtime import schedules as sch  # noqa: E402
from tests.runtime import toy  # noqa: E402
from tests.runtime.test_session import (  # noqa: E402
    LIMITS,
    WIDTH,
    Toy,
    X,
    attached,
    compare,
    record,
    session,
    step,
)
from tests.runtime.test_slabs import SITES, fill, live  # noqa: E402
from vtaps.runtime import harvest, slabs  # noqa: E402
from vtaps.runtime import spool as spools  # noqa: E402
from vtaps.runtime.harvest import Harvest  # noqa: E402
from vtaps.runtime.live import Scheduled  # noqa: E402
from vtaps.runtime.manifest import Manifest  # noqa: E402
from vtaps.runtime.memory import Limits  # noqa: E402
from vtaps.runtime.program import LockError  # noqa: E402
from vtaps.runtime.records import Filed  # noqa: E402
from vtaps.runtime.session import Session  # noqa: E402
from vtaps.runtime.slabs import places  # noqa: E402
from vtaps.runtime.spool import Growing, Spool, opened  # noqa: E402


def within(seconds: float, work: Any) -> Any:
    """What ``work`` returns or raises; AssertionError where it hangs."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append((work(), None))
        except BaseException as error:
            out.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    found, error = out[0]
    if error is not None:
        raise error
    return found


def test_after_a_full_disk_nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where rows are sorted at once."""
    monkeypatch.setattr(spools, "SMALL", 1)
    (tmp_path / "file").write_text("")
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    s.spool = Spool(tmp_path / "file" / "spool", 0)
    step(s, model := attached(s))
    fault = record(s).fault
    assert fault is not None and fault.code == "VT622" and "rows of a read cannot be kept in" in fault.message
    s.spool.folder = tmp_path / "disk"
    s.table.finish("r")
    s.table.admit("r2", {"key": "k2", "arm": "a", "point": 0}, 3)
    with torch.inference_mode():
        s.begin([Scheduled("r2", 0, np.zeros(3, np.int64), 0)])
        model(X.clone())
        s.end()
    [(_, found)] = within(3, lambda: s.collect([("k2", 0, 1)]))
    assert found.fault is None and np.array_equal(found.reads["look", "s"].values["rows"], X)


class Done:
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Stream:
    def record_event(self, event: Done | None = None) -> Done:
        return event or Done()

    def wait_event(self, e: Any) -> None: ...


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(harvest, "_to_host", lambda t, _: t.clone())
    monkeypatch.setattr(Harvest, "_aside", lambda self, after: harvest.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: made)
    return made


def test_a_copy_that_fails_is_the_fault_of_those_whose_rows_it_had(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory that is refused, in a step or while collecting."""
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = attached(s)
    s.harvest._stream = stream
    step(s, model)
    s.table.admit("r2", {"key": "k2", "arm": "a", "point": 0}, 3)

    def refuse(t: Any, _: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as m:
        m.setattr(harvest, "_to_host", refuse)
        [(_, lost)] = s.collect([("k", 0, 1)])
    assert lost.fault is not None and lost.fault.message == "RuntimeError: out of memory" and not lost.reads
    [(_, other)] = within(3, lambda: s.collect([("k2", 0, 1)]))
    assert other.fault is None
    s.close()


def test_rows_that_were_lost_are_not_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails between the ring and the queue (a lens, a norm, out of memory) loses what was to go with it."""
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    s.attach(model := Toy(), lambda x: x, Limits(rows=20, requests=2, step_rows=20), torch.float32)
    for key in "ab":
        s.table.admit(key, {"key": key, "arm": "a", "point": 0}, 1, 4)

    def both(n: int) -> None:
        with torch.inference_mode():
            s.begin([Scheduled(key, n, np.zeros(1, np.int64), i) for i, key in enumerate("ab")])
            model(torch.full((2, WIDTH), 7.0 + n))
            s.end()

    both(0)
    s.harvest.settle()
    both(1)

    def refuse(self: Any, *a: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as m:
        m.setattr(Harvest, "_reduced", refuse)
        [(_, lost)] = s.collect([("a", 0, 2)])
    [(_, other)] = within(3, lambda: s.collect([("b", 0, 2)]))
    for found in (lost, other):
        assert found.fault is not None and found.fault.message == "RuntimeError: out of memory" and not found.reads


def test_steps_without_reads_keep_no_events(tmp_path: Path, stream: Stream) -> None:
    more = {
        "edits": {"none": {"verb": "zero", "sites": ["s"], "tokens": {"rows": "all"}}},
        "reads": {},
        "arms": {"a": {"points": [{"edits": [{"edit": "none", "sites": ["s"]}]}]}},
    }
    s = session(tmp_path, {"s": {"module": "inner"}}, body='    vt.zero(t, "none", x)', **more)
    model = attached(s)
    s.harvest._stream = stream
    for n in range(50):
        step(s, model, X[:1], n)
    record(s, 48)
    assert len(s.harvest._events) < 10


@pytest.mark.parametrize("also_in_it", [False, True])
def test_only_later_steps_of_others_are_not_waited_for(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch, also_in_it: bool
) -> None:
    """Two steps have left, and the second has not arrived: a request's last row is in the first, and a row past its
    stop may be in the second."""
    monkeypatch.setattr(harvest, "GATHERED_BYTES", 1)
    arrived = threading.Event()

    class Second(Done):
        def synchronize(self) -> None:
            assert arrived.wait(10)

    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = attached(s)
    s.table.admit("r2", {"key": "k2", "arm": "a", "point": 0}, 1)
    s.harvest._stream = stream
    step(s, model)
    monkeypatch.setattr(stream, "record_event", lambda event=None: Second())
    shares = [Scheduled("r2", 0, np.zeros(1, np.int64), 0)]
    if also_in_it:
        shares.append(Scheduled("r", 3, np.zeros(1, np.int64), 1))
    with torch.inference_mode():
        s.begin(shares)
        model(X[: len(shares)] + 100)
        s.end()
    if also_in_it:
        with pytest.raises(AssertionError, match="it hangs"):
            within(0.3, lambda: s.harvest.settle(1, s.table.live["r"].span.last))
        arrived.set()
    first = within(3, lambda: record(s)).reads["look", "s"]
    assert np.array_equal(first.values["rows"], X) and list(first.positions) == [0, 1, 2]
    arrived.set()
    [(_, second)] = within(3, lambda: s.collect([("k2", 0, 1)]))
    assert np.array_equal(second.reads["look", "s"].values["rows"], X[:1] + 100)
    s.close()


def test_the_bound_holds_across_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 1 MiB each in one step, 3 MiB of memory: more than one slab makes no difference."""
    size = 1 << 20
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 * size)
    spool = Spool(tmp_path, memory=3 * size)
    requests = [live(f"k{i}", 1, 1) for i in range(20)]
    made = fill([(x, 0, 1) for x in requests])
    rows = np.arange(20)
    fields = {"rows": np.zeros((20, size), np.uint8)}
    target = places(made, SITES, "float32", size, spool)
    target.put(rows, 0 * rows, fields)
    assert spool.alive <= 3 * size, spool.alive / size


def with_a_lock_to_refuse(folder: Path) -> tuple[Session, Manifest]:
    """A session, and a lock of the same structure with another coefficient whose read needs a vector that is gone."""
    (folder / "old").mkdir()
    (folder / "new").mkdir()
    manifest = toy.write(folder / "new")
    lock = json.loads(manifest.lock.read_text())
    lock["vectors"]["gone"] = {"file": "gone.npy"}
    lock["reads"]["dots"]["vectors"] = ["v", "gone"]
    lock["arms"]["edit"]["points"][0]["edits"][0]["coefficient"] = -99.0
    manifest.lock.write_text(json.dumps(lock))
    return Session(toy.write(folder / "old")), manifest


def test_a_lock_that_is_refused_leaves_the_session_as_it_was(tmp_path: Path) -> None:
    s, manifest = with_a_lock_to_refuse(tmp_path)
    s.attach(model := toy.Model(), model.compute_logits, LIMITS, torch.float32)
    before = (s.manifest, s.program, s.table, s.harvest.program, s.boards.program)
    with pytest.raises(LockError, match="gone"):
        s.load(manifest)
    after = (s.manifest, s.program, s.table, s.harvest.program, s.boards.program)
    assert [a is b for a, b in zip(before, after, strict=True)] == [True] * 5


@pytest.mark.parametrize("ahead", [0, 1])
def test_memory_comes_back_once_the_caller_lets_go(tmp_path: Path, ahead: int) -> None:
    """Of arrays that are a request's own; a slab waits for the next step."""
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    model = Toy()
    s.attach(model, lambda x: x, Limits(rows=20, requests=2, step_rows=20), torch.float32)
    s.table.admit("r", {"key": "k", "arm": "a", "point": 0}, 3)
    step(s, model)
    for n in range(2 + ahead):
        step(s, model, X[:1], 3 + n)
    found = record(s, 3)
    s.table.finish("r")
    del found
    gc.collect()
    s.spool.place(0, 0)
    assert s.spool.alive == 0


def test_room_is_asked_for_as_it_is_needed(tmp_path: Path) -> None:
    growing = Growing(Spool(tmp_path, 1 << 20), 1 << 40)
    growing.add(np.zeros((3, 16), np.float32))
    assert growing.used == 3


def test_rows_without_a_bound_are_not_copied_with_every_piece() -> None:
    growing, asked = Growing(Spool(), 0), []
    made = np.empty
    with patch.object(spools.np, "empty", lambda *a, **k: asked.append(a) or made(*a, **k)):
        for _ in range(200):
            growing.add(np.zeros((1, 4), np.float32))
    assert len(asked) < 20, len(asked)


def test_a_lock_that_is_refused_edits_nothing(tmp_path: Path) -> None:
    s, manifest = with_a_lock_to_refuse(tmp_path)
    worker = toy.Worker(s, [sch.Ask("edit", 0, 3, 4)], Limits(rows=6, requests=1, step_rows=6))
    with pytest.raises(LockError, match="gone"):
        s.load(manifest)
    worker.runner.table = s.table
    for share in (sch.Share(0, 0, 3, True), *(sch.Share(0, n, 1, True) for n in (3, 4, 5))):
        worker.step([share], worker.rows([share]))
    [(_, found)] = s.collect([("k0", 0, 4)])
    compare(found, worker, 0)


@pytest.mark.parametrize("end", [2**62, 3, 9])
@pytest.mark.parametrize("child", [0, 1])
def test_a_key_used_again_while_the_old_request_runs_ahead(tmp_path: Path, end: int, child: int) -> None:
    s = session(tmp_path, {"s": {"module": "op", "input": "x"}})
    s.attach(model := Toy(), lambda x: x, Limits(rows=50, requests=4, step_rows=50), torch.float32)
    s.table.admit("old", {"key": "k", "arm": "a", "point": 0, "child": child}, 1, end)
    s.table.admit("side", {"key": "k", "arm": "a", "point": 0, "child": 2}, 1, end)

    def go(*ids: tuple[str, int, float]) -> None:
        with torch.inference_mode():
            s.begin([Scheduled(r, at, np.zeros(1, np.int64), i) for i, (r, at, _) in enumerate(ids)])
            model(torch.tensor([[float(v)] for *_, v in ids]).expand(len(ids), WIDTH).clone())
            s.end()

    for n in range(3):
        go(("old", n, 100 + n), ("side", n, 300 + n))
    [(_, first)] = s.collect([("k", child, 3)])
    s.table.admit("new", {"key": "k", "arm": "a", "point": 0, "child": child}, 1, end)
    go(("old", 3, 103), ("side", 3, 303), ("new", 0, 200))
    go(("old", 4, 104), ("side", 4, 304), ("new", 1, 201))
    s.table.finish("old")
    go(("side", 5, 305), ("new", 2, 202))
    s.table.finish("new")
    s.table.finish("side")
    [(_, second), (_, side)] = s.collect([("k", child, 3), ("k", 2, 3)])
    for rec, base in ((first, 100), (second, 200), (side, 300)):
        assert rec.reads["look", "s"].values["rows"][:, 0].tolist() == [base + i for i in range(3)]
        assert rec.reads["look", "s"].positions.tolist() == [0, 1, 2]


def test_a_file_larger_than_the_memory_comes_back(tmp_path: Path) -> None:
    """Many systems refuse a private mapping that they could not hold."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * pages >> 20
    with (tmp_path / "rows").open("wb") as f:
        try:
            f.truncate(rows << 20)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
    before = len(os.listdir("/proc/self/fd"))
    found = opened(Filed(str(tmp_path / "rows"), "uint8", (rows, 1 << 20)))
    assert found.shape == (rows, 1 << 20) and len(os.listdir("/proc/self/fd")) == before
    found[0] = 1
    assert not list(tmp_path.iterdir())


def test_where_many_files_are_mapped_more_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "MAPPINGS", len(spools._mapped) + 1)
    arrays = []
    for number in range(3):
        np.full(8, number, np.float32).tofile(tmp_path / str(number))
        arrays.append(opened(Filed(str(tmp_path / str(number)), "float32", (4, 2))))
    assert [a.sum() for a in arrays] == [0, 8, 16] and not list(tmp_path.iterdir())
    count = len(spools._mapped)
    del arrays
    gc.collect()
    assert len(spools._mapped) == count - 1

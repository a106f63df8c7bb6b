"""Rows that wait in memory, in shared memory or on disk are the same rows, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from vtaps.runtime import spool as spools
from vtaps.runtime import transport
from vtaps.runtime.records import Collected, Filed, Kept
from vtaps.runtime.spool import Growing, Spool, SpoolError, opened
from vtaps.runtime.transport import Folders, pack, record_of, unpack

ROW = (3, 5)
BYTES = 3 * 5 * 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "SMALL", 4 * BYTES)
    monkeypatch.setattr(spools, "MESSAGE", 2 * BYTES)
    monkeypatch.setattr(spools, "PIECE", 7)


def rows(start: int, count: int, dtype: str = "f4") -> Any:
    return (np.arange(start * 15, (start + count) * 15) % 251).astype(dtype).reshape(count, *ROW)


def grown(spool: Spool, *counts: int, most: int = 0, dtype: str = "f4") -> Growing:
    growing, at = Growing(spool, most), 0
    for count in counts:
        growing.add(rows(at, count, dtype))
        at += count
    return growing


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock") if folder.exists() else []


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def taken(growing: Growing, count: int) -> Any:
    found = growing.take(count)
    return opened(found) if isinstance(found, Filed) else found


@pytest.mark.parametrize("dtype", ["f4", "u2", "f8", "i8"])
@pytest.mark.parametrize("most", [0, 3, 100])
@pytest.mark.parametrize("memory", [None, 0, 5 * BYTES, 1 << 20])
@pytest.mark.parametrize("across", [False, True])
def test_wherever_rows_wait_they_are_the_same(
    across: bool, memory: int | None, most: int, dtype: str, tmp_path: Path, shared: Path
) -> None:
    disk = tmp_path / "run" / "spool"
    spool = Spool(disk, memory, shared if across else None)
    growing = grown(spool, 1, 2, 1, 7, 1, most=most, dtype=dtype)
    size = 12 * 15 * np.dtype(dtype).itemsize
    assert len(files(disk)) == (memory is not None and size > memory)
    assert len(files(shared)) == (across and not files(disk))
    for file in [*files(disk), *files(shared)]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size == size
    found = taken(growing, 11)
    assert found.dtype == dtype and found.tobytes() == rows(0, 11, dtype).tobytes()
    assert not files(tmp_path), "whoever opens a file removes it"
    found[0] = 1  # an array like any other


@pytest.mark.parametrize("memory", [None, 0])
def test_rows_that_come_after_the_others_are_taken_go_nowhere(memory: int | None, tmp_path: Path) -> None:
    growing = grown(Spool(tmp_path, memory), 9, most=20)
    found = taken(growing, 8)
    growing.add(rows(50, 9))
    assert found.tobytes() == rows(0, 8).tobytes() and not files(tmp_path)


def test_a_slice_with_steps_is_kept_as_it_is(tmp_path: Path) -> None:
    growing = Growing(Spool(tmp_path, 0), 0)
    growing.add(rows(0, 40)[3:40:4])
    assert files(tmp_path) and taken(growing, 10).tobytes() == rows(0, 40)[3:40:4].tobytes()


def test_many_that_are_not_large_add_up(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "disk", 40 * BYTES)
    kept = [grown(spool, 5, 1, most=50) for _ in range(6)]
    assert not files(tmp_path) and spool.alive == 36 * BYTES
    more = [grown(spool, 5, 1, most=50) for _ in range(6)]
    assert len(files(tmp_path)) == 6 and spool.alive <= 40 * BYTES
    # One that grows where there is no room goes as a whole.
    kept[0].add(rows(6, 9))
    assert len(files(tmp_path)) == 7
    assert taken(kept[0], 15).tobytes() == rows(0, 15).tobytes()
    # What the caller still holds counts; what it lets go of does not.
    found = [taken(g, 6)[:, 1] for g in kept[1:]]
    del kept
    gc.collect()
    spool.place(0, 0)
    assert spool.alive == 30 * BYTES
    del found, more
    gc.collect()
    spool.place(0, 0)
    assert spool.alive == 0 and not files(tmp_path), "rows that nobody asked for are gone"


def test_an_array_that_is_small_has_no_file(tmp_path: Path, shared: Path) -> None:
    spool = Spool(tmp_path / "disk", 0, shared)
    kept = [grown(spool, 1) for _ in range(9)]
    assert not files(tmp_path) and len(kept) == 9


def test_rows_that_come_back_from_a_file_cost_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [grown(Spool(tmp_path / "disk", 0), 5) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    found = [taken(g, 5) for g in kept]
    assert len(os.listdir("/proc/self/fd")) == before and len(found) == 20


def test_a_worker_counts_what_the_driver_holds(tmp_path: Path, shared: Path) -> None:
    spool = Spool(tmp_path / "disk", 10 * BYTES, shared)
    first = grown(spool, 6).take(6)
    assert isinstance(first, Filed)
    spool.held = 6 * BYTES
    assert files(shared) and not files(tmp_path / "disk")
    second = grown(spool, 6)
    assert files(tmp_path / "disk") and spool.alive == 0
    spool.held = 0
    assert isinstance(grown(spool, 6).take(6), Filed) and len(files(shared)) == 2 and second


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """File systems of few pages."""
    made: list[Path] = []

    def make(name: str, size: int) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        options = f"size={size},mode=0700"
        try:
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        except FileNotFoundError:
            pytest.skip("there is no mount")
        if done.returncode:
            pytest.skip("only root can mount")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_names_the_folder(little: Callable[[str, int], Path]) -> None:
    folder = little("full", 8 * os.sysconf("SC_PAGE_SIZE"))
    growing = Growing(Spool(folder / "spool", 0), 10_000)
    with pytest.raises(SpoolError, match=rf"{folder}/spool: the disk is full$"):
        for at in range(0, 10_000, 100):
            growing.add(rows(at, 100))
    # What was written before is whole.
    assert growing.used and taken(growing, growing.used).tobytes() == rows(0, growing.used).tobytes()


def test_where_shared_memory_is_full_the_disk_is_not(tmp_path: Path, little: Callable[[str, int], Path]) -> None:
    shared = little("little", 8 * os.sysconf("SC_PAGE_SIZE"))
    spool = Spool(tmp_path / "disk", None, shared)
    growing = Growing(spool, 0)
    for at in range(0, 2000, 100):
        growing.add(rows(at, 100))
    at_once = Growing(spool, 0)
    at_once.add(rows(0, 2000))
    assert not files(shared) and len(files(tmp_path / "disk")) == 2
    for found in (growing, at_once):
        assert taken(found, 2000).tobytes() == rows(0, 2000).tobytes()
    spool.place(0, 0)
    assert spool.alive == 0


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match=r"cannot be kept in .*/file/spool: Not a directory"):
        grown(Spool(tmp_path / "file" / "spool", 0), 9)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    filed = grown(Spool(tmp_path, 0), 9).take(9)
    assert isinstance(filed, Filed)
    Path(filed.path).unlink()
    with pytest.raises(SpoolError, match=r"cannot be read from"):
        opened(filed)


# Between two processes


def collected(spool: Spool) -> Collected:
    kept = [Kept("x", ("a", "b", "c"), np.arange(n), {"rows": grown(spool, n).take(n)}, "float32") for n in (1, 9)]
    mean = Kept("m", ("a", "b"), np.arange(4), {"mean": rows(0, 1)[:, :2], "count": np.full((1, 2), 4)}, "float32")
    metrics = {"p": (np.array([3, 4]), np.array([0.5, -1], np.float32))}
    return Collected({"e": ((1, 2), (5, 9))}, (mean, *kept[1:]), metrics, (2,))


def test_a_message_brings_what_the_worker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SHARED_MEMORY", tmp_path)
    folders = Folders(tmp_path / "spool", others=True)
    assert folders.shared is not None
    here = record_of(collected(Spool()))
    for memory, message in ((None, None), (0, None), (None, folders.shared)):
        sent = pack([(("k", 1), collected(Spool(tmp_path / "spool", memory, message)))])
        [(key, there)] = folders.records(sent).items()
        assert key == ("k", 1) and (there.fired, there.overridden) == (here.fired, here.overridden)
        assert there.reads.keys() == here.reads.keys() and there.metrics.keys() == {"p"}
        for where, read in here.reads.items():
            other = there.reads[where]
            assert other.dtype == read.dtype and other.positions.tobytes() == read.positions.tobytes()
            for name, value in read.values.items():
                found = other.values[name]
                assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
        assert not files(tmp_path)
        assert folders.held == (9 * BYTES if message else 0)
        part = next(r.values["rows"][2:] for (name, _), r in there.reads.items() if name == "x")
        del there, found, other
        gc.collect()
        assert folders.held == (9 * BYTES if message else 0), "a part keeps the whole"
        del part
        gc.collect()
        assert folders.held == 0
    big = unpack(pack([(("k", 0), collected(Spool(tmp_path / "spool", 0)))]))
    assert len(files(tmp_path)) == 1 and big
    folders.close()
    folders.close()
    assert not list(tmp_path.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from vtaps.runtime import transport
transport.SHARED_MEMORY = Path(sys.argv[1])
folders = transport.Folders(Path(sys.argv[1]) / "spool", others=True)
(folders.shared / "rows").write_bytes(b"x" * 9)
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
if sys.argv[2] == "raise":
    raise RuntimeError
"""


def holder(folder: Path, what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), what], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_what_a_killed_process_left_goes_and_what_a_live_one_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SHARED_MEMORY", tmp_path)
    live, dead = holder(tmp_path, "wait"), holder(tmp_path, "wait")
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        (tmp_path / "vtaps-of-somebody").mkdir()
        assert len(files(tmp_path)) == 2
        folders = Folders(tmp_path / "spool", others=True)
        assert len(files(tmp_path)) == 1
        assert sorted(p.name for p in tmp_path.iterdir() if not list(p.iterdir())) == ["vtaps-of-somebody"]
        folders.close()
    finally:
        live.kill()
        live.wait()
    Folders(tmp_path / "spool", others=True).close()
    assert [p.name for p in tmp_path.iterdir()] == ["vtaps-of-somebody"]


@pytest.mark.parametrize("how", ["end", "raise"])
def test_a_process_that_ends_leaves_nothing(how: str, tmp_path: Path) -> None:
    process = holder(tmp_path, how)
    assert process.wait(60) == (how == "raise")
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SHARED_MEMORY", tmp_path / "none")
    folders = Folders(tmp_path / "spool", others=True)
    assert folders.shared is None and folders.held == 0
    folders.close()


def test_a_disk_that_is_slow_holds_the_steps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue between device and disk is bounded: see ``ON_WAY_BYTES``; played with a stream that does nothing."""
    import threading

    import torch

    from vtaps.runtime import harvest

    class Event:
        def synchronize(self) -> None:
            return None

    class Stream:
        def record_event(self) -> Event:
            return Event()

    monkeypatch.setattr(harvest, "ON_WAY_BYTES", 100)
    monkeypatch.setattr(harvest, "_to_host", lambda t, _: t.clone())
    monkeypatch.setattr(harvest.Harvest, "_aside", lambda self, after: harvest.nullcontext())
    made = object.__new__(harvest.Harvest)
    made._stream, made._thread, made._failed = Stream(), None, None
    made._sent = made._sorted = made._on_way = 0
    made._first = harvest.deque()
    made._loads, made._arrived = harvest.queue.SimpleQueue(), threading.Condition()
    go, most = threading.Semaphore(0), 0

    def deliver(_: Any) -> None:
        go.acquire()

    def send() -> None:
        for _ in range(10):
            made._send([torch.zeros(10)], deliver, None, 1, [])  # 40 bytes

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(10):
        time.sleep(0.01)
        most = max(most, made._on_way)
        go.release()
    sender.join(10)
    assert not sender.is_alive() and most == 80
    made.close()
    assert made._on_way == 0

    def fail(_: Any) -> None:
        raise SpoolError("the disk is full")

    lives = [object()]
    made.lost = harvest.deque()
    made._send([torch.zeros(10)], fail, None, 1, lives)
    made._send([torch.zeros(10)], lambda _: None, None, 1, [object()])
    made.close()
    [(whose, error)] = made.lost
    assert whose is lives and str(error) == "the disk is full" and made._on_way == 0


@pytest.mark.parametrize(
    "show", [lambda a: a, lambda a: a[3:4, 1], lambda a: pytest.importorskip("torch").from_numpy(a)[2:], memoryview]
)
def test_memory_is_used_again_once_nobody_shows_it(show: Any) -> None:
    spool = Spool()
    made = spool.array((6, 2), np.dtype(np.float32))
    made[:] = 7
    shown, where = show(made), made.ctypes.data
    del made
    gc.collect()
    other = spool.array((6, 2), np.dtype(np.float32))
    other[:] = 9
    assert other.ctypes.data != where and np.all(np.asarray(shown) == 7)
    del shown
    gc.collect()
    assert spool.array((3, 2), np.dtype(np.float64)).ctypes.data == where


def test_little_memory_is_kept_for_the_next_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "REUSED", 100)
    kind = np.dtype(np.uint8)

    def kept(spool: Spool, *sizes: int) -> list[int]:
        made = [spool.array((size,), kind) for size in sizes]
        del made
        return sorted(memory.nbytes for memory in spool._unused)

    assert kept(Spool(), 101, 100, 50) == [50, 100]
    assert len(kept(Spool(), *[10] * 20)) == spools.REUSED_ARRAYS
    assert kept(Spool(memory=1700), 80, 80, 80) == [80, 80]  # an eighth
    assert kept(Spool(memory=700), 80) == []
    spool = Spool()
    assert kept(spool, 80) == [80] and kept(spool, 60) == [60, 80] and kept(spool, 70) == [60, 80]

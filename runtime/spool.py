"""Where the rows that reads deliver wait until they are collected: in memory, past a bound in files of their own.

A file is written as its rows arrive, so that the system can write them out and drop them from memory.  It is never
written through a mapping: a disk that is full is then an error and not a signal, and no page of it counts as memory
of this process.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtaps.runtime.records import Filed

Array = npt.NDArray[Any]

SMALL = 1 << 20
"""An array of fewer bytes has no file on disk, however much memory is taken."""
MESSAGE = 256 << 10
"""An array of fewer bytes goes to a driver in another process inside the message; see docs/benchmarks.md."""

MAPPINGS = 30_000
"""Files of records that are mapped at once, at most."""
_mapped: set[str] = set()

PIECE = 32 << 20
REUSED = 64 << 20
"""An array of more bytes is not kept for the next."""
REUSED_ARRAYS = 4


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where its control group says so."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # the first says "max" where there is none
            found = min(found, int(Path(limit).read_text()))
    return found


class SpoolError(Exception):
    """Rows cannot be kept: the message names the folder."""


class Spool:
    """The memory and the files of one worker's rows.

    Arrays that were let go of are used again, a few of them: fresh memory costs more than writing the rows, and in a
    virtual machine that gives free memory back to its host, ten times as much.  They are an eighth of ``memory`` at
    most, beside it.

    ``memory``: bytes of rows that may be alive in memory, those included that the caller has not let go of; ``folder``:
    where arrays go that pass it (None: memory has no bound).  ``shared``: a folder in memory for a worker whose driver
    is another process, whose files need no copy to get there.  Folders are made when the first file is.

    One thread writes (:meth:`place`, :meth:`count`); arrays may go in any.
    """

    def __init__(self, folder: Path | None = None, memory: int | None = None, shared: Path | None = None) -> None:
        self.folder, self.memory, self.shared = folder, memory, shared
        self.held = 0
        """Bytes of the shared files that the driver has taken and still holds."""
        self.alive = 0
        # What is let go of comes from any thread, and from inside a collection of garbage: no lock may be taken.
        self._freed: deque[int] = deque()
        most = REUSED_ARRAYS if memory is None else min(REUSED_ARRAYS, memory // 8 // REUSED)
        self._unused: deque[memoryview] = deque(maxlen=most)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory as it is.  The ``base`` of the array lives as long as any array that shows a part of it."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._used_before(size)
        # A view's base is the last array before something else: were it the memory itself, nobody would know that only
        # views are left.
        base = np.frombuffer(memory, np.uint8, size)
        made: Array = base.view(dtype).reshape(shape)
        if memory.nbytes <= REUSED and made.base is base:
            weakref.finalize(base, self._unused.append, memory).atexit = False
        return made

    def _used_before(self, size: int) -> memoryview:
        """At least ``size`` bytes and not many more."""
        for _ in range(len(self._unused)):
            try:
                memory = self._unused.popleft()
            except IndexError:
                break
            if size <= memory.nbytes <= size + size // 4:
                return memory
            self._unused.append(memory)
        return np.empty(max(size, 1), np.uint8).data

    def place(self, size: int, more: int) -> Path | None:
        """The folder for an array that grows by ``more`` bytes to ``size``; None: memory."""
        while self._freed:
            self.alive -= self._freed.popleft()
        full = self.memory is not None and self.alive + self.held + more > self.memory
        if full and size >= SMALL and self.folder is not None:
            return self.folder
        return self.shared if size >= MESSAGE else None

    def count(self, size: int) -> None:
        """``size`` more bytes are in memory."""
        self.alive += size

    def free(self, size: int) -> None:
        """``size`` bytes are not in this worker's memory any more."""
        self._freed.append(size)


class Growing:
    """One field's rows in the order in which they come, ``[rows, …]``; the first of them say the dtype and the rest of
    the shape.

    Memory for ``most`` rows is asked for at once: the system gives it as it is written, and nothing is copied
    together at the end.
    """

    def __init__(self, spool: Spool, most: int) -> None:
        self._spool, self._most = spool, most
        self._rows: Array | None = None
        self._counted = [0]
        self._file: _File | None = None
        self._taken = False
        self.used = 0

    def add(self, rows: Array) -> None:
        """Append a copy of ``rows``; once the others are taken it is too late for them.  Raises SpoolError."""
        if self._taken:
            return
        if self.used == 0:
            self.dtype, self.row = rows.dtype, rows.shape[1:]
        if self._file is None or not self._file.on_disk:
            folder = self._spool.place(self.used * rows[:1].nbytes + rows.nbytes, rows.nbytes)
            if folder is not None and (self._file is None or folder != self._file.folder):
                self._move(folder)
        if self._file is None:
            self._remember(rows)
        else:
            try:
                self._file.append(rows)
            except SpoolError as error:
                self._to_disk(error)
                self._file.append(rows)
        self.used += len(rows)

    def take(self, count: int) -> Array | Filed:
        """The first ``count`` rows (at least one), for good: whoever takes a file also removes it."""
        self._taken = True
        if self._file is None:
            assert self._rows is not None
            rows, self._rows = self._rows, None  # a plan may hold this object for long
            return rows[:count]
        self._file.hand_over()
        return Filed(str(self._file.path), self.dtype.name, (count, *self.row))

    def _remember(self, rows: Array) -> None:
        stop = self.used + len(rows)
        if self._rows is None or len(self._rows) < stop:
            old, counted = self._rows, self._counted[0]
            # Past the bound it is a file: no more is asked for than can lie in memory.
            bound, row = self._spool.memory, max(1, rows[:1].nbytes)
            most = self._most if bound is None else min(self._most, bound // row)
            self._rows = self._spool.array((max(most, stop, 2 * self.used), *self.row), self.dtype)
            self._counted = [counted]
            self._spool.count(counted)
            weakref.finalize(self._rows.base, _let_go, self._spool, self._counted).atexit = False
            if old is not None:
                self._rows[: self.used] = old[: self.used]
        self._rows[self.used : stop] = rows
        self._counted[0] += rows.nbytes
        self._spool.count(rows.nbytes)

    def _move(self, folder: Path) -> None:
        """To a file in ``folder``, with what there is."""
        try:
            new = _File(self._spool, folder)
            for piece in self._pieces():
                new.append(piece)
        except SpoolError as error:
            self._to_disk(error, folder)
        else:
            self._file, self._rows = new, None

    def _to_disk(self, error: SpoolError, folder: Path | None = None) -> None:
        """The shared ``folder`` (None: that of the file) has no room, as in many containers."""
        disk = self._spool.folder
        full = self._file.folder if folder is None and self._file is not None else folder
        if disk is None or full == disk:
            raise error
        self._move(disk)

    def _pieces(self) -> Iterator[Array]:
        if self._rows is not None:
            yield self._rows[: self.used]
        elif self._file is not None:
            yield from self._file.pieces()


def _let_go(spool: Spool, counted: list[int]) -> None:
    spool.free(counted[0])


class _File:
    """A file that only this user can read; gone with this object unless it was handed over.

    It is opened for every write: a file for each of a thousand requests would run into the limit of descriptors.
    """

    def __init__(self, spool: Spool, folder: Path) -> None:
        self.on_disk = folder != spool.shared
        self.path = folder / f"{os.getpid()}-{secrets.token_hex(16)}"
        self._spool, self.folder = spool, folder
        self._counted = [0]
        try:
            if self.on_disk:  # the other is there, or its driver is gone
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise self._fault(error) from error
        self._bytes = 0
        self._gone = weakref.finalize(self, _remove, self.path, spool, self._counted)

    def append(self, rows: Array) -> None:
        """All of ``rows`` or, with SpoolError, none of them."""
        view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        at = self._bytes
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                while view:
                    done = os.pwrite(fd, view, at)
                    view, at = view[done:], at + done
            finally:
                os.close(fd)
        except OSError as error:
            raise self._fault(error) from error
        if not self.on_disk:
            self._spool.count(at - self._bytes)
            self._counted[0] = at
        self._bytes = at

    def pieces(self) -> Iterator[Array]:
        for start in range(0, self._bytes, PIECE):
            try:
                yield np.fromfile(self.path, np.uint8, min(PIECE, self._bytes - start), offset=start)
            except OSError as error:
                raise self._fault(error) from error

    def hand_over(self) -> None:
        if self._gone.detach() is not None:
            self._spool.free(self._counted[0])

    def _fault(self, error: OSError) -> SpoolError:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        return SpoolError(f"rows of a read cannot be kept in {self.folder}: {what}")


def _remove(path: Path, spool: Spool, counted: list[int]) -> None:
    path.unlink(missing_ok=True)
    spool.free(counted[0])


def opened(filed: Filed) -> Array:
    """The rows of a file, mapped; its name goes now, its bytes with the last array that shows them.

    Where many are mapped already they are copied: a process has 65,530 mappings by default, and its memory is of them
    too.  Raises SpoolError where the file is gone.
    """
    # numpy and mmap keep a descriptor for each mapping; torch does not.  Shared, though the file is nobody else's: a
    # private mapping is refused where it is larger than the memory.
    size = int(np.prod(filed.shape, dtype=np.int64)) * np.dtype(filed.dtype).itemsize
    try:
        if os.stat(filed.path).st_size < size:  # torch would make it longer, or make one
            raise OSError(errno.EIO, "it is cut off")
        if len(_mapped) < MAPPINGS:
            flat = torch.from_file(filed.path, shared=True, size=size, dtype=torch.uint8).numpy()
            _mapped.add(filed.path)
            weakref.finalize(flat, _mapped.discard, filed.path).atexit = False
        else:
            flat = np.fromfile(filed.path, np.uint8, size)
        os.unlink(filed.path)
    except (OSError, RuntimeError) as error:
        raise SpoolError(f"rows of a read cannot be read from {filed.path}: {error}") from error
    rows: Array = flat.view(filed.dtype).reshape(filed.shape)
    return rows

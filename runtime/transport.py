"""Records on their way from a worker to the driver, and the folders that both know.

A worker in the driver's process gives its arrays as they are.  Another one sends one safetensors buffer with an index
in it; arrays that lie in files are named there and mapped by the driver.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from vtaps.runtime.faults import DELIVERED, Fault
from vtaps.runtime.live import RequestKey
from vtaps.runtime.records import Collected, Filed, Kept, ReadRows, Record, Scores
from vtaps.runtime.spool import SpoolError, opened
from vtaps.spec.rows import Interval, intersect, to_ranges

Array = npt.NDArray[Any]
Open = Callable[[Filed], Array]

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "vtaps-"
GATE = "gate"
"""The field of what a gate keeps, ``[rows, 1, 3]``."""


def record_of(found: Collected, open_file: Open = opened) -> Record:
    """The record of what a worker collected; where its files cannot be opened, that is its fault."""
    if found.fault is not None:
        return Record(fault=found.fault)
    try:
        return _record_of(found, open_file)
    except SpoolError as error:
        return Record(fault=Fault(DELIVERED, str(error)))


def _record_of(found: Collected, open_file: Open) -> Record:
    reads: dict[tuple[str, str], ReadRows] = {}
    scores: dict[str, Scores] = {}
    whole = dict(found.gated.values())
    for kept in found.kept:
        arrays = {name: open_file(v) if isinstance(v, Filed) else v for name, v in kept.values.items()}
        if GATE in arrays:
            scores[kept.read] = _scores(kept.positions, arrays[GATE][:, 0], whole[kept.read])
            continue
        for number, site in enumerate(kept.sites):
            values = {name: array[:, number] for name, array in arrays.items()}
            reads[kept.read, site] = ReadRows(kept.positions, values, kept.dtype)
    selected = {name: found.fired[name] for name in found.gated if name in found.fired}
    acted = {
        name: _acted(rows, scores.get(found.gated[name][0]), found.gated[name][1]) for name, rows in selected.items()
    }
    return Record(
        fired={**found.fired, **acted},
        reads=reads,
        metrics=found.metrics,
        overridden=found.overridden,
        selected=selected,
        gates={name.partition(".")[2]: told for name, told in scores.items()},
        cached=found.cached,
    )


def _scores(positions: npt.NDArray[np.int64], kept: Array, whole: bool) -> Scores:
    """``kept``: float32 ``[rows, 3]``, score, passed and what was decided on: of a ``whole`` request in the last
    row."""
    passed = kept[:, 1] != 0
    if whole:
        return Scores(positions, kept[:, 0], np.full(len(kept), passed[-1]), float(kept[-1, 2]))
    return Scores(positions, kept[:, 0], passed)


def _acted(rows: Sequence[Interval], scores: Scores | None, whole: bool) -> tuple[Interval, ...]:
    """Of the selected ``rows``, half-open ranges, those that the gate lets through."""
    if scores is None or not len(scores.positions):
        return ()
    if whole:
        return tuple(rows) if scores.passed[-1] else ()
    return tuple(intersect(rows, to_ranges(scores.positions[scores.passed])))


def pack(records: Iterable[tuple[RequestKey, Collected]]) -> bytes:
    """Arrays keep their dtype; names are numbers and the index says what each is."""
    arrays: dict[str, Array] = {}
    index: list[dict[str, Any]] = []

    def put(array: Array | Filed) -> Any:
        if isinstance(array, Filed):
            return [array.path, array.dtype, list(array.shape)]
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(array)
        return name

    for (key, child), found in records:
        index.append(
            {
                "key": key,
                "child": child,
                "fired": {name: list(ranges) for name, ranges in found.fired.items()},
                "overridden": list(found.overridden),
                "gated": dict(found.gated),
                "cached": list(found.cached),
                "fault": None if found.fault is None else found.fault.to_json(),
                "metrics": {name: [put(p), put(v)] for name, (p, v) in found.metrics.items()},
                "kept": [
                    [k.read, k.sites, put(k.positions), k.dtype, {f: put(a) for f, a in k.values.items()}]
                    for k in found.kept
                ],
            }
        )
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    return save(arrays)


def unpack(payload: bytes) -> dict[RequestKey, Collected]:
    arrays: Mapping[str, Array] = load(payload)

    def get(said: Any) -> Array | Filed:
        return arrays[said] if isinstance(said, str) else Filed(said[0], said[1], tuple(said[2]))

    out: dict[RequestKey, Collected] = {}
    for item in json.loads(arrays["index"].tobytes()):
        out[item["key"], item["child"]] = Collected(
            fired={name: tuple((a, b) for a, b in ranges) for name, ranges in item["fired"].items()},
            kept=tuple(
                Kept(read, tuple(sites), arrays[positions], {f: get(v) for f, v in values.items()}, dtype)
                for read, sites, positions, dtype, values in item["kept"]
            ),
            metrics={name: (arrays[p], arrays[v]) for name, (p, v) in item["metrics"].items()},
            overridden=tuple(item["overridden"]),
            gated={name: (str(gate), bool(whole)) for name, (gate, whole) in item["gated"].items()},
            cached=tuple((a, b) for a, b in item["cached"]),
            fault=None if item["fault"] is None else Fault.from_json(item["fault"]),
        )
    return out


class Folders:
    """The driver's side of its workers' files: ``spool`` on disk, made by the first worker that needs it, and for
    workers in other processes ``shared`` in memory.  Both go with :meth:`close`, or with this object.

    Raises OSError where shared memory cannot be used.
    """

    def __init__(self, spool: Path, *, others: bool) -> None:
        self.spool = spool
        self.shared, lock = _shared_folder() if others else (None, None)
        self._held = 0
        self._freed: deque[int] = deque()
        self._gone = weakref.finalize(self, _remove, spool, self.shared, lock)

    @property
    def held(self) -> int:
        """Bytes of the shared files whose arrays are still alive here."""
        while self._freed:
            self._held -= self._freed.popleft()
        return self._held

    def records(self, answer: bytes | Iterable[tuple[RequestKey, Record]]) -> dict[RequestKey, Record]:
        """The records in a worker's answer, whichever process it is in."""
        if not isinstance(answer, bytes):
            return dict(answer)
        return {key: record_of(found, self._open) for key, found in unpack(answer).items()}

    def _open(self, filed: Filed) -> Array:
        rows = opened(filed)
        if Path(filed.path).parent == self.shared:
            self._held += rows.nbytes
            # What shows a part of the rows keeps this array alive, not ``rows``.
            weakref.finalize(rows.base, self._freed.append, rows.nbytes).atexit = False
        return rows

    def close(self) -> None:
        """Safe to call twice.  Arrays that have been opened stay."""
        self._gone()


def _remove(spool: Path, shared: Path | None, lock: int | None) -> None:
    shutil.rmtree(spool, ignore_errors=True)
    if shared is not None and lock is not None:
        shutil.rmtree(shared, ignore_errors=True)
        os.close(lock)


def _shared_folder() -> tuple[Path | None, int | None]:
    """A new folder in shared memory with a lock that lasts as long as this process and its workers; folders whose
    processes were killed go.  None where the system has no shared memory, or no room there."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None, None
    _sweep()
    # It gets its name once it is locked: another engine may be sweeping.
    try:
        made = Path(tempfile.mkdtemp(prefix=".vtaps-", dir=SHARED_MEMORY))
    except OSError:
        return None, None
    lock = os.open(made / ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(SHARED_MEMORY / f"{PREFIX}{secrets.token_hex(16)}"), lock


def _sweep() -> None:
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

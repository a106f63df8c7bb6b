"""A run folder under every fault: a process with ``faults.c`` preloaded that forks a child for each case.

``python -m tests.results.faulty LIBRARY FOLDER WAY FIRST STEP`` goes through the calls FIRST, FIRST + STEP, … of a run
that nothing disturbs and prints what each case came to.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.results import make
from vtaps.runtime.records import Request
from vtaps.runtime.results.folder import RunFolder, WriteError
from vtaps.runtime.results.index import versions
from vtaps.runtime.results.load import RunError, load

NEVER = 1 << 40
COUNT, FAIL, FULL, KILL, SIGNAL = range(5)
WAYS = {
    "EIO": (FAIL, errno.EIO),
    "EINTR": (FAIL, errno.EINTR),
    "ENOSPC": (FULL, errno.ENOSPC),
    "SIGKILL": (KILL, 0),
    "SIGINT": (SIGNAL, 0),
}
LOCK = make.lock(
    reads={"stream": make.LOCK["reads"]["stream"], "average": make.LOCK["reads"]["average"]},
    arms={"base": make.LOCK["arms"]["base"] | {"reads": ["stream", "average"]}, "forced": make.LOCK["arms"]["forced"]},
)
BLOCKS = {"paris.block.py": "BLOCK = 1\n"}
REQUESTS: list[Request] = make.requests(LOCK)[:2]
ORDER = [r.key for r in REQUESTS]
VECTORS = {"mu": {make.SITES[0]: np.arange(4, dtype=np.float32)}}
REFUSED, WRITE_ERROR, INTERRUPTED, WRONG = 10, 11, 12, 13
"""How a child ends beside 0, a run that is whole."""


def run(path: Path, overwrite: bool = False) -> int:
    """What ``vtaps run`` does with a folder."""
    folder, found = RunFolder.open(path, LOCK, order=ORDER, blocks=BLOCKS, overwrite=overwrite)
    if folder is None:
        [refusal] = found
        assert refusal.code in ("VT404", "VT605"), refusal
        return REFUSED
    try:
        with folder:
            for request in REQUESTS:
                if request.key not in folder.done:
                    folder.add(make.finish(request, LOCK))
            folder.finish({"name": "by hand"}, token_text=str, vectors=VECTORS)
    except WriteError as error:
        assert str(path) in error.message, error.message
        assert (
            f" of {len(ORDER)} requests are kept there, each whole" in error.note and "the same command" in error.note
        ), error.note
        return WRITE_ERROR
    return 0


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def whole(path: Path) -> bool:
    """Whether a reader gets a run there, all of it; else it is refused by name."""
    try:
        found = load(path)
    except RunError as error:
        assert str(path) in str(error)
        return False
    if "lens" in found:  # the run that was there before
        assert found.requests.num_rows == 2 and found["lens"].values.shape == (8, 2, 3)
        return True
    assert found.requests["request"].to_pylist() == ORDER
    assert found.tokens.num_rows and found.metrics.num_rows
    assert found["stream"].values.shape == (4, 2, make.WIDTH) and found["average"].values.shape == (1, 2, make.WIDTH)
    return True


def forked(do: Callable[[], int]) -> int:
    """How a child that does this ends: its exit code, or minus the signal."""
    child = os.fork()
    if not child:
        try:
            code = do()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BaseException:
            traceback.print_exc()
            code = WRONG
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def case(library: Any, path: Path, way: str, number: int, plain: dict[str, bytes], old: dict[str, bytes]) -> str:
    """What came of a fault at call ``number``; empty where all is as it should be."""
    mode, code = WAYS[way]

    def disturbed() -> int:
        library.faults_arm(str(path).encode(), mode, number, code)
        try:
            return run(path, overwrite=bool(old))
        finally:
            library.faults_arm(b"", COUNT, -1, 0)

    def looked_at() -> int:
        found = whole(path)
        here = {n: d for n, d in content(path).items() if not n.startswith(("partial/", ".lock"))}
        if found and here not in (plain, old):
            print("what is read is neither of the two runs")
            return WRONG
        before = content(path)
        ended = run(path)
        if found and old and here == old != plain:
            assert ended == REFUSED and content(path).items() <= before.items()
            ended = run(path, overwrite=True)
        if ended == REFUSED and found:  # it was whole: nothing more is to be done
            ended = 0
        after = content(path)
        differ = sorted(n for n in after.keys() | plain.keys() if after.get(n) != plain.get(n))
        if ended or differ:
            print(f"the next start ended with {ended}, other files: {differ}")
            return WRONG
        return 0

    allowed = {
        "SIGKILL": (0, -signal.SIGKILL),
        "SIGINT": (0, INTERRUPTED),
    }.get(way, (0, REFUSED, WRITE_ERROR))
    ended = forked(disturbed)
    if ended not in allowed:
        return f"the run ended with {ended}"
    if forked(looked_at):
        return f"after a run that ended with {ended}"
    return ""


def main(library: str, folder: str, way: str, first: str, step: str) -> None:
    assert threading.active_count() == 1
    versions()
    faults: Any = ctypes.CDLL(library)
    faults.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int)
    faults.faults_seen.restype = ctypes.c_long
    home = Path(folder)
    overwriting = way.startswith("overwrite-")
    way = way.removeprefix("overwrite-")
    old = home / "old"
    forked(lambda: before(old))
    calls = home / "calls"

    def undisturbed() -> int:
        path = home / "plain"
        if overwriting:
            shutil.copytree(old, path)
        faults.faults_arm(str(path).encode(), COUNT, NEVER, 0)
        code = run(path, overwrite=overwriting)
        calls.write_text(str(faults.faults_seen()))
        return code

    assert forked(undisturbed) == 0
    plain = content(home / "plain")
    total = int(calls.read_text())
    wrong = {}
    for number in range(int(first), total, int(step)):
        path = home / f"run-{number}"
        if overwriting:
            shutil.copytree(old, path)
        if told := case(faults, path, way, number, plain, content(old) if overwriting else {}):
            wrong[number] = told
        shutil.rmtree(path, ignore_errors=True)
    print(json.dumps({"calls": total, "wrong": wrong}))


def before(path: Path) -> int:
    """A finished run of another lock, with a block and a read that the new one has not."""
    requests = make.requests()[:2]
    order = [r.key for r in requests]
    folder, _ = RunFolder.open(path, make.LOCK, order=order, blocks={"other.block.py": "B = 2\n"})
    assert folder is not None
    with folder:
        for request in requests:
            folder.add(make.finish(request))
        folder.finish({})
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])

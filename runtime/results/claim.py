"""What a folder holds before a run writes there, and the lock file that keeps two runs out of one folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtaps.codegen.lock import lock_digest
from vtaps.spec import digests

OURS = frozenset(
    {
        ".lock", "gates.parquet", "lock.json", "metrics.parquet", "partial", "plot.html", "reads", "requests.parquet",
        "run.json", "tokens.parquet", "vectors",
    }
)  # fmt: skip
"""Everything a run writes beside the blocks, whose names run.json and the plan say, and what is drawn of it there."""


@dataclass(frozen=True)
class Held:
    """What a folder holds: ``identity`` is the digest of lock and plan of the run in it.  ``failed``: a finished run
    with requests that failed, and the journal of the others."""

    kind: Literal["nothing", "unfinished", "finished", "failed", "foreign", "file"]
    identity: str | None = None
    blocks: tuple[str, ...] = ()


def bare(lock: Mapping[str, Any]) -> dict[str, Any]:
    """The lock as it lies beside the spec: without the lines of the spec, which a comment moves."""
    out = dict(lock)
    if "block" in out:
        out["block"] = {k: v for k, v in out["block"].items() if k != "lines"}
    for section in ("edits", "reads", "overrides", "metrics", *(["gates"] if "gates" in lock else [])):
        out[section] = {n: {k: v for k, v in d.items() if k != "line"} for n, d in lock[section].items()}
    return out


def identity(lock: Mapping[str, Any], order: Sequence[str]) -> str:
    """Two runs with one identity ask the same requests of the same program."""
    return digests.of_json([lock_digest(bare(lock)), list(order)])


def look(path: Path) -> Held:
    """What stands at ``path``, without touching it.  Raises OSError where it cannot be read."""
    if not path.is_dir():
        return Held("file" if path.exists() or path.is_symlink() else "nothing")
    run, plan = _mapping(path / "run.json"), _mapping(path / "partial" / "plan.json")
    if run is not None and run.get("run") == 1 and run.get("status") == "complete":
        again = plan is not None and bool(run.get("failed")) and plan.get("identity") == run.get("identity")
        return Held("failed" if again else "finished", run.get("identity"), _names(run.get("blocks")))
    if plan is not None and plan.get("plan") == 1:
        return Held("unfinished", plan.get("identity"), _names(plan.get("blocks")))
    # A run that was killed before it wrote its plan leaves these and nothing in them.
    left = {p.name for p in path.iterdir()} - {".lock"}
    if not left or (left == {"partial"} and all(p.name.startswith(".tmp-") for p in (path / "partial").iterdir())):
        return Held("nothing")
    return Held("foreign")


def _mapping(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _names(value: Any) -> tuple[str, ...]:
    """Plain file names only: a run.json must not make us delete outside its folder."""
    found = value if isinstance(value, list) else []
    return tuple(n for n in found if isinstance(n, str) and n == os.path.basename(n) and n not in ("", ".", ".."))


def clear(path: Path, held: Held, keep: frozenset[str] = frozenset({".lock", "partial"})) -> None:
    """Delete what a run wrote, run.json first, and nothing else."""
    for name in ("run.json", *sorted(OURS - keep - {"run.json"}), *held.blocks):
        target = path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


class FolderLock:
    """An advisory lock on a run folder; the system drops it when the process ends, however it ends."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self._path = path

    @staticmethod
    def take(folder: Path) -> FolderLock | None:
        """The lock, or None where another process holds it."""
        path = folder / ".lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            # The last holder may have removed the file between our open and our lock: then it guards nothing.
            try:
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    return FolderLock(fd, path)
            except FileNotFoundError:
                pass
            os.close(fd)

    def release(self) -> None:
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

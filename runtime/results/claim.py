"""What a folder holds before a run writes there, and the lock file that keeps two runs out of one folder."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

from vtaps.codegen.lock import lock_digest
from vtaps.spec import digests

RUN = 1
"""Version of run.json."""
PLAN = 1
"""Version of partial/plan.json and of the journal beside it."""

OURS = frozenset(
    {
        ".lock", "gates.parquet", "lock.json", "metrics.parquet", "partial", "plot.html", "reads", "requests.parquet",
        "run.json", "tokens.parquet", "vectors",
    }
)  # fmt: skip
"""Everything a run writes beside the blocks, whose names run.json and the plan say, and what is drawn of it there."""

WITHIN: Mapping[str, tuple[str, ...]] = {
    "reads": ("*/rows.parquet", "*/*.safetensors"),
    "vectors": ("*.safetensors",),
    "partial": ("plan.json", "*.safetensors", ".tmp-*.safetensors", ".tmp-plan.json"),
}
"""The files of its folders."""


@dataclass(frozen=True)
class Held:
    """What a folder holds: ``identity`` is the digest of lock and plan of the run in it; ``names`` what is there that
    is no run's, or the version of its format.  ``failed``: a finished run with requests that failed, and the journal of
    the others."""

    kind: Literal["nothing", "unfinished", "finished", "failed", "version", "foreign", "file"]
    identity: str | None = None
    blocks: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


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
    for found, what, version in ((run, "run", RUN), (plan, "plan", PLAN)):
        if found is not None and what in found and found[what] != version:
            return Held("version", names=(str(found[what]),))
    if run is not None and run.get("run") == RUN and run.get("status") == "complete":
        again = plan is not None and bool(run.get("failed")) and plan.get("identity") == run.get("identity")
        return Held("failed" if again else "finished", run.get("identity"), _names(run.get("blocks")))
    if plan is not None and plan.get("plan") == PLAN:
        return Held("unfinished", plan.get("identity"), _names(plan.get("blocks")))
    # A run that was killed before it wrote its plan leaves these and nothing in them.
    left = {p.name for p in path.iterdir()} - {".lock"}
    if not left or (left == {"partial"} and all(p.name.startswith(".tmp-") for p in (path / "partial").iterdir())):
        return Held("nothing")
    return Held("foreign", names=tuple(sorted(left)))


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
        if name in WITHIN:
            remove_written(path, name)
        else:
            target.unlink(missing_ok=True)
            target.with_name(f".tmp-{name}").unlink(missing_ok=True)


def remove_written(path: Path, name: str) -> None:
    """Delete the files that a run writes below its folder ``name``, and what is empty then.  Files of anybody else
    stay, and a link is let go of, never followed."""
    top = path / name
    if top.is_symlink():
        top.unlink()
        return
    for pattern in WITHIN[name]:
        for file in top.glob(pattern):
            file.unlink(missing_ok=True)
    for folder in (*top.glob("*/"), top):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


_inherited: WeakSet[FolderLock] = WeakSet()


class FolderLock:
    """An advisory lock on a run folder; the system drops it when the process ends, however it ends.

    A forked child does not keep it: vLLM's workers may outlive a driver that was killed.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self._path = path
        _inherited.add(self)

    @staticmethod
    def holder(folder: Path) -> int | None:
        """The process that holds the lock, as it says itself."""
        try:
            return int((folder / ".lock").read_text())
        except (OSError, ValueError):
            return None

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
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return FolderLock(fd, path)
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def release(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def _forked(self) -> None:
        """In a child: its copy goes, the lock stays its parent's."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _let_go_of_the_parent_s() -> None:
    for lock in list(_inherited):
        lock._forked()


os.register_at_fork(after_in_child=_let_go_of_the_parent_s)

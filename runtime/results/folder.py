"""The folder of one run: claimed, filled request by request, finished once.

While a run is on its way the folder holds ``partial/`` with the plan and one journal file a finished request; what a
reader wants is written out of the journal at the end, ``run.json`` last.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.codegen.lock import to_text
from vtaps.runtime.budgets import rows_kept
from vtaps.runtime.records import Failure, Finished
from vtaps.runtime.results.claim import PLAN, RUN, FolderLock, Held, bare, clear, identity, look, remove_written
from vtaps.runtime.results.expected import Lock, acts_nowhere
from vtaps.runtime.results.findings import Finding, collect
from vtaps.runtime.results.index import run_index, sealed
from vtaps.runtime.results.journal import (
    Entries,
    Entry,
    encode,
    file_name,
    read_entry,
    rows_of,
    sync_folder,
    to_json,
    write_atomically,
    write_entry,
)
from vtaps.runtime.results.means import RunMean, run_mean
from vtaps.runtime.results.reads import write_reads, write_vectors
from vtaps.runtime.results.tables import Layout, write_tables
from vtaps.spec.diagnostics import Diagnostic, Span


class WriteError(Exception):
    """The disk refused: ``message`` says where and why, ``note`` what is whole and how to go on."""

    def __init__(self, message: str, note: str) -> None:
        super().__init__(message)
        self.message, self.note = message, note


class RunFolder:
    """A run being written.  Made by :meth:`open`; a context manager that lets go of the folder."""

    def __init__(
        self,
        path: Path,
        lock: Lock,
        order: Sequence[str],
        blocks: Mapping[str, str],
        held: FolderLock,
        discard: Held | None,
    ) -> None:
        self.path = path
        self._lock = lock
        self._order = list(order)
        self._index = {key: i for i, key in enumerate(self._order)}
        self._blocks = dict(blocks)
        self._held = held
        self._discard = discard
        self._tried: Held | None = None
        self._closed = False
        self._done: set[str] = set()
        self.kept: dict[str, int] = {}
        """Read → rows of the requests that are whole on disk."""

    @staticmethod
    def open(
        path: str | Path,
        lock: Lock,
        *,
        order: Sequence[str],
        blocks: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> tuple[RunFolder | None, list[Diagnostic]]:
        """Claim ``path`` for a run of ``lock``.

        ``order`` lists the keys of all requests in the order of the results; ``blocks`` maps the file name of a
        block to its source.  An unfinished run of the same lock and order goes on where it stopped (see
        :attr:`done`), and so does a finished one some of whose requests failed; ``overwrite`` discards what a run,
        finished or not, left there, once the first request of this one is done.  VT605 where the folder belongs to
        something else or another process writes it, VT404 where it cannot be written; then it is left untouched.
        Raises ValueError where ``order`` repeats a key.
        """
        if len(set(order)) != len(order):
            raise ValueError("the order repeats a key")
        for name in blocks or ():
            if name != Path(name).name or not name.endswith(".py"):
                raise ValueError(f"{name!r} is not the name of a block file")
        path = Path(path)
        try:
            return _open(path, lock, order, blocks or {}, overwrite)
        except (OSError, ValueError) as e:
            what = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            return None, [_refusal("VT404", path, f"cannot write the run to {path}: {what}")]

    @property
    def spool(self) -> Path:
        """Where an engine may keep rows until their request is done: gone when the run ends, or goes on."""
        return _spool(self.path)

    @property
    def done(self) -> frozenset[str]:
        """The keys that are whole on disk."""
        return frozenset(self._done)

    def _start(self, found: Held) -> None:
        """Make ``partial/`` this run's: keep the whole requests of the same run, discard anything else."""
        partial = self.path / "partial"
        partial.mkdir(exist_ok=True)
        sync_folder(self.path)
        for file in partial.glob(".tmp-*"):
            if file != self.spool:
                file.unlink()
        if found.kind not in ("unfinished", "failed") or self._discard is not None:
            for file in partial.glob("*.safetensors"):
                file.unlink()
            wanted = identity(self._lock, self._order)
            plan = {"plan": PLAN, "identity": wanted, "blocks": sorted({*self._blocks, *found.blocks})}
            write_atomically(partial / "plan.json", to_json(plan))
        if found.kind == "failed" and self._discard is None:
            self._tried = found  # its results stay until there are others
        else:
            # Also where it goes on: it may have been killed while it cleared the folder, or while it wrote the results.
            clear(self.path, found)
        self._discard = None
        for key in self._order:
            try:
                entry = read_entry(self._journal(key))
            except FileNotFoundError:
                continue
            except ValueError:
                self._journal(key).unlink()
            else:
                self._count(key, entry)

    def _count(self, key: str, entry: Entry) -> None:
        self._done.add(key)
        for name, rows in rows_kept(entry).items():
            self.kept[name] = self.kept.get(name, 0) + rows

    def _journal(self, key: str) -> Path:
        return self.path / "partial" / file_name(self._index[key], key)

    def rows(self, key: str, read: str) -> tuple[list[int], dict[str, Any]] | None:
        """Positions and rows (site → ``[rows, width]``, bfloat16 as its bits) that a finished request kept of ``read``;
        None where it is not done or kept none."""
        return rows_of(self._journal(key), read) if key in self._done else None

    def mean(self, keys: Sequence[str], read: str) -> RunMean | None:
        """The mean that finished requests kept, over all of their rows; None where one of them is not done or no row
        was read."""
        if not set(keys) <= self._done:
            return None
        found = run_mean([self._journal(key) for key in keys], read)
        return found if found.count else None

    def add(self, finished: Finished) -> list[Diagnostic]:
        """Journal one finished request, whole or not at all, and say what is wrong with it.

        Raises ValueError for a key that is not of this run or already done, WriteError where the disk refuses.
        """
        key = finished.request.key
        if key not in self._index:
            raise ValueError(f"request {key!r} is not of this run")
        if key in self._done:
            raise ValueError(f"request {key!r} is already there")
        entry, arrays, findings = encode(self._lock, finished)
        with self._writing():
            if self._discard is not None:
                self._start(self._discard)
            write_entry(self._journal(key), entry, arrays)
        self._count(key, entry)
        return collect(findings, self._lock)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else error.strerror or str(error)
            whole = f"{len(self._done)} of {len(self._order)} requests are kept there, each whole"
            again = f"{'free some space and give' if full else 'give'} the same command again: it goes on with the rest"
            raise WriteError(f"results cannot be written to {self.path}: {why}", f"{whole}; {again}") from error

    def finish(
        self,
        engine: Mapping[str, Any],
        *,
        failed: Mapping[str, Failure] | None = None,
        not_run: Collection[str] = (),
        token_text: Callable[[int], str] | None = None,
        vectors: Mapping[str, Mapping[str, npt.NDArray[np.float32]]] | None = None,
    ) -> list[Diagnostic]:
        """Write the tables, the reads and ``run.json``, remove the journal, let go of the folder.  Where requests
        failed the journal stays, so that the same run tries them again.

        ``vectors`` are those that the run made of its reads: name → location → ``[width]``.

        ``engine`` is the engine's report, as JSON; ``failed`` maps the key of a request that failed to why;
        ``not_run`` are requests that were not started because a read's budget was kept;
        ``token_text`` gives the text of one token id.  Returns every finding of the run, in the order of the plan.
        Raises ValueError where a request is neither done nor failed, ShapeError where those of a read differ in shape,
        WriteError where the disk refuses.
        """
        failed = {k: v for k, v in (failed or {}).items() if k not in self._done}
        missing = [k for k in self._order if k not in self._done and k not in failed and k not in not_run]
        if missing:
            raise ValueError(f"{len(missing)} requests have not finished, the first is {missing[0]!r}")
        with self._writing():
            findings = self._write(engine, failed, token_text, vectors or {})
        # The run is whole: what is left of the journal, if anything, goes when the folder is opened again.
        with suppress(OSError):
            if failed:
                shutil.rmtree(self.spool, ignore_errors=True)
            else:
                _remove_partial(self.path)
            sync_folder(self.path)
        self._closed = True
        with suppress(OSError):
            self._held.release()
        return findings

    def _write(
        self,
        engine: Mapping[str, Any],
        failed: Mapping[str, Failure],
        token_text: Callable[[int], str] | None,
        vectors: Mapping[str, Mapping[str, npt.NDArray[np.float32]]],
    ) -> list[Diagnostic]:
        if self._discard is not None:
            self._start(self._discard)
        if self._tried is not None:
            # What is written from here on is of this finish: a run that is killed in it goes on from the journal.
            clear(self.path, self._tried)
            self._tried = None
        entries = Entries([self._journal(k) for k in self._order if k in self._done])
        layout = Layout(self._lock, entries.values())
        write_tables(self.path, layout, entries.items(), token_text)
        reads = write_reads(self.path, self._lock, entries)
        write_vectors(self.path, vectors)
        copies = {"lock.json": to_text(bare(self._lock)), **self._blocks}
        for name, text in copies.items():
            write_atomically(self.path / name, text.encode("utf-8", "surrogatepass"))
        info, counted = run_index(self.path, self._lock, self._order, entries, layout, reads, failed, self._blocks)
        findings = collect([*self._failures(failed), *_stored(entries), *_idle(self._lock, counted)], self._lock)
        info["identity"] = identity(self._lock, self._order)
        info["blocks"] = sorted(self._blocks)
        info["engine"] = dict(engine)
        if any(read.get("budget") for read in self._lock["reads"].values()):
            info["not_run"] = [k for k in self._order if k not in self._done and k not in failed]
        info["findings"] = [
            {"code": d.code, "severity": d.severity, "message": d.message, "file": d.span.file, "line": d.span.line}
            | ({"note": d.note} if d.note else {})
            for d in findings
        ]
        write_atomically(self.path / "run.json", to_json(sealed(info)))
        return findings

    def _failures(self, failed: Mapping[str, Failure]) -> list[Finding]:
        found = [(key, failed[key]) for key in self._order if key in failed]
        return [Finding(f.code, "request", f.arm, f"request {key} failed: {f.reason}", f.line) for key, f in found]

    def close(self) -> None:
        """Let go of the folder.  A run that journaled nothing leaves nothing behind; others stay, to be resumed."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            shutil.rmtree(self.spool, ignore_errors=True)
            if not self._done and self._discard is None and not (self.path / "run.json").exists():
                _remove_partial(self.path)
        with suppress(OSError):  # a finished run that is not replaced after all has nothing in it
            (self.path / "partial").rmdir()
        with suppress(OSError):
            self._held.release()
        if not self._done:
            with suppress(OSError):
                self.path.rmdir()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(
    path: Path, lock: Lock, order: Sequence[str], blocks: Mapping[str, str], overwrite: bool
) -> tuple[RunFolder | None, list[Diagnostic]]:
    wanted = identity(lock, order)
    found = look(path)
    refused = _refused(path, found, wanted, overwrite)
    if refused is not None:
        if found.kind == "finished":
            _tidy(path)
        return None, [refused]
    path.mkdir(parents=True, exist_ok=True)
    held = FolderLock.take(path)
    if held is None:
        by = FolderLock.holder(path)
        who = "another process" if by is None else f"process {by}"
        note = "wait for it to end, or name another folder"
        return None, [_refusal("VT605", path, f"{who} is writing the run in {path}", note)]
    try:
        # Another process may have finished or left a run between the look and the lock.
        found = look(path)
        discard = found if overwrite and found.kind != "nothing" else None
        run = RunFolder(path, lock, order, blocks, held, discard)
        refused = _refused(path, found, wanted, overwrite)
        if refused is not None:
            held.release()
            return None, [refused]
        # What a run that was killed left there.
        shutil.rmtree(run.spool, ignore_errors=True)
        if discard is None:
            run._start(found)
        return run, []
    except BaseException:
        held.release()
        raise


def _spool(path: Path) -> Path:
    return path / "partial" / ".tmp-spool"


def _remove_partial(path: Path) -> None:
    shutil.rmtree(_spool(path), ignore_errors=True)
    remove_written(path, "partial")


def _tidy(path: Path) -> None:
    """Remove what a run that was killed after it had written everything left beside it."""
    with suppress(OSError):
        if (path / "partial").exists() or (path / ".lock").exists():
            held = FolderLock.take(path)
            if held is not None:
                try:
                    _remove_partial(path)
                finally:
                    held.release()


def _refused(path: Path, held: Held, wanted: str, overwrite: bool) -> Diagnostic | None:
    if held.kind == "file":
        return _refusal("VT404", path, f"cannot write the run to {path}: there is a file in the way")
    if held.kind == "foreign":
        shown = ", ".join(held.names[:5]) + (f" and {len(held.names) - 5} more" if len(held.names) > 5 else "")
        note = "name an empty or a new folder"
        return _refusal("VT605", path, f"{path} holds files that are not a run: {shown}", note)
    if held.kind == "version":
        message = f"{path} holds a run of another version of vtaps (format {held.names[0]}; this one knows {RUN})"
        return _refusal("VT605", path, message, "name another folder")
    if overwrite:
        return None
    if held.kind == "finished" or (held.kind == "failed" and held.identity != wanted):
        same = "this" if held.identity == wanted else "another"
        note = "give --overwrite to replace it, or name another folder"
        return _refusal("VT605", path, f"{path} holds a finished run of {same} spec", note)
    if held.kind == "unfinished" and held.identity != wanted:
        note = "give --overwrite to discard it, or name another folder"
        return _refusal("VT605", path, f"{path} holds an unfinished run of another spec", note)
    return None


def _refusal(code: str, path: Path, message: str, note: str | None = None) -> Diagnostic:
    return Diagnostic(code, message, Span(str(path)), note=note)


def _stored(entries: Entries) -> Iterator[Finding]:
    for entry in entries.values():
        yield from (Finding(**f) for f in entry["findings"])


def _idle(lock: Lock, counted: Mapping[tuple[str, str, str], tuple[int, int, int]]) -> Iterator[Finding]:
    """Edits that an arm asks for and that no request of it had a row for: a steer that never fired."""
    for (section, name, arm), (fired, expected, requests) in counted.items():
        if section != "edit" or fired or expected or name not in lock["edits"]:
            continue
        entries = [e for p in lock["arms"][arm]["points"] for e in p["edits"] if e["edit"] == name]
        if all(acts_nowhere(lock["edits"][name], e) for e in entries):
            continue
        message = f"edit {name} never acted in arm {arm}: its rows select nothing in {requests} completions"
        yield Finding("VT311", f"edit {name}", arm, message, lock["edits"][name].get("line"))

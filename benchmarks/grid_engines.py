"""Engines of the grid at work: a process each, one alone or several whose batches take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from benchmarks import about
from benchmarks.grid_plan import Start
from benchmarks.grid_rows import COLUMNS, ROWS

LOG_CHARACTERS = 4000


class Stopped(Exception):
    """The engine is gone; the message says why, in a line."""


class EngineProcess:
    """One engine in a process that ends with :meth:`close`, and what it told so far.

    ``told`` is its part of the result: ``failed`` and ``log`` are in it once it is gone.
    """

    def __init__(self, start: Start, told: Mapping[str, Any], job: Mapping[str, Any], deadline: float | None) -> None:
        self.start, self._deadline, self._began = start, deadline, time.monotonic()
        self.told: dict[str, Any] = {**told, "cells": {}}
        folder = Path(job["folder"])
        job_file, self._log = folder / f"job-{start.column}.json", folder / f"child-{start.column}.log"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "benchmarks.grid", "child", str(job_file), str(theirs.fileno())]
        with self._log.open("w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                command,
                cwd=about.ROOT,
                env={**os.environ, **about.ENVIRONMENT, **job.get("environment", {})},
                stdout=out,
                stderr=out,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()

    @property
    def alive(self) -> bool:
        return "failed" not in self.told

    def ready(self) -> None:
        """Wait until the engine has started."""
        self._attempt(lambda: self.told.update(self._receive()))

    def serve(self, cell: str, repeat: int, warmup: int) -> None:
        """One batch; ``repeat`` counts from the first warm-up."""

        def ask() -> None:
            self._pipe.send((cell, repeat))
            found = self._receive()
            kept = self.told["cells"].setdefault(cell, {"seconds": [], "warmup": [], "tokens": 0, "digests": []})
            kept["tokens"] = found["tokens"]
            if repeat < warmup:
                kept["warmup"].append(found["seconds"])
            else:
                kept["seconds"].append(found["seconds"])
                kept["digests"].append(found["digest"])

        self._attempt(ask)

    def close(self) -> None:
        """End the process and all of its own; ``seconds`` is how long it was there."""
        self._pipe.close()
        try:
            self._process.wait(20 if self.alive else 0)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The engine core may be a process of the child's: the whole group ends here.
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self.told["seconds"] = round(time.monotonic() - self._began, 2)
        if not self.alive:
            del self.told["cells"]

    def _receive(self) -> dict[str, Any]:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        if not self._pipe.poll(left):
            raise Stopped("stopped at the end of the budget")
        told: dict[str, Any] = self._pipe.recv()
        return told

    def _attempt(self, work: Callable[[], None]) -> None:
        if not self.alive:
            return
        try:
            work()
        except (EOFError, OSError):
            self._failed(f"exit code {self._process.wait()}")
        except Stopped as error:
            self._failed(str(error))

    def _failed(self, reason: str) -> None:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        last = text.splitlines()[-1].strip() if text else "no word"
        self.told["failed"] = f"{reason}: {last}"[:400]
        self.told["log"] = text[-LOG_CHARACTERS:]


def measure(engines: Sequence[EngineProcess], warmup: int, repeats: int) -> None:
    """Serve every cell of every engine ``warmup + repeats`` times.

    The cells take turns, so that a machine that slows down slows all of them, and those with the same load follow each
    other: every engine's batch runs next to plain vLLM's.  Every other time the order is reversed.
    """
    for repeat in range(warmup + repeats):
        for load in _loads(engines):
            turn = [(e, c) for e in engines for c in e.start.cells if _load_of(e.start, c) == load]
            for engine, cell in turn if repeat % 2 == 0 else reversed(turn):
                engine.serve(cell, repeat, warmup)


def _loads(engines: Sequence[EngineProcess]) -> Iterator[str]:
    yield from dict.fromkeys(_load_of(e.start, c) for e in engines for c in e.start.cells)


def _load_of(start: Start, cell: str) -> str:
    return cell if COLUMNS[start.column].kind == "plain" else ROWS[cell].load

"""One engine of the grid, in a process of its own: it starts, serves the batches it is asked for, tells their times."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.grid_rows import COLUMNS, ROWS, Column, Due, Row, due, override_ids, prompt_ids, sampling
from benchmarks.grid_shapes import SHAPES, Shape, loads_of
from benchmarks.loads import Load
from vtaps.runtime.engine import Engine, plain_engine
from vtaps.runtime.records import Completion, Request

SAMPLED = 16
"""Columns of each delivered array that are summed, in every one of its rows."""


@dataclass(frozen=True)
class Job:
    """``cells``: rows (vtaps, peer) or loads (plain) to serve; ``folder`` holds the lock, the block and the prompts;
    ``settings`` are vLLM's engine arguments, ``environment`` what its process had set."""

    column: str
    start: int
    install: str
    cells: tuple[str, ...]
    shape: str
    model: str
    folder: str
    lock: str
    block: str
    settings: Mapping[str, Any]
    in_process: bool
    seed: int
    environment: Mapping[str, str]


@dataclass
class Tally:
    """What came out of one batch.  ``total``: the sum over ``SAMPLED`` columns of every delivered row, bfloat16 as
    its bits; ``generated``: request key → token ids."""

    tokens: int = 0
    keys: int = 0
    rows: int = 0
    fired: int = 0
    overridden: int = 0
    total: float = 0.0
    generated: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def take_tokens(self, key: str, ids: tuple[int, ...]) -> None:
        self.tokens += len(ids)
        self.generated[key] = ids

    def take(self, key: str, done: Completion) -> None:
        self.take_tokens(key, done.token_ids)
        record = done.record
        for read in record.reads.values():
            self.keys += 1
            self.rows += len(read.positions)
            for values in read.values.values():
                # A mean is one row of all of them.
                self.take_values(values, 1 if "mean" in read.values else len(read.positions))
        for ranges in record.fired.values():
            self.fired += sum(b - a for a, b in ranges)
        self.overridden += len(record.overridden)

    def take_values(self, values: Any, rows: int) -> None:
        """Raises ValueError for an array whose first axis is not ``rows``."""
        if len(values) != rows:
            raise ValueError(f"{len(values)} values for {rows} rows")
        if values.ndim > 1:
            values = values[..., :: max(1, values.shape[-1] // SAMPLED)]
        self.total += float(np.sum(values, dtype=np.float64))

    def held_against(self, wanted: Due) -> str | None:
        """What is missing or too much; None where everything came."""
        wrong = [
            f"{value:,} {name} were due, {getattr(self, name):,} came"
            for name, value in asdict(wanted).items()
            if getattr(self, name) != value
        ]
        if wanted.rows and not self.total:
            wrong.append("every value is zero")
        return "; ".join(wrong) or None

    def digest(self) -> str:
        """Of the token ids in the order of the requests, whatever cell they are of."""
        numbered = sorted((int(key.rpartition("/")[2]), ids) for key, ids in self.generated.items())
        return hashlib.sha256(json.dumps(numbered).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """The requests of one repeat of a cell."""

    cell: str
    row: Row | None
    load: Load
    prompts: Sequence[tuple[int, ...]]
    repeat: int

    def key(self, number: int) -> str:
        return f"{self.cell}/{self.repeat}/{number}"


Serve = Callable[[Batch], Tally]


def batch(job: Job, cell: str, repeat: int) -> Batch:
    shape = SHAPES[job.shape]
    row = None if COLUMNS[job.column].kind == "plain" else ROWS[cell]
    load = loads_of(shape)[row.load if row else cell]
    return Batch(cell, row, load, prompt_ids(load, shape, job.seed, repeat), repeat)


def measure(job: Job, serve: Serve, cell: str, repeat: int) -> dict[str, Any]:
    """``seconds``, ``tokens`` and a ``digest`` of the token ids of one batch.  Raises SystemExit where it brings other
    than what is due."""
    given = batch(job, cell, repeat)
    wanted = due(given.row, given.load, SHAPES[job.shape])
    gc.collect()
    started = time.perf_counter()
    tally = serve(given)
    wrong = tally.held_against(wanted)
    taken = time.perf_counter() - started
    wrong = wrong or _forced(given, tally, SHAPES[job.shape], job.seed)
    if wrong:
        raise SystemExit(f"{job.column}, {cell}: {wrong}")
    return {"seconds": round(taken, 6), "tokens": wanted.tokens, "digest": tally.digest()}


def _forced(given: Batch, tally: Tally, shape: Shape, seed: int) -> str | None:
    if given.row is None or given.row.uses != ("overrides", "override"):
        return None
    ids = tuple(override_ids(given.load, shape, seed))
    return None if all(got == ids for got in tally.generated.values()) else "other tokens than the override's came"


@contextmanager
def serving(job: Job) -> Iterator[tuple[Serve, dict[str, Any]]]:
    """An engine of the job's column: how it serves a batch, and what it says of itself."""
    column = COLUMNS[job.column]
    if column.kind == "peer":
        from benchmarks import grid_peer

        with grid_peer.serving(job.model, job.settings, SHAPES[job.shape]) as opened:
            yield opened
        return
    lock = json.loads((Path(job.folder) / job.lock).read_text(encoding="utf-8"))
    if column.kind == "plain":
        with _plain(job, column, lock) as opened:
            yield opened
        return
    block = Path(job.folder) / job.block
    with (
        TemporaryDirectory() as scratch,
        Engine(lock, Path(job.folder), block, Path(scratch), in_process=job.in_process) as engine,
    ):
        yield lambda given: _through(engine, given), dict(engine.report)


def _through(engine: Engine, given: Batch) -> Tally:
    tally = Tally()
    assert given.row is not None
    wanted = {**sampling(given.load), "detokenize": False}
    requests = [
        Request(given.key(i), given.row.name, i if given.load.same_prompt else 0, given.load.name, str(i), ids)
        for i, ids in enumerate(given.prompts)
    ]
    for finished in engine.run(requests, lambda _: wanted):
        tally.take(finished.request.key, finished.completions[0])
    return tally


@contextmanager
def _plain(job: Job, column: Column, lock: Mapping[str, Any]) -> Iterator[tuple[Serve, dict[str, Any]]]:
    frontend = plain_engine(lock, Path(job.folder), in_process=job.in_process, eager=column.eager)

    def serve(given: Batch) -> Tally:
        tally = Tally()
        wanted = {**sampling(given.load), "detokenize": False}
        for i, ids in enumerate(given.prompts):
            frontend.add(given.key(i), ids, wanted, None)
        while frontend.busy():
            for key, outputs in frontend.step():
                tally.take_tokens(key, outputs[0].token_ids)
        return tally

    try:
        yield serve, frontend.report()
    finally:
        frontend.close()


def _allocated() -> int:
    """Bytes of the device that this process's tensors hold; 0 where the engine core is another process."""
    import torch

    return int(torch.cuda.memory_allocated()) if torch.cuda.is_initialized() else 0


def _compiled_files() -> int:
    """Files of vLLM's compile cache: a start that finds its model there adds none."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    return sum(len(files) for _, _, files in os.walk(root / "torch_compile_cache"))


def main(job_file: Path, descriptor: int) -> None:
    """Start the engine of a job; ``descriptor`` is the caller's pipe.

    What goes out: what the engine says of itself, then :func:`measure` of each ``[cell, repeat]`` that comes in.  Ends
    when the pipe does.  Raises whatever ends the engine.
    """
    data = json.loads(job_file.read_text(encoding="utf-8"))
    job = Job(**{**data, "cells": tuple(data["cells"])})
    pipe = Connection(descriptor)
    began, before = time.monotonic(), _compiled_files()
    with serving(job) as (serve, report):
        pipe.send(
            {
                "start_seconds": round(time.monotonic() - began, 2),
                "compile_cache": {"before": before, "new": _compiled_files() - before},
                "engine": report,
                "allocated_bytes": _allocated(),
            }
        )
        while True:
            try:
                cell, repeat = pipe.recv()
            except EOFError:
                return
            pipe.send(measure(job, serve, cell, repeat))

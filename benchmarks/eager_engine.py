"""One engine of the eager benchmark, in a process of its own: start, warm up, serve, tell what it took as JSON.

usage: python -m benchmarks.eager_engine COLUMN SPEC OUT [--repeats N] [--profile FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.about import cores
from benchmarks.eager_account import accounted
from benchmarks.eager_columns import COLUMNS, LOADS, Column, layers_of, rows_expected
from benchmarks.loads import Load
from vtaps.check import check_file
from vtaps.codegen import lock as locks
from vtaps.compiling import Compiled, compile_plan
from vtaps.running import requests_of
from vtaps.runtime.engine import Engine, plain_engine
from vtaps.runtime.records import Finished, Request
from vtaps.spec.plan import Plan


@dataclass
class Received:
    """What came out of one load.  ``rows`` were delivered by reads (or edited, for a column that edits); ``total``
    is their float64 sum, ``tokens`` the sum of (index + 1) · id over every request's tokens."""

    rows: int = 0
    total: float = 0.0
    tokens: int = 0
    count: int = 0

    def take_tokens(self, ids: Iterable[int]) -> None:
        for at, token in enumerate(ids):
            self.tokens += (at + 1) * token
            self.count += 1

    def take(self, finished: Finished) -> None:
        done = finished.completions[0]
        self.take_tokens(done.token_ids)
        for read in done.record.reads.values():
            self.rows += len(read.positions)
            for values in read.values.values():
                self.total += float(values.sum(dtype=np.float64))
        for ranges in done.record.fired.values():
            self.rows += sum(b - a for a, b in ranges)


Serve = Callable[[list[Request]], Received]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("column", choices=COLUMNS)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="serve the measured part under cProfile; times then mean little")
    args = parser.parse_args()
    column = COLUMNS[args.column]
    result = check_file(args.spec)
    if result.plan is None or result.model_folder is None:
        raise SystemExit("\n".join(d.message for d in result.diagnostics))
    compiled, wrong = compile_plan(result.plan)
    if compiled is None:
        raise SystemExit("\n".join(d.message for d in wrong))
    layers = layers_of(result.model_folder)
    told = _with_engine(column, result.plan, compiled, args.spec.parent, layers, args.repeats, args.profile)
    args.out.write_text(json.dumps(told), encoding="utf-8")


def _with_engine(
    column: Column, plan: Plan, compiled: Compiled, folder: Path, layers: int, repeats: int, profile: Path | None
) -> dict[str, Any]:
    def sampling_of(request: Request) -> Mapping[str, Any]:
        return plan.arms[request.arm].sampling

    if not column.block:
        frontend = plain_engine(compiled.lock, folder)

        def serve_plain(requests: list[Request]) -> Received:
            for r in requests:
                frontend.add(r.key, r.prompt_token_ids, sampling_of(r), None)
            received = Received()
            while frontend.busy():
                for _, outputs in frontend.step():
                    received.take_tokens(outputs[0].token_ids)
            return received

        try:
            return _measure(column, plan, layers, repeats, profile, serve_plain, frontend.report())
        finally:
            frontend.close()

    with TemporaryDirectory() as scratch:
        block = Path(scratch) / locks.names("spec.yaml")[0]
        block.write_text(compiled.block.source, encoding="utf-8")
        with Engine(compiled.lock, folder, block, Path(scratch)) as engine:

            def serve(requests: list[Request]) -> Received:
                received = Received()
                for finished in engine.run(requests, sampling_of):
                    received.take(finished)
                return received

            return _measure(column, plan, layers, repeats, profile, serve, engine.report)


def _measure(
    column: Column,
    plan: Plan,
    layers: int,
    repeats: int,
    profile: Path | None,
    serve: Serve,
    report: Mapping[str, Any],
) -> dict[str, Any]:
    """Serve every load once unmeasured, then ``repeats`` times, the loads in turn, then once with clocks inside."""
    import torch

    every = list(requests_of(plan))
    profiler = cProfile.Profile() if profile else None
    times: dict[str, list[tuple[float, float]]] = {load.name: [] for load in LOADS}
    received: dict[str, Received] = {}
    inside: dict[str, dict[str, float]] = {}

    def once(load: Load, repeat: int) -> tuple[float, float]:
        requests = [replace(r, key=f"{r.key}/{repeat}") for r in every if r.arm == load.name]
        started, used = time.perf_counter(), time.process_time()
        got = serve(requests)
        _check(column, load, layers, got, received.setdefault(load.name, got))
        return time.perf_counter() - started, time.process_time() - used

    for load in LOADS:
        once(load, 0)
    if profiler:
        profiler.enable()
    for repeat in range(1, repeats + 1):
        for load in LOADS:
            times[load.name].append(once(load, repeat))
    if profiler:
        profiler.disable()
        profiler.dump_stats(str(profile))
    for load in LOADS:
        with accounted() as spent:
            taken, _ = once(load, repeats + 1)
        inside[load.name] = {**spent, "all": taken}
    return {
        "column": column.name,
        "seconds": {name: [wall for wall, _ in found] for name, found in times.items()},
        "processor_seconds": {name: [used for _, used in found] for name, found in times.items()},
        "inside": inside,
        "received": {name: asdict(got) for name, got in received.items()},
        "engine": dict(report),
        "threads": torch.get_num_threads(),
        "cores": cores(),
    }


def _check(column: Column, load: Load, layers: int, got: Received, first: Received) -> None:
    expected = rows_expected(column, load, layers)
    if (got.rows, got.count) != (expected, load.tokens):
        raise SystemExit(
            f"{column.name}, {load.name}: {got.rows} rows and {got.count} tokens came; "
            f"{expected} and {load.tokens} were due"
        )
    if got.tokens != first.tokens or not np.isclose(got.total, first.total, rtol=1e-6, atol=1e-3):
        raise SystemExit(f"{column.name}, {load.name}: a repeat gave other values: {got}, first {first}")


if __name__ == "__main__":
    main()

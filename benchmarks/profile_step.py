"""Where the host time of a step goes: one row of the grid on one engine in this process.

usage: python -m benchmarks.profile_step --row ROW --shape SHAPE [--column COLUMN] [--repeats N] [--top N]

First clocks around the engine's steps, without a profiler; then cProfile, which makes every call dearer: its table is
for finding functions, not for adding up.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.about import ENVIRONMENT, ROOT
from benchmarks.grid_child import Job, batch, serving
from benchmarks.grid_plan import compiled, starts
from benchmarks.grid_rows import COLUMNS, ROWS
from benchmarks.grid_shapes import SHAPES, work_folder, write_model
from vtaps.runtime.compat.frontend import Frontend

OURS = tuple(str(ROOT / name) for name in ("runtime", "vtaps", "spec", "codegen"))


WARMUP = 2


def clocked(step: Callable[[Frontend], Any], taken: list[float]) -> Callable[[Frontend], Any]:
    """``step``, its seconds put into ``taken``."""

    def clocked_step(frontend: Frontend) -> Any:
        began = time.perf_counter()
        try:
            return step(frontend)
        finally:
            taken.append(time.perf_counter() - began)

    return clocked_step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step")
    parser.add_argument("--row", choices=ROWS, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--column", choices=COLUMNS, default="vtaps_taps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=25, help="functions of vtaps, or kernels, to print")
    parser.add_argument("--device", action="store_true", help="what a GPU ran, instead of functions")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    shape = SHAPES[args.shape]
    work = work_folder(shape)
    model = write_model(shape, work / "model")
    start = starts((args.column,), (args.row,), "each", 1)[0][0]
    folder, lock, block = compiled(start, shape, model, work, shape.vllm, 0)
    job = Job(
        args.column, 0, "each", start.cells, args.shape, str(model), str(folder), lock, block, shape.vllm, True, 0, {}
    )
    cell = start.cells[0]
    with serving(job) as (serve, _):
        for repeat in range(WARMUP):
            serve(batch(job, cell, repeat))
        walls, steps, outside = [], [], []
        for repeat in range(args.repeats):
            given = batch(job, cell, WARMUP + repeat)
            taken: list[float] = []
            with patch.object(Frontend, "step", clocked(Frontend.step, taken)):
                began = time.perf_counter()
                serve(given)
                walls.append(time.perf_counter() - began)
            steps += taken
            outside.append(walls[-1] - sum(taken))
        given = batch(job, cell, WARMUP)
        profiler, traced = cProfile.Profile(), None
        if args.device:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as traced:
                serve(given)
        else:
            profiler.runcall(serve, given)
    count = len(taken)
    print(f"{args.column}, {args.row}: {count} steps, {given.load.tokens / median(walls):.1f} tok/s; medians in ms:")
    print(f"  a batch {median(walls) * 1e3:.3f}, outside its steps {median(outside) * 1e3:.3f}")
    print(f"  a step {median(steps) * 1e3:.3f}")
    if traced is None:
        print_functions(profiler, count, args.top)
    else:
        print_kernels(traced.key_averages(), count, args.top)


def print_kernels(events: Iterable[Any], steps: int, top: int) -> None:
    """What the device ran, in µs a step."""
    found = sorted(((e.self_device_time_total, e.count, e.key) for e in events), reverse=True)
    print(f"on the device, µs a step\n{'time':>9} {'each':>9} {'calls':>8}  kernel")
    for time_, calls, name in found[:top]:
        print(f"{time_ / steps:9.2f} {time_ / calls:9.2f} {calls / steps:8.2f}  {name[:90]}")
    print(f"{sum(t for t, *_ in found) / steps:9.2f} in all")


def print_functions(profiler: cProfile.Profile, steps: int, top: int) -> None:
    """The functions of vtaps (and of a block) with the most time of their own, in µs a step."""
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    ours = [(key, s) for key, s in stats.items() if key[0].startswith(OURS) or key[0].endswith(".block.py")]
    print(f"under cProfile, µs a step\n{'own':>9} {'with calls':>11} {'calls':>8}  function")
    for (file, line, name), (_, calls, own, whole, _callers) in sorted(ours, key=lambda x: -x[1][2])[:top]:
        short = os.path.relpath(file, ROOT) if file.startswith(str(ROOT)) else os.path.basename(file)
        print(f"{own / steps * 1e6:9.2f} {whole / steps * 1e6:11.2f} {calls / steps:8.2f}  {short}:{line} {name}")
    print(f"{sum(s[2] for _, s in ours) / steps * 1e6:9.2f} in all functions of vtaps")


if __name__ == "__main__":
    main()

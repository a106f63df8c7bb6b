"""What one launch costs: on the host through Triton's front end and directly, and on the device inside a CUDA graph.

    python -m benchmarks.launches [--layers 32] [--width 4096] [--rows 1]

Needs an NVIDIA GPU.  The graph holds, a layer, what stands around a tap in a model: a matrix product that streams its
weights, and a norm.  ``plain`` has no taps, ``idle`` a tap a layer with nothing to do, ``read`` one that keeps rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.about import versions
from vtaps.runtime import kernels
from vtaps.runtime.kernels import KEEP, Board, LocationProgram, Statement


def host_seconds(run: Callable[[], None], times: int = 2000) -> float:
    """Seconds of the host a call, the device never waited for."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(times):
        run()
        if i % 200 == 199:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def graph_seconds(layer: Callable[[int], None], layers: int, times: int = 200) -> float:
    """Median seconds of the device for one replay of ``layers`` layers."""
    for i in range(layers):
        layer(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(layers):
            layer(i)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in marks) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1)
    asked = parser.parse_args()
    n, width, rows = asked.layers, asked.width, asked.rows
    options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    board = Board.empty(max(rows, 16), 1, n, n, "cuda")
    memory = torch.zeros((rows, n, width), **options)
    for i in range(n):
        board.set_read(i, memory, i)
    programs = [LocationProgram(i, 0, width, (Statement(KEEP, 1, i),)) for i in range(n)]
    x = torch.randn((rows, width), **options)
    residual = torch.randn((rows, width), **options)
    weights = torch.randn((n, width, width), **options) / width**0.5
    scale = torch.ones(width, **options)

    def tap(i: int) -> None:
        kernels.launch(board, programs[i], x, residual)

    def layer(i: int, tapped: bool) -> None:
        x.copy_(torch.nn.functional.rms_norm(x @ weights[i], (width,), scale))
        if tapped:
            tap(i)

    answer: dict[str, Any] = {"layers": n, "width": width, "rows": rows}
    answer["host_us"] = round(host_seconds(lambda: tap(0)) * 1e6, 2)

    def forgetful() -> None:
        programs[0].started.clear()
        tap(0)

    answer["host_us_by_triton"] = round(host_seconds(forgetful) * 1e6, 2)
    for state in ("plain", "idle", "read"):
        board.rows.zero_()
        if state == "read":
            board.rows[:rows, 0] = kernels.LIVE
            board.rows[:rows, 1] = torch.arange(1, rows + 1, device="cuda")
        took = graph_seconds(lambda i, state=state: layer(i, state != "plain"), n)
        answer[f"{state}_us"] = round(took * 1e6, 2)
    print(json.dumps({**answer, "versions": versions()}))


if __name__ == "__main__":
    main()

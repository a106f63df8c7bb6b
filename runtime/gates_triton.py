"""The two launches of request gates beside a forward, on a GPU; :mod:`vtaps.runtime.gates` says what they do."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, no_type_check

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from vtaps.runtime import kernels

LIVE = tl.constexpr(kernels.LIVE)
GATE_WIDTH = tl.constexpr(kernels.GATE_WIDTH)
MAX, MEAN = tl.constexpr(0), tl.constexpr(1)
BLOCK: Final = 256


@triton.jit(do_not_specialize=["source", "effective", "seat"])
@no_type_check
def tell_rows(table, seats, stride, source, effective, seat):
    row = table + tl.program_id(0).to(tl.int64) * stride
    number = tl.load(row + seat).to(tl.int64)
    passed = (number > 0) & (tl.load(seats + (number - 1) * 3 + 2, mask=number > 0, other=0.0) != 0)
    acts = passed & (tl.load(row) == LIVE)
    tl.store(row + effective, tl.where(acts, tl.load(row + source), 0))


@triton.jit(do_not_specialize=["points", "fold", "seat", "point", "slot"])
@no_type_check
def fold_rows(
    table, seats, memory, bounds, stride, points, fold, seat, point, slot, REDUCE: tl.constexpr, SIZE: tl.constexpr
):
    row = table + tl.program_id(0).to(tl.int64) * stride
    asked = tl.load(row + fold)
    if asked == 0:
        return
    count = asked // 2
    fresh = asked % 2 != 0
    own = seats + (tl.load(row + seat).to(tl.int64) - 1) * 3
    last = memory + (tl.load(row + slot).to(tl.int64) - 1) * GATE_WIDTH
    many = tl.load(own + 1, mask=~fresh, other=0.0) + count
    start = -float("inf") if REDUCE == MAX else 0.0
    total = tl.load(own, mask=~fresh, other=start)
    # A score that is not a number says nothing of the request: it never passes.
    odd = (total != total).to(tl.int32)
    if REDUCE <= MEAN:
        for first in range(0, count, SIZE):
            at = first + tl.arange(0, SIZE)
            some = tl.load(last - at * GATE_WIDTH, mask=at < count, other=start).to(tl.float64)
            odd += tl.sum((some != some).to(tl.int32))
            if REDUCE == MAX:
                total = tl.maximum(total, tl.max(tl.where(some != some, start, some)))
            else:
                total += tl.sum(some)
        total = tl.where(odd > 0, float("nan"), total)
    else:
        total = tl.load(last).to(tl.float64)
    value = (total / many if REDUCE == MEAN else total).to(tl.float32)
    chosen = tl.load(row + point)
    passed = (value > tl.load(bounds + chosen)) & (value < tl.load(bounds + points + chosen))
    tl.store(own, total)
    tl.store(own + 1, many)
    tl.store(own + 2, passed.to(tl.float64))
    tl.store(last + 1, passed.to(tl.float32))
    tl.store(last + 2, value)


def tell(table: Tensor, seats: Tensor, columns: tuple[int, int, int]) -> None:
    """``table`` int32 ``[rows, columns]``, ``seats`` float64 ``[n, 3]``; ``columns``: source, effective, seat."""
    operands = (table.data_ptr(), seats.data_ptr(), table.stride(0), *columns)
    kernel = _started(tell_rows, table.device.index, table.stride(0))
    if not kernel:
        kernel.append(tell_rows[(table.shape[0],)](table, seats, table.stride(0), *columns, num_warps=1))
        return
    # Triton's own way to a kernel takes longer than the launch, and this one comes before every step.
    kernel[0][(table.shape[0], 1, 1)](*operands, stream=torch._C._cuda_getCurrentRawStream(table.device.index))


def fold(table: Tensor, seats: Tensor, memory: Tensor, bounds: Tensor, columns: tuple[int, ...], reduce: int) -> None:
    """``memory`` float32 ``[slots, 1, 3]``, ``bounds`` float32 ``[2, points]``; ``columns``: fold, seat,
    point, slot."""
    fold_rows[(table.shape[0],)](
        table, seats, memory, bounds, table.stride(0), bounds.shape[1], *columns, REDUCE=reduce, SIZE=BLOCK,
        num_warps=4,
    )  # fmt: skip


@cache
def _started(kernel: Any, device: int, stride: int) -> list[Any]:
    """The compiled kernel, once there is one; the row table's address never moves, its stride is compiled in."""
    return []

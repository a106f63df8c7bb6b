"""The one launch a tapped location costs on a GPU; :mod:`vtaps.runtime.kernels` says what it does and calls it.

Importing this file needs triton.  What is constant over a worker's life and shared by many locations (codes, width) is
compiled in; what tells locations apart (columns, descriptors, number) is an argument, so that the layers of a model
share one compilation.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, no_type_check

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from vtaps.runtime import kernels
from vtaps.runtime.kernels import ALIGNMENT, Board, LocationProgram

# A jitted function may use no global of another type.
KEEP32 = tl.constexpr(kernels.KEEP32)
ADD = tl.constexpr(kernels.ADD)
SCALE = tl.constexpr(kernels.SCALE)
ZERO = tl.constexpr(kernels.ZERO)
SET = tl.constexpr(kernels.SET)
ADD_KEEP = tl.constexpr(kernels.ADD_KEEP)
PROJECT_OUT = tl.constexpr(kernels.PROJECT_OUT)
AFFINE = tl.constexpr(kernels.AFFINE)
FEATURE = tl.constexpr(kernels.FEATURE)
GATE = tl.constexpr(kernels.GATE)
GATE_WIDTH = tl.constexpr(kernels.GATE_WIDTH)
PUT = tl.constexpr(kernels.PUT)
WORDS = tl.constexpr(kernels.WORDS)
MOST = tl.constexpr(kernels.DIRECTIONS)
PROOF = tl.constexpr(kernels.PROOF)
DESCRIPTORS = tl.constexpr(kernels.DESCRIPTORS)
SENTINELS = tl.constexpr(kernels.SENTINELS)


@triton.jit(do_not_specialize=["number"])
@no_type_check
def tap(
    rows,  # int32 [max_rows, 1 + columns]
    descriptors,  # int64 [n, WORDS]
    seen,  # int32 [locations]
    x,  # [rows, ≥ first + WIDTH]
    residual,  # like x, or None
    rows_stride,
    x_stride,
    residual_stride,
    first,
    number,
    words,  # one of each statement, see Statement.word
    CODES: tl.constexpr,
    MASKED: tl.constexpr,
    RANKS: tl.constexpr,
    EDITS: tl.constexpr,
    REPLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,  # divides what lies between two places of a read's memory
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows · vocabulary passes 2³¹
    block = tl.program_id(1)
    if row + block == 0:
        tl.atomic_add(seen + number, 1, sem="relaxed")
    table = rows + row * rows_stride
    state = tl.load(table)
    if state == 0:
        return
    proof = state == PROOF

    # What each statement finds in the tables: all of it before any of the row, so that the loads overlap.
    found = ()
    edited = proof & EDITS
    replaced = proof & REPLACES
    busy = edited
    for i in tl.static_range(len(CODES)):
        value = tl.load(table + words[i] // (2 * DESCRIPTORS))
        if CODES[i] >= ADD:
            index = tl.load(descriptors + words[i] // 2 % DESCRIPTORS * WORDS + 1).to(tl.pointer_type(tl.int32))
            chosen = tl.load(index + value, mask=(value > 0) & (state != PROOF), other=-1)
            active = chosen >= 0
            if CODES[i] == PUT:
                chosen = tl.load(table + words[i] // (2 * DESCRIPTORS) + 1, mask=active, other=0) - 1
                active = chosen >= 0
            if CODES[i] == GATE:
                # Of every row with a state it says what its edits do.
                busy |= state != 0
            else:
                edited |= active
                if CODES[i] > ADD:
                    replaced |= active
            found += ((active, value, chosen),)
        else:
            active = value > 0
            found += ((active, value - 1, value),)
        busy |= active
    if not busy:
        return

    cols = block * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    x_at = x + row * x_stride + first + cols
    dtype = x.dtype.element_ty
    sentinel = (number % SENTINELS + 1).to(tl.float32).to(dtype)
    nothing = tl.zeros([BLOCK], dtype)
    # Both stay in the model's dtype: what no statement selects is stored as it was loaded, to the bit.
    h = tl.where(proof, sentinel, tl.load(x_at, mask=inside & (state != PROOF), other=0.0))
    if residual is not None:
        r_at = residual + row * residual_stride + first + cols
        r = tl.load(r_at, mask=inside & (state != PROOF), other=0.0)

    for i in tl.static_range(len(CODES)):
        place = descriptors + words[i] // 2 % DESCRIPTORS * WORDS
        active = found[i][0]
        value = found[i][1]
        if CODES[i] == GATE:
            total = h.to(tl.float32)
            if residual is not None:
                total += r.to(tl.float32)
            own = tl.where(inside & active, total, 0.0)
            vectors = tl.multiple_of(tl.load(place + 2).to(tl.pointer_type(tl.float32)), 16)
            vector = vectors + found[i][2].to(tl.int64) * WIDTH + cols
            score = tl.sum(own * tl.load(vector, mask=inside & active, other=0.0))
            wiring = tl.load(place + 3).to(tl.pointer_type(tl.int32))
            if tl.load(wiring + 1) != 0:
                length = tl.sum(own * own)
                score = tl.where(length == 0, 0.0, tl.div_rn(score, tl.sqrt_rn(tl.where(length == 0, 1.0, length))))
            bounds = tl.load(place).to(tl.pointer_type(tl.float32))
            low = tl.load(bounds + value, mask=active, other=0.0)
            high = tl.load(bounds + tl.load(place + 5) + value, mask=active, other=0.0)
            passed = active & (score > low) & (score < high)
            slot = tl.load(table + tl.load(wiring)).to(tl.int64)
            memory = tl.load(place + 4).to(tl.pointer_type(tl.float32)) + (slot - 1) * GATE_WIDTH
            proven = (number % SENTINELS + 1).to(tl.float32)
            tl.store(memory, tl.where(proof, proven, score), mask=slot > 0)
            tl.store(memory + 1, tl.where(proof, proven, passed.to(tl.float32)), mask=slot > 0)
            tl.store(memory + 2, tl.where(proof, proven, score), mask=slot > 0)
            for k in range(tl.load(wiring + 2)):
                source = tl.load(table + tl.load(wiring + 3 + 2 * k))
                tl.store(table + tl.load(wiring + 4 + 2 * k), tl.where(passed, source, 0))
        elif CODES[i] >= ADD:
            here = inside & active
            if MASKED[i]:
                mask = tl.multiple_of(tl.load(place + 3).to(tl.pointer_type(tl.uint8)), 16)
                here = here & (tl.load(mask + cols, mask=here, other=0) != 0)
            if CODES[i] == PUT:
                memory = tl.multiple_of(tl.load(place).to(tl.pointer_type(dtype)), 16)
                slot = found[i][2].to(tl.int64) * tl.multiple_of(tl.load(place + 2), ALIGN)
                offset = tl.multiple_of(tl.load(place + 4), ALIGN)
                new = tl.load(memory + slot + offset + cols, mask=here, other=0.0)
            elif CODES[i] > SET:
                total = h.to(tl.float32)
                if residual is not None:
                    total += r.to(tl.float32)
                own = tl.where(here, total, 0.0)
                vectors = tl.multiple_of(tl.load(place + 2).to(tl.pointer_type(tl.float32)), 16)
                vector = vectors + found[i][2].to(tl.int64) * (WIDTH * RANKS[i]) + cols
                if CODES[i] == ADD_KEEP or CODES[i] == PROJECT_OUT or CODES[i] == AFFINE or CODES[i] == FEATURE:
                    coefficients = tl.load(place).to(tl.pointer_type(tl.float32))
                    coefficient = tl.load(coefficients + value, mask=active, other=0.0)
                if CODES[i] == ADD_KEEP:
                    moved = total + tl.load(vector, mask=inside & active, other=0.0) * coefficient
                    length = tl.sum(own * own)
                    kept_of = tl.where(here, moved, 0.0)
                    now = tl.sum(kept_of * kept_of)
                    ratio = tl.where(now > 0, tl.sqrt_rn(length / tl.where(now > 0, now, 1.0)), 1.0)
                    changed = moved * ratio
                elif CODES[i] == AFFINE:
                    ups = tl.multiple_of(tl.load(place + 6).to(tl.pointer_type(tl.float32)), 16) + cols
                    biases = tl.load(place + 7).to(tl.pointer_type(tl.float32))
                    changed = total
                    for k in range(RANKS[i]):
                        a = tl.load(vector + k * WIDTH, mask=inside & active, other=0.0)
                        b = tl.load(ups + k * WIDTH, mask=inside & active, other=0.0)
                        shift = tl.load(biases + k, mask=active, other=0.0)
                        changed = changed + coefficient * (tl.sum(own * a) + shift) * b
                elif CODES[i] == PROJECT_OUT:
                    changed = total
                    # An element of a tuple is no bound of a static range, but it prunes branches.
                    for k in tl.static_range(MOST):
                        if k < RANKS[i]:
                            u = tl.load(vector + k * WIDTH, mask=inside & active, other=0.0)
                            changed = changed - coefficient * tl.sum(own * u) * u
                elif CODES[i] == FEATURE:
                    decoders = tl.multiple_of(tl.load(place + 6).to(tl.pointer_type(tl.float32)), 16)
                    b_at = decoders + found[i][2].to(tl.int64) * WIDTH + cols
                    a = tl.load(vector, mask=inside & active, other=0.0)
                    b = tl.load(b_at, mask=inside & active, other=0.0)
                    limits = tl.load(place + 4).to(tl.pointer_type(tl.float32))
                    points = tl.load(place + 5)
                    bias = tl.load(limits + value, mask=active, other=0.0)
                    threshold = tl.load(limits + points + value, mask=active, other=0.0)
                    p = tl.sum(own * a) + bias
                    by = coefficient - tl.where(p > threshold, p, 0.0) + tl.zeros([BLOCK], tl.float32)
                    changed = total + by * b
                    here = here & (by != 0)
                else:
                    u = tl.load(vector, mask=inside & active, other=0.0)
                    bounds = tl.load(place + 4).to(tl.pointer_type(tl.float32))
                    points = tl.load(place + 5)
                    low = tl.load(bounds + value, mask=active, other=0.0)
                    high = tl.load(bounds + points + value, mask=active, other=0.0)
                    p = tl.sum(own * u)
                    by = tl.minimum(tl.maximum(p, low), high) - p + tl.zeros([BLOCK], tl.float32)
                    changed = total + by * u
                    here = here & (by != 0)
                new = changed.to(dtype)
            elif CODES[i] == ZERO:
                new = nothing
            else:
                coefficients = tl.load(place).to(tl.pointer_type(tl.float32))
                coefficient = tl.load(coefficients + value, mask=active, other=0.0)
                if CODES[i] == SCALE:
                    total = h.to(tl.float32)
                    if residual is not None:
                        total += r.to(tl.float32)
                    new = (total * coefficient).to(dtype)
                else:
                    vectors = tl.multiple_of(tl.load(place + 2).to(tl.pointer_type(tl.float32)), 16)
                    vector = vectors + found[i][2].to(tl.int64) * WIDTH
                    product = tl.load(vector + cols, mask=inside & active, other=0.0) * coefficient
                    if CODES[i] == ADD:
                        new = (h.to(tl.float32) + product).to(dtype)
                    else:
                        new = product.to(dtype)
            h = tl.where(here, new, h)
            if residual is not None and CODES[i] > ADD:
                r = tl.where(here, nothing, r)
        else:
            slot = value.to(tl.int64) * tl.multiple_of(tl.load(place + 1), ALIGN)
            offset = tl.multiple_of(tl.load(place + 2), ALIGN)
            if CODES[i] == KEEP32:
                memory = tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.float32)), 16)
                kept = h.to(tl.float32)
                if residual is not None:
                    kept += r.to(tl.float32)
            else:
                memory = tl.multiple_of(tl.load(place).to(tl.pointer_type(dtype)), 16)
                kept = h
                if residual is not None:
                    kept = (h.to(tl.float32) + r.to(tl.float32)).to(dtype)
            tl.store(memory + slot + offset + cols, kept, mask=inside & active)

    if EDITS:
        tl.store(x_at, h, mask=inside & edited)
    if residual is not None and REPLACES:
        tl.store(r_at, r, mask=inside & replaced)


_BLOCK: Final = 1024


def start(board: Board, program: LocationProgram, x: Tensor, residual: Tensor | None) -> None:
    """Launch ``program`` on ``x`` ``[rows ≥ 1, columns]``, checked by the caller.

    Triton's own way to a kernel looks at every operand and option for what it compiles in, on each launch.  Of ours
    only alignment, strides and dtype of the row can vary: they find the compiled kernel, which is launched directly.
    """
    rows, x_stride, x_at = board.rows, x.stride(0), x.data_ptr()
    r_stride, r_at = (0, None) if residual is None else (residual.stride(0), residual.data_ptr())
    block, blocks = _blocks(program.width, program.sums)
    r_align = None if r_at is None else r_at % ALIGNMENT
    key = (x.device.index, x.dtype, x_stride, x_at % ALIGNMENT, r_stride, r_align, rows.stride(0))
    kernel = program.started.get(key)
    options = (program.codes, program.masks, program.ranks, program.edits, program.replaces, program.width)
    if kernel is None:
        program.started[key] = tap[(x.shape[0], blocks)](
            rows, board.descriptors, board.seen, x, residual, rows.stride(0), x_stride, r_stride, program.first,
            program.number, program.words, *options, math.gcd(program.width, ALIGNMENT), block,
            num_warps=min(16, max(1, block // 256)),
            # A fused multiply-add would round once where the eager verbs round twice.
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    # What is compiled in is an operand here too, which nobody looks at.
    kernel[(x.shape[0], blocks, 1)](
        rows.data_ptr(), board.descriptors.data_ptr(), board.seen.data_ptr(), x_at, r_at, rows.stride(0), x_stride,
        r_stride, program.first, program.number, program.words, *options, 0, block,
        stream=torch._C._cuda_getCurrentRawStream(x.device.index),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _blocks(width: int, whole: bool) -> tuple[int, int]:
    """Columns of one program, and how many programs a row takes; ``whole``: one, since a sum goes over all of it."""
    block = 1 << (width - 1).bit_length()
    block = block if whole else min(_BLOCK, block)
    return block, -(-width // block)

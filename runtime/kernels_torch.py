"""What the statements of a launch do, in torch: the oracle of :mod:`vtaps.runtime.kernels_triton`, and the work itself
on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vtaps.runtime.kernels import (
    ADD,
    ADD_KEEP,
    AFFINE,
    FEATURE,
    KEEP32,
    PROJECT_OUT,
    PROOF,
    PUT,
    SCALE,
    SET,
    ZERO,
    Board,
    Statement,
)  # fmt: skip


def edit(board: Board, statement: Statement, hidden: Tensor, rest: Tensor | None, points: Tensor) -> None:
    """The verb on the rows whose point (int32 ``[rows]``, 0: off) is active at this location."""
    rows = points.nonzero().squeeze(1)
    if not rows.shape[0]:
        return
    coefficients_at, index_at, vectors_at, mask_at, bounds_at = board.descriptors[statement.descriptor].tolist()[:5]
    picked = points[rows]
    slots = board.rows[rows, statement.column + 1].long() if statement.code == PUT else None
    index = board.tensors[index_at].index_select(0, picked)
    active = index >= 0 if slots is None else (index >= 0) & (slots > 0)
    rows, picked, index = rows[active], picked[active], index[active]
    if not rows.shape[0]:  # there may be no vectors then
        return
    before = hidden.index_select(0, rows)
    other = None if rest is None else rest.index_select(0, rows)
    if slots is None:
        coefficient = board.tensors[coefficients_at].index_select(0, picked).unsqueeze(1)
    mask = board.tensors[mask_at].bool() if statement.masked else None
    here = torch.ones_like(before, dtype=torch.bool) if mask is None else mask.expand(before.shape)
    if slots is not None:
        after = _parts(board.tensors[coefficients_at], vectors_at, bounds_at, before).index_select(0, slots[active] - 1)
    elif statement.code > SET:
        total = before.float() if other is None else before.float() + other.float()
        own = total.where(here, 0.0)
        if statement.code == ADD_KEEP:
            moved = total + board.tensors[vectors_at].index_select(0, index) * coefficient
            length, now = own.square().sum(-1, keepdim=True), moved.where(here, 0.0).square().sum(-1, keepdim=True)
            after = moved * torch.where(now > 0, (length / now).sqrt(), 1.0)
        elif statement.code == AFFINE:
            up_at, bias_at = board.descriptors[statement.descriptor].tolist()[6:8]
            a, b, bias = board.tensors[vectors_at], board.tensors[up_at], board.tensors[bias_at]
            after = total
            for k in range(statement.rank):
                after = after + coefficient * ((own * a[k]).sum(-1, keepdim=True) + bias[k]) * b[k]
        elif statement.code == PROJECT_OUT:
            after = total
            for k in range(statement.rank):
                u = board.tensors[vectors_at].index_select(0, index * statement.rank + k)
                after = after - coefficient * (own * u).sum(-1, keepdim=True) * u
        elif statement.code == FEATURE:
            a = board.tensors[vectors_at].index_select(0, index)
            b = board.tensors[int(board.descriptors[statement.descriptor, 6])].index_select(0, index)
            bias, threshold = board.tensors[bounds_at].index_select(1, picked).unsqueeze(2)
            product = (own * a).sum(-1, keepdim=True) + bias
            by = coefficient - torch.where(product > threshold, product, 0.0)
            after = total + by * b
            here = here & (by != 0)
        else:
            u = board.tensors[vectors_at].index_select(0, index)
            low, high = board.tensors[bounds_at].index_select(1, picked).unsqueeze(2)
            product = (own * u).sum(-1, keepdim=True)
            clipped = torch.minimum(torch.maximum(product, low), high)
            after = total + (clipped - product) * u
            here = here & (clipped != product)
        after = after.to(before.dtype)
    elif statement.code == ZERO:
        after = torch.zeros_like(before)
    elif statement.code == SCALE:
        total = before.float() if other is None else before.float() + other.float()
        after = (total * coefficient).to(before.dtype)
    else:
        product = board.tensors[vectors_at].index_select(0, index) * coefficient
        after = (before.float() + product if statement.code == ADD else product).to(before.dtype)
    hidden.index_copy_(0, rows, torch.where(here, after, before))
    if rest is not None and other is not None and statement.code > ADD:
        rest.index_copy_(0, rows, other.masked_fill(here, 0.0))


def _parts(memory: Tensor, stride: int, offset: int, like: Tensor) -> Tensor:
    """A location's part of each slot of ``memory``, ``[slots, width]``."""
    if memory.dtype != like.dtype:
        raise ValueError(f"memory for {like.dtype} rows is {memory.dtype}")
    return memory.as_strided((memory.shape[0], like.shape[1]), (stride, 1), memory.storage_offset() + offset)


def read(
    board: Board,
    statement: Statement,
    hidden: Tensor,
    rest: Tensor | None,
    slots: Tensor,
    states: Tensor,
    proven: float,
) -> None:
    """Copy the rows whose slot (int32 ``[rows]``, 1-based, 0: off) is on; proof rows hold ``proven``."""
    rows = slots.nonzero().squeeze(1)
    if not rows.shape[0]:
        return
    address, stride, offset = board.descriptors[statement.descriptor].tolist()[:3]
    memory = board.tensors[address]
    dtype = torch.float32 if statement.code == KEEP32 else hidden.dtype
    if memory.dtype != dtype:
        raise ValueError(f"memory for {dtype} rows is {memory.dtype}")
    start = memory.storage_offset() + offset
    place = memory.as_strided((memory.shape[0], hidden.shape[1]), (stride, 1), start)
    value = hidden.index_select(0, rows)
    if rest is not None:
        value = value.float() + rest.index_select(0, rows).float()
    value = value.to(dtype).masked_fill((states[rows] == PROOF).unsqueeze(1), proven)
    place.index_copy_(0, slots[rows].long() - 1, value)


def gate(
    board: Board,
    statement: Statement,
    hidden: Tensor,
    rest: Tensor | None,
    points: Tensor,
    states: Tensor,
    proven: float,
) -> None:
    """Score the rows whose point (int32 ``[rows]``, 0: off) is on, keep those that have a slot, and write what the
    gated edits look at; proof rows hold ``proven`` and gate nothing."""
    bounds_at, index_at, vectors_at, wiring_at, memory_at = board.descriptors[statement.descriptor].tolist()[:5]
    slot_column, cosine, _, *pairs = board.tensors[wiring_at].tolist()
    table = board.rows[: len(points)]
    rows = points.nonzero().squeeze(1)
    index = board.tensors[index_at].index_select(0, points[rows])
    rows, index = rows[index >= 0], index[index >= 0]
    total = hidden.index_select(0, rows).float()
    if rest is not None:
        total = total + rest.index_select(0, rows).float()
    found = (total * board.tensors[vectors_at].index_select(0, index)).sum(-1)
    if cosine:
        length = total.square().sum(-1)
        found = torch.where(length == 0, 0.0, found / torch.where(length == 0, 1.0, length).sqrt())
    low, high = board.tensors[bounds_at].index_select(1, points[rows])
    scores = torch.zeros(len(points), device=hidden.device).index_copy_(0, rows, found)
    passed = torch.zeros(len(points), dtype=torch.bool, device=hidden.device)
    passed.index_copy_(0, rows, (found > low) & (found < high))
    on = states != 0
    for source, effective in zip(pairs[::2], pairs[1::2], strict=True):
        table[:, effective] = torch.where(on, table[:, source] * passed, table[:, effective])
    slots = table[:, slot_column].where(on, 0)
    kept = slots.nonzero().squeeze(1)
    value = torch.stack([scores, passed.float(), scores], -1)[kept]
    value = value.masked_fill((states[kept] == PROOF).unsqueeze(1), proven)
    board.tensors[memory_at].squeeze(1).index_copy_(0, slots[kept].long() - 1, value)

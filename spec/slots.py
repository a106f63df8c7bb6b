"""The slots of a read on the taps engine: how many rows of a step they must hold, and the bytes that takes.

A slot holds one row of one location while a step's forward runs; the rows leave for the host after the step.
"""

from __future__ import annotations

from collections.abc import Iterable

STEPS_HELD = 2
"""Slots are there for this many steps, so that one step is written while the one before still leaves."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def slot_rows(step_rows: int, max_num_seqs: int, max_num_batched_tokens: int | None) -> int:
    """The most rows that a read selects in one step.

    ``step_rows``: of one request.  ``max_num_seqs``: requests that are alive at once.  ``max_num_batched_tokens``:
    tokens of one step, None where that is not known.
    """
    rows = max_num_seqs * step_rows
    return rows if max_num_batched_tokens is None else min(rows, max_num_batched_tokens)


def slot_bytes(kind: str, widths: Iterable[int], dtype: str, rows: int) -> int:
    """Bytes on the device for ``rows`` rows a step of a read at locations of these ``widths``.

    Rows, and those that a lens is taken of, are held in the model's ``dtype``.  Norms, dot products and means need the
    unrounded stream, so their rows are held whole in float32.
    """
    item = ITEM_BYTES[dtype] if kind in ("rows", "lens") else 4
    return STEPS_HELD * rows * sum(widths) * item

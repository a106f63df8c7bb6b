"""The slots of a read on the taps engine: how many rows of a step they must hold, and the bytes that takes.

A slot holds one row of one location while a step's forward runs; the rows leave for the host after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HELD_STEPS = 2
"""Slots are there for this many steps at least, so that one step is written while the one before still leaves."""

GATHERED_STEPS = 64
GATHERED_BYTES = 64 << 20
"""Where a step selects little, slots are there for up to this many steps and bytes: rows then leave many together."""

GATE_BYTES = 12

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def slot_rows(step_rows: int, max_num_seqs: int, max_num_batched_tokens: int | None) -> int:
    """The most rows that a read selects in one step.

    ``step_rows``: of one request.  ``max_num_seqs``: requests that are alive at once.  ``max_num_batched_tokens``:
    tokens of one step, None where that is not known.
    """
    rows = max_num_seqs * step_rows
    return rows if max_num_batched_tokens is None else min(rows, max_num_batched_tokens)


def slot_count(rows: int, row_bytes: int) -> int:
    """The slots of a read that selects at most ``rows`` rows, each of ``row_bytes``, in a step."""
    gathered = min(GATHERED_STEPS * rows, GATHERED_BYTES // max(1, row_bytes))
    return max(HELD_STEPS * rows, gathered)


def allotted(needs: Mapping[str, tuple[int, int]], allowed: int | None) -> dict[str, int]:
    """The slots of each read; ``needs``: its (rows of one step, bytes of a row).  Rows gather only where the slots of
    all reads then take at most ``allowed`` bytes; else each has HELD_STEPS × rows."""
    gathered = {name: slot_count(rows, size) for name, (rows, size) in needs.items()}
    if allowed is None or sum(gathered[name] * size for name, (_, size) in needs.items()) <= allowed:
        return gathered
    return {name: HELD_STEPS * rows for name, (rows, _) in needs.items()}


def row_bytes(kind: str, widths: Iterable[int], dtype: str, stored: str | None = None) -> int:
    """Bytes on the device of one row of a read at locations of these ``widths``.

    Rows, and those that a lens or an SAE is taken of, are held in the model's ``dtype``.  Norms, dot products and means
    need the unrounded stream, so their rows are held whole in float32, as are those that are ``stored`` in it.  A gate
    keeps three float32 numbers.
    """
    if kind == "gate":
        return GATE_BYTES
    return sum(widths) * (ITEM_BYTES[dtype] if in_model_dtype(kind, stored) else 4)


def in_model_dtype(kind: str, stored: str | None) -> bool:
    """Whether the slots of a read of ``kind``, whose rows are ``stored`` in some dtype, have the model's dtype; else
    they are float32."""
    return kind in ("lens", "features") or (kind == "rows" and stored != "float32")

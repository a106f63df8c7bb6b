"""Sizes of memory: as a spec writes them, and as a person reads them."""

from __future__ import annotations

from fractions import Fraction

UNITS = {
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def parse_size(written: int | str) -> int:
    """Bytes of ``512 MiB``, ``1.5 GB`` or a whole number of bytes; the schema has held the text to that form."""
    if isinstance(written, int):
        return written
    unit = written.lstrip("0123456789. ")
    return int(Fraction(written.removesuffix(unit).strip()) * UNITS[unit])


def exact(size: int) -> int | str:
    """``4 GiB`` where a binary unit divides the bytes, else the bytes: one spelling for each size."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}"
    return size


def human(size: int) -> str:
    """Bytes as ``1.5 MiB``, rounded."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def row_counts(rows: list[int]) -> str:
    """``8 rows``, or ``3 sizes, 1 … 64 rows``."""
    return f"{rows[0]} rows" if len(rows) == 1 else f"{len(rows)} sizes, {min(rows)} … {max(rows)} rows"

"""How the rows of a read are stored: their dtype, a scale a row, and files of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.document import Document, NodePath
from vtaps.spec.sizes import exact, parse_size

STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
LARGEST = {"float16": 65504.0, "float8_e4m3": 448.0}
"""The largest number of a dtype that can have a scale: a row's largest magnitude is scaled to it."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class Store:
    """``dtype``: None is the model's.  ``scaled``: each row is divided by a float32 number of its own, which is stored
    beside it.  A file holds at most ``shard_bytes`` of rows, or ``shard_rows`` rows; None for both: one file a site."""

    dtype: str | None = None
    scaled: bool = False
    shard_bytes: int | None = None
    shard_rows: int | None = None

    def row_bytes(self, width: int, model: str) -> int:
        """Bytes of a row of ``width`` numbers; ``model``: the model's dtype."""
        return width * STORED_BYTES[self.dtype or model] + (SCALE_BYTES if self.scaled else 0)

    def to_json(self) -> dict[str, Any]:
        """As the language writes it, nothing left out that was said."""
        out: dict[str, Any] = {"dtype": self.dtype or "auto"}
        if self.scaled:
            out["scale"] = "per_row"
        if self.shard_bytes is not None:
            out["shard"] = exact(self.shard_bytes)
        if self.shard_rows is not None:
            out["shard"] = {"rows": self.shard_rows}
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Store:
        """A mapping that has been held against the schema."""
        shard, dtype = data.get("shard"), data.get("dtype", "auto")
        rows = int(shard["rows"]) if isinstance(shard, Mapping) else None
        size = parse_size(shard) if isinstance(shard, int | str) else None
        return Store(None if dtype == "auto" else dtype, data.get("scale") == "per_row", size, rows)


def check_budget(kind: str, where: NodePath, doc: Document) -> list[Diagnostic]:
    """VT347 where a budget has no rows to count."""
    if kind != "mean":
        return []
    message = "`budget` counts the rows that are kept, and a mean keeps none"
    return [Diagnostic("VT347", message, doc.key(*where, "budget"))]


def check_store(store: Store, kind: str, where: NodePath, doc: Document) -> list[Diagnostic]:
    """VT345 where a read of this ``kind`` cannot be stored so."""
    at = (*where, "store")
    if kind != "rows":
        message = f"`store` is for reads that keep rows; this one keeps what {kind!r} makes of them"
        return [Diagnostic("VT345", message, doc.key(*at))]
    if store.dtype == "float8_e4m3" and not store.scaled:
        message = "float8_e4m3 holds numbers up to 448 and small ones with few digits: it needs a scale"
        return [Diagnostic("VT345", message, doc.at(*at, "dtype"), note="write `scale: per_row` beside it")]
    if store.scaled and store.dtype not in LARGEST:
        message = (
            f"`scale` has no use with {store.dtype or 'the dtype of the model'}: it is for {' and '.join(LARGEST)}"
        )
        return [Diagnostic("VT345", message, doc.key(*at, "scale"))]
    return []

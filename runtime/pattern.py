"""Attention probabilities out of the queries and keys of a request, when it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.errors import EngineError
from vtaps.runtime.program import PatternEntry
from vtaps.runtime.records import ReadRows, Record
from vtaps.runtime.results.tensors import as_float32
from vtaps.spec.pattern import KEYS, QUERIES, part_of

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Attention:
    """What an attention layer does.  ``softcap`` bounds the logits, ``window`` is how many keys a row sees, itself
    included; 0: no such thing."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float = 0.0
    window: int = 0


def attended(
    patterns: Mapping[str, PatternEntry], widths: Mapping[str, int], workers: Sequence[Mapping[str, Any]]
) -> dict[str, Attention]:
    """By module, as the workers tell; raises EngineError (VT346) where the probabilities are not known from queries and
    keys."""
    # Of several stages each has layers of its own; ranks of one say the same.
    told: dict[str, Any] = {}
    for worker in reversed(workers):
        told |= worker.get("attention") or {}
    out = {}
    for name, entry in patterns.items():
        for site, (module, query, key) in entry.sites.items():
            facts = told.get(module) or {"refused": f"the model has no {module}"}
            if "refused" in facts:
                raise EngineError("VT346", f"reads.{name}: {site} is not known: {facts['refused']}")
            # A rank has some of the heads.
            heads, kv_heads = (widths[s] // facts["head_size"] for s in (query, key))
            out[module] = Attention(**{**facts, "heads": heads, "kv_heads": kv_heads})
    return out


def probabilities(queries: Floats, keys: Floats, positions: Ints, heads: Sequence[int], attention: Attention) -> Floats:
    """What rows at ``positions`` ``[n]`` attend to, ``[n, heads, keys]`` float32, the softmax of scaled dot products.

    ``queries`` ``[n, heads × head size]`` are those of the rows, ``keys`` ``[keys, KV heads × head size]`` those of all
    positions from 0 on.  Keys outside of a window have 0; what is behind a row's own position is NaN.
    """
    size, count = attention.head_size, len(keys)
    distance = positions[:, None] - np.arange(count)
    seen = distance >= 0
    hidden = ~seen if not attention.window else ~seen | (distance >= attention.window)
    out = np.empty((len(positions), len(heads), count), np.float32)
    for number, head in enumerate(heads):
        of = head * attention.kv_heads // attention.heads
        logits = queries[:, head * size : (head + 1) * size] @ keys[:, of * size : (of + 1) * size].T
        logits *= np.float32(attention.scale)
        if attention.softcap:
            logits = np.tanh(logits / np.float32(attention.softcap)) * np.float32(attention.softcap)
        logits[hidden] = -np.inf
        logits -= logits.max(-1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(-1, keepdims=True)
        logits[~seen] = np.nan
        out[:, number] = logits
    return out


def with_patterns(record: Record, patterns: Mapping[str, PatternEntry], attention: Mapping[str, Attention]) -> Record:
    """The record with each pattern in the place of the queries and keys that it is made of.

    A row whose keys did not all come has no pattern: it is then missing, and reported as such.
    """
    if not patterns:
        return record
    reads = {key: rows for key, rows in record.reads.items() if part_of(key[0]) == key[0]}
    for name, entry in patterns.items():
        for site, (module, query, key) in entry.sites.items():
            q, k = record.reads.get((name + QUERIES, query)), record.reads.get((name + KEYS, key))
            if q is None or k is None:
                continue
            whole = int(np.argmin(np.append(k.positions == np.arange(len(k.positions)), False)))
            chosen = q.positions < whole
            positions = q.positions[chosen]
            if not len(positions):
                continue
            count = int(positions[-1]) + 1
            values = probabilities(_numbers(q)[chosen], _numbers(k)[:count], positions, entry.heads, attention[module])
            fields = {"pattern": values, "keys": (positions + 1).astype(np.int32)}
            reads[name, site] = ReadRows(positions, fields, "float32")
    return replace(record, reads=reads)


def _numbers(rows: ReadRows) -> Floats:
    values = rows.values["rows"]
    return as_float32(values) if rows.dtype == "bfloat16" else values.astype(np.float32)

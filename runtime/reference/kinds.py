"""How far what a read or a metric gave is from the reference, each by its kind, relative to the size of the row.

A kind of the language stands in :data:`READS` or :data:`METRICS` with its comparison, or with the reason why it has
none; a test fails for one that does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import MetricEntry, Program, ReadEntry, SiteEntry
from vtaps.runtime.records import ReadRows
from vtaps.runtime.reference.saes import encode
from vtaps.runtime.reference.verbs import NotChecked
from vtaps.runtime.results.tensors import E4M3, as_float32

Floats = npt.NDArray[Any]
Errors = npt.NDArray[np.float64]
"""float64 ``[n]``, one a row: the largest difference over the row's size.  Infinite where shapes differ."""


@dataclass(frozen=True)
class Context:
    """``lens``: rows ``[n, width]`` → logits ``[n, vocab]`` of the reference; ``growth`` ``[n]``: what the row's stream
    has been, as a multiple of what it is."""

    program: Program
    entry: ReadEntry
    site: SiteEntry
    lens: Callable[[Floats], Floats]
    growth: Errors


def field(rows: ReadRows, name: str) -> Floats:
    """One field's values; bfloat16 and what was stored with a scale as float32."""
    values = rows.values[name]
    if rows.dtype == "bfloat16" and values.dtype == np.uint16:
        return as_float32(values)
    if name == "rows" and "scale" in rows.values:
        numbers = E4M3[values] if rows.dtype == "float8_e4m3" else values.astype(np.float32)
        whole: Floats = numbers * rows.values["scale"][:, None]
        return whole
    return values


def rounding(rows: ReadRows, want: Floats) -> Floats:
    """How far each number that is stored in fewer bits may be from ``want``, float64 of its shape: half of the distance
    to the next one that the dtype has, by IEEE 754's and OCP's definitions of float16 and float8."""
    size = np.abs(want.astype(np.float64))
    largest_of = size.max(-1, keepdims=True, initial=0.0)
    scaled = "scale" in rows.values
    if rows.dtype == "float8_e4m3" and scaled:
        coarse: Floats = np.maximum(size / 16, largest_of / (448 * 1024))
        return coarse
    if rows.dtype != "float16":
        return np.zeros_like(size)
    least = np.maximum(size / 2048, largest_of * 2.0**-40 if scaled else 2.0**-25)
    # What float16 cannot hold is infinite there.
    return least if scaled else np.where(size > 65504, np.inf, least)


def apart(got: Floats, want: Floats, size: Errors) -> Errors:
    """``|got − want|`` at its largest in each row, over ``size`` ``[n]``."""
    if got.shape != want.shape:
        return np.full(max(len(want), 1), np.inf)
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).reshape(len(want), -1).max(1, initial=0.0)
    out = np.divide(difference, size, out=np.where(difference > 0, np.inf, 0.0), where=size > 0)
    return np.where(np.isnan(out), np.inf, out)


def largest(rows: Floats) -> Errors:
    found: Errors = np.abs(rows.astype(np.float64)).reshape(len(rows), -1).max(1, initial=0.0)
    return found


def _rows(got: ReadRows, want: Floats, of: Context) -> Errors:
    return _stored(field(got, "rows"), want, rounding(got, want), largest(want) * of.growth)


def _stored(got: Floats, want: Floats, allowed: Floats, size: Errors) -> Errors:
    """:func:`apart`, where each number may be off by what is ``allowed``."""
    if got.shape != want.shape or not allowed.any():
        return apart(got, want, size)
    wide = want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.maximum(np.abs(got.astype(np.float64) - wide) - allowed, 0.0)
    # Infinite where that is right.
    off = np.where(np.isinf(got) & (np.sign(got) == np.sign(wide)) & np.isinf(allowed), 0.0, off)
    return apart(off, np.zeros_like(off), size)


def _mean(got: ReadRows, want: Floats, of: Context) -> Errors:
    if not len(want):
        return np.zeros(0)
    if int(got.values["count"][0]) != len(want):
        return np.full(1, np.inf)
    size = np.array([(largest(want) * of.growth).mean()])
    return apart(field(got, "mean"), want.astype(np.float64).mean(0, keepdims=True), size)


def _norm(got: ReadRows, want: Floats, of: Context) -> Errors:
    length = np.linalg.norm(want.astype(np.float64), axis=1)
    return apart(field(got, "norm"), length, length * of.growth)


def _project(got: ReadRows, want: Floats, of: Context) -> Errors:
    x = want.astype(np.float64)
    vectors = np.stack([of.program.load_vector(v, of.site).astype(np.float64) for v in of.entry.vectors])
    # The product may cancel to nothing; its terms are as large as the lengths say.
    size = np.linalg.norm(x, axis=1) * np.linalg.norm(vectors, axis=1).max() * of.growth
    return apart(field(got, "project"), x @ vectors.T, size)


def _probe(got: ReadRows, want: Floats, of: Context) -> Errors:
    x = want.astype(np.float64)
    weight, bias = (t.astype(np.float64) for t in of.program.load_probe(of.entry.vectors, of.site))
    size = np.linalg.norm(x, axis=1) * np.linalg.norm(weight, axis=1).max() + np.abs(bias).max(initial=0.0)
    return apart(field(got, "probe"), x @ weight.T + bias, size * of.growth)


def _lens(got: ReadRows, want: Floats, of: Context) -> Errors:
    logits = of.lens(want).astype(np.float64)
    ids = got.values["ids"].astype(np.int64)
    size = largest(logits) * of.growth
    if of.entry.ids is not None:
        if ids.shape != (len(want), len(of.entry.ids)) or (ids != np.array(of.entry.ids)).any():
            return np.full(max(len(want), 1), np.inf)
        missed = np.zeros(len(want))
    else:
        if ids.shape != (len(want), min(of.entry.top or 1, logits.shape[1])):
            return np.full(max(len(want), 1), np.inf)
        others = logits.copy()
        np.put_along_axis(others, ids, -np.inf, axis=1)
        # A token that the read left out is larger than one that it took by this much.
        missed = np.maximum(others.max(1) - np.take_along_axis(logits, ids, axis=1).min(1), 0.0) if len(want) else size
    top = np.exp(logits - logits.max(1, keepdims=True)).sum(1) if len(want) else size
    total = np.log(top) + logits.max(1, initial=-np.inf) if len(want) else size
    found = [
        apart(field(got, "logits"), np.take_along_axis(logits, ids, axis=1), size),
        apart(field(got, "logsumexp"), total, size),
        missed / np.where(size > 0, size, 1.0),
    ]
    worst: Errors = np.maximum.reduce(found)
    return worst


def _features(got: ReadRows, want: Floats, of: Context) -> Errors:
    sae = of.program.load_sae("verify", str(of.entry.sae), of.site)
    found = encode(sae, want.astype(np.float64))
    ids, values = got.values["ids"].astype(np.int64), field(got, "activations").astype(np.float64)
    chosen = of.entry.ids
    if ids.shape != values.shape or ids.shape != (len(want), of.entry.top if chosen is None else len(chosen)):
        return np.full(max(len(want), 1), np.inf)
    if chosen is not None:
        if (ids != np.array(chosen)).any():
            return np.full(max(len(want), 1), np.inf)
        apart_by: Errors = found.apart(values, ids).max(1, initial=0.0) / (found.size * of.growth)
        return apart_by
    listed = ids >= 0
    if any(len(set(row[own].tolist())) != own.sum() for row, own in zip(ids, listed, strict=True)):
        return np.full(max(len(want), 1), np.inf)
    wrong = np.where(listed, found.apart(values, np.maximum(ids, 0)), np.abs(values))
    # A feature that the read left out is more active than one that it gave by this much.
    missed = np.maximum(found.activations - values.min(1, keepdims=True, initial=np.inf), 0.0)
    missed = np.minimum(missed, np.maximum(found.off, 0.0))
    for row, own in enumerate(listed):
        missed[row, ids[row, own]] = 0.0
    worst: Errors = np.maximum(wrong.max(1, initial=0.0), missed.max(1, initial=0.0)) / (found.size * of.growth)
    return worst


def _pattern(got: ReadRows, want: Floats, of: Context) -> Errors:
    """``want`` ``[n, heads, keys]``, NaN behind each row's own position: of probabilities the whole is 1."""
    found = field(got, "pattern")
    count = got.values["keys"].astype(np.int64)
    if found.shape != want.shape or (count != (~np.isnan(want[:, 0])).sum(-1)).any():
        return np.full(max(len(want), 1), np.inf)
    behind = np.isnan(want)
    if (np.isnan(found) != behind).any():
        return np.full(len(want), np.inf)
    return apart(np.where(behind, 0.0, found), np.where(behind, 0.0, want), of.growth)


Comparison = Callable[[ReadRows, Floats, Context], Errors]

READS: Mapping[str, Comparison | NotChecked] = {
    "rows": _rows,
    "mean": _mean,
    "norm": _norm,
    "project": _project,
    "probe": _probe,
    "lens": _lens,
    "features": _features,
    "pattern": _pattern,
    "python": NotChecked("a function of your own is its own definition"),
}
"""Every kind of read (``vtaps.runtime.program.KINDS``)."""


def between(got: ReadRows, other: ReadRows, growth: Errors) -> Errors:
    """How far two engines' records of one read are apart, ``[n]``, by every field of numbers.

    Of a lens the sorted logits are compared: tokens that are nearly tied may change places.
    """
    if not np.array_equal(got.positions, other.positions):
        return np.full(1, np.inf)
    found = []
    for name in other.values:
        if name in ("ids", "count", "scale") and name in got.values:
            continue
        a, b = field(got, name), field(other, name)
        if len(b) and b.dtype.kind in "fiub":
            grown = growth if len(growth) == len(b) else np.full(len(b), growth.max(initial=1.0))
            if name == "pattern" and a.shape == b.shape:
                # NaN behind each row's own position; of probabilities the whole is 1.
                same = np.isnan(a) & np.isnan(b)
                found.append(apart(np.where(same, 0.0, a), np.where(same, 0.0, b), grown))
            elif name == "rows":
                # Either of them was rounded.
                found.append(_stored(a, b, 2 * rounding(other, b), largest(b) * grown))
            else:
                found.append(apart(a, b, largest(b) * grown))
    worst: Errors = np.maximum.reduce(found) if found else np.zeros(0)
    return worst


def _logprob(got: Floats, logits: Floats, entry: MetricEntry) -> Floats:
    distance: Floats = np.abs(got - log_softmax(logits)[:, entry.ids[0]])
    return distance


def _logit_diff(got: Floats, logits: Floats, entry: MetricEntry) -> Floats:
    distance: Floats = np.abs(got - (logits[:, entry.ids[0]] - logits[:, entry.ids[1]]))
    return distance


def _rank(got: Floats, logits: Floats, entry: MetricEntry) -> Floats:
    """How far the token's logit is from the one that has the rank."""
    at = np.clip(got.astype(np.int64), 0, logits.shape[1] - 1)
    ordered = -np.sort(-logits, axis=1)
    own = logits[:, entry.ids[0]]
    distance: Floats = np.abs(np.take_along_axis(ordered, at[:, None], axis=1)[:, 0] - own)
    return distance


Distance = Callable[[Floats, Floats, MetricEntry], Floats]

METRICS: Mapping[str, Distance | NotChecked] = {"logprob": _logprob, "logit_diff": _logit_diff, "rank": _rank}
"""Every kind of metric (``vtaps.runtime.program.METRICS``): values ``[n]``, the reference's logits float64
``[n, vocab]`` → how far they are apart, in logits."""


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """float64 ``[n, vocab]``."""
    x = logits.astype(np.float64)
    x = x - x.max(1, keepdims=True)
    out: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(1, keepdims=True))
    return out

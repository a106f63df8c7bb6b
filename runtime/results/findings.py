"""What is wrong with one finished completion: rows that fired against rows expected, reads that hold nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.records import Completion, ReadRows, Request
from vtaps.runtime.results.expected import Expected, Lock, fired_positions, point_of
from vtaps.spec.behind import SAMPLES
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.rows import Ints, to_ranges
from vtaps.spec.spec import BAN

KEPT = 5
"""Findings of one kind that are printed one by one; the rest are counted."""

PIECE = 4 << 20
"""Bytes that are looked at in one go."""

FLOATS: Mapping[str, tuple[str, ...]] = {
    "rows": ("rows",),
    "mean": ("mean",),
    "norm": ("norm",),
    "project": ("project",),
    "probe": ("probe",),
    "lens": ("logits", "logsumexp"),
    "features": ("activations",),
    "python": ("python",),
}
"""The fields of a read, by its kind, that must be finite; the first of them must not be all zero, but what a function
of the user's gave may be, and the activations of features."""

NAN = "nothing but NaN"


@dataclass(frozen=True)
class Finding:
    """A finding as the journal keeps it; ``subject`` and ``arm`` say which ones are of one kind."""

    code: str
    subject: str
    arm: str
    message: str
    line: int | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def diagnostic(self, lock: Lock) -> Diagnostic:
        line = self.line or 1
        span = Span(str(lock["spec"]["file"]), line, 1, line, 1)
        return Diagnostic(self.code, self.message, span, note=self.note)


def collect(findings: Iterable[Finding], lock: Lock) -> list[Diagnostic]:
    """Diagnostics in the given order, at most :data:`KEPT` of one kind, the last of which counts the others."""
    kinds: dict[tuple[str, str, str], list[Finding]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for finding in findings:
        kind = (finding.code, finding.subject, finding.arm)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= KEPT:
            kinds.setdefault(kind, []).append(finding)
    out: list[Diagnostic] = []
    for kind, kept in kinds.items():
        more = counts[kind] - len(kept)
        for i, finding in enumerate(kept):
            if more and i == len(kept) - 1:
                note = f"{more} more of this kind in arm {finding.arm}"
                finding = replace(finding, note="; ".join(filter(None, (finding.note, note))))
            out.append(finding.diagnostic(lock))
    return out


def examine(lock: Lock, request: Request, completion: Completion, expected: Expected) -> list[Finding]:
    """VT602 for every edit, override, read and metric whose rows are not the expected ones, VT604 for reads and
    metrics that are all zero or not finite, VT609 for a location at which a Python read gave nothing but NaN."""
    where = f"arm {request.arm}, prompt {request.prompt_id}"
    if completion.index:
        where += f", completion {completion.index}"
    point = point_of(lock, request.arm, request.point)
    if point["values"]:
        where += ", " + ", ".join(f"{path}={value}" for path, value in point["values"].items())
    found: list[Finding] = []

    def differ(section: str, name: str, message: str, note: str | None = None) -> None:
        line = lock[f"{section}s"].get(name, {}).get("line")
        subject = f"{section} {name}"
        found.append(Finding("VT602", subject, request.arm, f"{subject}, {where}: {message}", line, note))

    for name, got, want in _edit_rows(completion, expected):
        if not np.array_equal(got, want):
            differ("edit", name, f"fired at {_rows(got)}, expected {len(want)}", _difference(got, want))
    for name, want in expected.gates.items():
        scores = completion.record.gates.get(name)
        got = _NONE if scores is None else scores.positions[scores.positions < expected.rows]
        if not np.array_equal(got, want):
            differ("gate", name, f"scored {_rows(got)}, expected {len(want)}", _difference(got, want))
    for name, message in _override_faults(completion, expected):
        differ("override", name, message)
    for name, message, note in _read_faults(lock, request, completion, expected):
        differ("read", name, message, note)
    for name, want in expected.metrics.items():
        got = completion.record.metrics[name][0] if name in completion.record.metrics else _NONE
        got = got[got < expected.rows]
        if not np.array_equal(got, want):
            differ("metric", name, f"measured at {_rows(got)}, expected {len(want)}", _difference(got, want))
    found += _worthless(lock, request, completion, expected, where)
    found += _odd_scores(lock, request, completion, expected, where)
    return found


_NONE: Ints = np.empty(0, np.int64)


def _edit_rows(completion: Completion, expected: Expected) -> Iterator[tuple[str, Ints, Ints]]:
    # Of an edit with a gate the rows that it was to act on are known; which of them it did is the gate's to say.
    fired = {**completion.record.fired, **completion.record.selected}
    for name in [*expected.edits, *(n for n in fired if n not in expected.edits)]:
        yield name, fired_positions(fired.get(name, ()), expected.rows), expected.edits.get(name, _NONE)


def _override_faults(completion: Completion, expected: Expected) -> Iterator[tuple[str, str]]:
    wanted: set[int] = set()
    for name, tokens in expected.overrides.items():
        wanted |= {step for step, _ in tokens}
        wrong = [(s, t) for s, t in tokens if completion.token_ids[s] != t]
        if wrong:
            step, token = wrong[0]
            yield (
                name,
                f"{len(tokens) - len(wrong)} of {len(tokens)} tokens replaced; "
                f"step {step} holds token {completion.token_ids[step]}, expected {token}",
            )
    stray = sorted(s for s in set(completion.record.overridden) - wanted if s < len(completion.token_ids))
    if stray:
        yield "(none)", f"tokens of steps {stray} were replaced, and no override of this arm covers them"


def _read_faults(
    lock: Lock, request: Request, completion: Completion, expected: Expected
) -> Iterator[tuple[str, str, str | None]]:
    for name, want in expected.reads.items():
        rows = sites_of(lock, completion, name)
        if rows is None:
            if len(want):
                yield name, f"0 rows came, expected {len(want)}", None
            continue
        mean = lock["reads"][name]["kind"] == "mean"
        positions = {
            site: r.positions if mean else r.positions[r.positions < expected.rows] for site, r in rows.items()
        }
        first_site, first = next(iter(positions.items()))
        missing = [s for s in lock["reads"][name]["sites"] if s not in rows]
        other = next((s for s, p in positions.items() if not np.array_equal(p, first)), None)
        if missing or other is not None:
            what = (
                f"nothing came from {', '.join(missing)}"
                if other is None
                else f"{first_site} and {other} hold different rows"
            )
            yield name, f"{what}; this completion's rows of the read are left out", None
        elif not np.array_equal(first, want):
            yield name, f"{_rows(first)} came, expected {len(want)}", _difference(first, want)


def sites_of(lock: Lock, completion: Completion, read: str) -> dict[str, ReadRows] | None:
    """The rows of one read by site, in the lock's order; None where nothing came at all."""
    reads = completion.record.reads
    found = {site: reads[read, site] for site in lock["reads"][read]["sites"] if (read, site) in reads}
    return found or None


def _odd_scores(
    lock: Lock, request: Request, completion: Completion, expected: Expected, where: str
) -> Iterator[Finding]:
    for name in expected.gates:
        scores = completion.record.gates.get(name)
        at = _NONE if scores is None else scores.positions[~np.isfinite(scores.scores)]
        at = at[at < expected.rows]
        if len(at):
            message = f"gate {name}, {where}: {_rows(at)} with a score that is not finite, first at position {at[0]}"
            line = lock["gates"][name].get("line")
            yield Finding("VT604", f"gate {name}", request.arm, message, line, "such a score passes no bound")
    for name in expected.metrics:
        positions, values = completion.record.metrics.get(name, (_NONE, np.empty(0, np.float32)))
        # A banned token has a log probability of minus infinity.
        at = positions[np.isnan(values) & (positions < expected.rows)]
        if len(at):
            message = f"metric {name}, {where}: {_rows(at)} with a value that is no number, first at position {at[0]}"
            yield Finding("VT604", f"metric {name}", request.arm, message, lock["metrics"][name].get("line"))


def _worthless(
    lock: Lock, request: Request, completion: Completion, expected: Expected, where: str
) -> Iterator[Finding]:
    for name in expected.reads:
        read = lock["reads"][name]
        allowed = {word.replace("_", " ").replace("zero", "all zero") for word in read.get("allow", ())}
        faults: dict[str, list[tuple[str, str, int, int]]] = {}
        for site, rows in (sites_of(lock, completion, name) or {}).items():
            if site == SAMPLES:
                continue
            banned = _banned(lock, request, name, site)
            for fault, field, at in _faults_of(read["kind"], rows, expected.rows, banned):
                if fault in allowed:
                    continue
                if read["kind"] != "mean":
                    at = at[at < expected.rows]
                if fault == "all zero":
                    at = _not_zeroed(lock, request, name, site, at, expected)
                if len(at):
                    faults.setdefault(fault, []).append((site, field, int(at[0]), len(at)))
        for fault, places in faults.items():
            site, field, position, _ = places[0]
            count = sum(n for *_, n in places)
            told = f" in {field}" if field != read["kind"] else ""
            yield Finding(
                "VT609" if fault == NAN else "VT604",
                f"read {name} {fault}",
                request.arm,
                f"read {name}, {where} (request {request.key}): {count} row{'s' * (count != 1)} at {len(places)} "
                f"site{'s' * (len(places) != 1)} {fault}{told}, first at {site}, position {position}",
                read.get("line"),
                _note(read, fault),
            )


def _note(read: Mapping[str, Any], fault: str) -> str | None:
    if fault == NAN:
        return f"{read['python']['file']}:{read['python']['function']} gave them"
    store = read.get("store") or {}
    if fault == "not finite" and store.get("dtype") == "float16" and "scale" not in store:
        return "float16 holds numbers up to 65504: `scale: per_row`, bfloat16 and float32 hold larger ones"
    return None


def _faults_of(kind: str, rows: ReadRows, count: int, banned: bool) -> Iterator[tuple[str, str, Ints]]:
    """Fault, field and positions of all-zero rows and of rows that are not finite; a mean answers for its first row.
    ``count``: the completion's rows, past which nothing counts; ``banned``: −inf is due."""
    positions = rows.positions
    if kind == "python" and _all_nan(rows.values["python"][positions < count], rows.dtype):
        yield NAN, "python", positions
        return
    if kind == "pattern":
        # What is past a row's keys is NaN, and nothing else may be.
        values, keys = rows.values["pattern"], rows.values["keys"]
        whole = np.isfinite(values).sum((1, 2)) == keys * values.shape[1]
        if not whole.all():
            yield "not finite", "pattern", positions[~whole]
        return
    for i, field in enumerate(f for f in FLOATS.get(kind, ()) if f in rows.values):
        zero, finite = _zero_and_finite(rows.values[field], rows.dtype, banned)
        at = positions if len(positions) == len(zero) else positions[: len(zero)]
        if not finite.all():
            yield "not finite", field, at[~finite[: len(at)]]
        if i == 0 and zero.any() and kind not in ("python", "features"):
            yield "all zero", field, at[zero[: len(at)]]


def _zero_and_finite(
    values: npt.NDArray[Any], dtype: str, banned: bool
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each row, whether all of it is zero and whether all of it is finite, or −inf where that is ``banned``."""
    zero, finite = np.empty(len(values), np.bool_), np.empty(len(values), np.bool_)
    step = max(1, PIECE * len(values) // max(1, values.nbytes))
    for at in range(0, len(values), step):
        some = slice(at, at + step)
        zero[some], finite[some] = _piece(values[some], dtype, banned)
    return zero, finite


def _all_nan(values: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "bfloat16" and values.dtype == np.uint16:
        return values.size > 0 and bool((values & 0x7FFF > 0x7F80).all())
    return values.size > 0 and values.dtype.kind == "f" and bool(np.isnan(values).all())


def _piece(values: npt.NDArray[Any], dtype: str, banned: bool) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    flat = values.reshape(len(values), int(np.prod(values.shape[1:], dtype=np.int64)))
    if dtype == "bfloat16" and flat.dtype == np.uint16:
        finite = flat & 0x7F80 != 0x7F80
        return (flat & 0x7FFF == 0).all(axis=1), (finite | (flat == 0xFF80) if banned else finite).all(axis=1)
    if dtype == "float8_e4m3" and flat.dtype == np.uint8:
        return (flat & 0x7F == 0).all(axis=1), (flat & 0x7F != 0x7F).all(axis=1)
    finite = np.isfinite(flat)
    return (flat == 0).all(axis=1), (finite | np.isneginf(flat) if banned else finite).all(axis=1)


def _banned(lock: Lock, request: Request, read: str, site: str) -> bool:
    """Whether the arm bans tokens of the site before the read sees them."""
    if lock["reads"][read].get("sees") == "before_edits":
        return False
    used = point_of(lock, request.arm, request.point)["edits"]
    return any(entry.get("coefficient") == BAN and site in entry["sites"] for entry in used)


DOTS = ("project", "probe")
"""Kinds of read whose one number a row is exactly zero where an edit of the site makes it so."""


def _not_zeroed(lock: Lock, request: Request, read: str, site: str, at: Ints, expected: Expected) -> Ints:
    """Those of the positions at which the arm has not itself made the read's value zero, at the site or in its
    layer: with all heads of `z` zero, `attn_out` is."""
    kind, sites = lock["reads"][read]["kind"], lock["sites"]
    before = lock["reads"][read].get("sees") == "before_edits"
    layer = sites[site].get("layer")
    for entry in point_of(lock, request.arm, request.point)["edits"]:
        edit = lock["edits"][entry["edit"]]
        zero = edit["verb"] == "zero" or (edit["verb"] in ("scale", "set") and entry.get("coefficient") == 0)
        zero = zero and edit.get("columns") is None
        here = site in entry["sites"] and not before and (zero or kind in DOTS)
        near = zero and any(s != site and layer is not None and sites[s].get("layer") == layer for s in entry["sites"])
        if here or near:
            # A mean is of many rows: it is zero where they all are.
            acted = expected.edits.get(entry["edit"], _NONE)
            at = at[:0] if kind == "mean" else np.setdiff1d(at, acted)
    return at


def _rows(positions: Ints) -> str:
    return f"{len(positions)} row{'s' * (len(positions) != 1)}"


def _difference(got: Ints, want: Ints) -> str:
    parts = []
    for label, positions in (("missing", np.setdiff1d(want, got)), ("not expected", np.setdiff1d(got, want))):
        if len(positions):
            ranges = [str(a) if b == a + 1 else f"{a}..{b - 1}" for a, b in to_ranges(positions)]
            shown = ", ".join(ranges[:8]) + (", …" if len(ranges) > 8 else "")
            parts.append(f"{label}: position{'s' * (len(positions) != 1)} {shown}")
    return "; ".join(parts) or "the same rows, not sorted or not unique"

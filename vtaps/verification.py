"""What ``vtaps verify`` found out, as data: comparisons, counts, and what was not checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vtaps.runtime.reference.holding import Count, Measured, Skipped
from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.document import Document

VERSION = 1
FAILED = frozenset(
    {
        "VT503",
        "VT504",
        "VT505",
        "VT601",
        "VT603",
        "VT606",
        "VT607",
        "VT608",
        "VT609",
        "VT620",
        "VT621",
        "VT622",
        "VT623",
        "VT624",
    }
)
"""Codes of a run that failed."""


@dataclass(frozen=True)
class Comparison:
    """One thing at one site, over all requests.

    ``what``: ``read``, ``gate`` (its scores), ``edit`` (the rows at its location behind it), ``metric``, ``logprobs``,
    ``tokens`` (by how much a token leads that was not sampled), ``alone`` (an unedited request served by itself),
    ``chunked`` (its prompt in pieces).  ``error``: the largest, as a share of the row's largest value; infinite where
    rows or shapes differ.  ``values``: how many rows were compared.  ``request`` and ``position`` say where the largest
    is.
    """

    what: str
    name: str
    site: str
    error: float
    bound: float
    values: int
    request: str
    position: int | None

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Fired:
    """``wrong``: keys of the requests whose rows are not the selected ones, though their number may be the same.
    ``moved``: the largest change that the edit made in the reference; None where that did not make it."""

    edit: str
    fired: int
    expected: int
    wrong: tuple[str, ...] = ()
    moved: float | None = None

    @property
    def ok(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Isolation:
    """``bits``: requests without edits that were compared, to the bit, with the same batch with nobody edited;
    ``differing``: the keys of those that differ, with what does."""

    bits: int
    differing: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differing


@dataclass(frozen=True)
class Verification:
    """``reference``: ``huggingface`` or ``eager``, None where there is none; ``reason`` says why that one.

    ``requests`` of ``total`` were served.  ``findings`` hold what is wrong.
    """

    spec: str
    engine: str | None = None
    dtype: str | None = None
    reference: str | None = None
    reason: str = ""
    bound: float = math.nan
    requests: int = 0
    total: int = 0
    comparisons: tuple[Comparison, ...] = ()
    fired: tuple[Fired, ...] = ()
    isolation: Isolation | None = None
    chunk: int | None = None
    not_checked: tuple[Skipped, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 within bounds, 1 past one or nothing checked, 3 where the run failed."""
        codes = {d.code for d in self.findings if d.severity == "error"}
        return 3 if codes & FAILED else 1 if codes else 0

    def worst(self, what: str, name: str = "") -> Comparison:
        """The comparison with the largest share of its bound.  Raises LookupError where there is none."""
        found = [c for c in self.comparisons if c.what == what and (not name or c.name == name)]
        if not found:
            raise LookupError(f"nothing was compared as {what} {name}".rstrip())
        return max(found, key=lambda c: c.error)

    def to_json(self) -> dict[str, Any]:
        """JSON data: an infinite error is null."""
        return {
            "version": VERSION,
            "spec": self.spec,
            "ok": self.ok,
            "engine": self.engine,
            "dtype": self.dtype,
            "reference": self.reference,
            "reason": self.reason,
            "bound": _number(self.bound),
            "requests": self.requests,
            "total": self.total,
            "chunk": self.chunk,
            "comparisons": [{**asdict(c), "error": _number(c.error), "ok": c.ok} for c in self.comparisons],
            "fired": [{**asdict(f), "wrong": list(f.wrong), "ok": f.ok} for f in self.fired],
            "isolation": None
            if self.isolation is None
            else {
                "bits": self.isolation.bits,
                "differing": [{"request": key, "what": what} for key, what in self.isolation.differing],
            },
            "not_checked": [asdict(s) for s in self.not_checked],
            "findings": [
                {"code": d.code, "severity": d.severity, "message": d.message, "line": d.span.line, "note": d.note}
                for d in self.findings
            ],
        }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def together(measured: Iterable[Measured], bound: float) -> tuple[Comparison, ...]:
    """One comparison for each thing and site: the largest error of all requests, in the order of the first."""
    largest: dict[tuple[str, str, str], Measured] = {}
    values: dict[tuple[str, str, str], int] = {}
    for m in measured:
        key = (m.what, m.name, m.site)
        values[key] = values.get(key, 0) + m.rows
        if key not in largest or m.error > largest[key].error:
            largest[key] = m
    return tuple(
        Comparison(m.what, m.name, m.site, m.error, bound, values[key], m.request, m.position)
        for key, m in largest.items()
    )


def counted(counts: Iterable[Count], moved: Mapping[str, float]) -> tuple[Fired, ...]:
    """One for each edit, in the order of the first."""
    found: dict[str, Fired] = {}
    for c in counts:
        before = found.get(c.edit, Fired(c.edit, 0, 0, (), moved.get(c.edit)))
        wrong = before.wrong if c.same else (*before.wrong, c.request)
        count = before.fired + c.fired, before.expected + c.expected
        found[c.edit] = Fired(c.edit, *count, wrong, before.moved)
    return tuple(found.values())


SECTIONS = {"read": "reads", "gate": "gates", "edit": "edits", "metric": "metrics"}


def findings(found: Verification, doc: Document) -> list[Diagnostic]:
    """What is wrong: VT611 past a bound, VT602 other rows, VT612 neighbours, VT613 prompts in pieces, VT614 nothing."""
    out: list[Diagnostic] = []

    def where(what: str, name: str) -> Span:
        path = (SECTIONS.get(what, ""), name)
        return doc.key(*path) if path in doc.keys else Span(doc.file)

    past = [c for c in found.comparisons if not c.ok]
    for key in dict.fromkeys((c.what, c.name) for c in past):
        same = [c for c in past if (c.what, c.name) == key]
        worst = max(same, key=lambda c: c.error)
        code = {"chunked": "VT613", "alone": "VT612"}.get(worst.what, "VT611")
        section = worst.what if worst.what in SECTIONS else "read"
        every = sum((c.what, c.name) == key for c in found.comparisons)
        note = f"{len(same)} of {every} locations are past the bound, {same[0].site} first" if every > 1 else None
        out.append(Diagnostic(code, said(worst), where(section, worst.name), note=note))
    for fired in (f for f in found.fired if not f.ok):
        other = "other rows than the " if fired.fired == fired.expected else f"{fired.fired} rows, expected "
        message = f"edit {fired.edit}: fired at {other}{fired.expected}" + " expected" * (fired.fired == fired.expected)
        more = "" if len(fired.wrong) == 1 else f", {len(fired.wrong) - 1} more requests"
        note = f"first in request {fired.wrong[0]}{more}"
        out.append(Diagnostic("VT602", message, where("edit", fired.edit), note=note))
    if found.isolation is not None and not found.isolation.ok:
        first, what = found.isolation.differing[0]
        count = len(found.isolation.differing)
        message = f"{count} of {found.isolation.bits} unedited requests change when their neighbours are edited"
        out.append(Diagnostic("VT612", message, Span(doc.file), note=f"first {first}: {what}"))
    if not _something(found):
        why = next((s.reason for s in found.not_checked), found.reason)
        out.append(Diagnostic("VT614", "nothing of this spec could be checked", Span(doc.file), note=why or None))
    return out


def _something(found: Verification) -> bool:
    """Whether anything that the spec asks for was compared; where it asks for nothing, its tokens."""
    whats = {c.what for c in found.comparisons}
    if whats & set(SECTIONS):
        return True
    if found.fired:
        made = any(f.moved is not None for f in found.fired)
        return "logprobs" in whats and (made or found.reference == "eager")
    return bool(whats & {"logprobs", "tokens"}) and not any(s.what in SECTIONS for s in found.not_checked)


def said(c: Comparison) -> str:
    """One comparison in words: ``read stream at resid_post[3]: 2.0e-02 of the row's largest value, …``."""
    subject = {"alone": "served alone, ", "chunked": "in pieces, "}.get(c.what, f"{c.what} ") + c.name
    at = "" if c.site == "logits" else f" at {c.site}"
    row = "" if c.position is None else f", position {c.position}"
    if not math.isfinite(c.error):
        return f"{subject.strip()}{at}: other rows or shapes (request {c.request}{row})"
    off = "the reference's own token leads by" if c.what == "tokens" else "off by"
    return (
        f"{subject.strip()}{at}: {off} {c.error:.1e} of the row's largest value, {c.bound:.1e} is allowed "
        f"(request {c.request}{row})"
    )

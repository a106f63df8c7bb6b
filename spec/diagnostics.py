"""Findings as data: a code, a message, a place in a file, what was valid there.

Rendering lives in :mod:`vtaps.spec.reporters`; the page of a code lives in ``spec/pages/CODE.md`` and is what
``vtaps explain CODE`` prints.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from vtaps.spec.codes import CODES

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of a file; lines and columns count from 1, the end is exclusive."""

    file: str
    line: int = 1
    column: int = 1
    end_line: int = 1
    end_column: int = 1


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    ``valid`` lists what could have stood there, ``nearest`` the closest of it, ``note`` says why or how to mend it.
    ``detail`` is shown as lines of its own (a diff).  The title and severity come from the one table of codes.
    """

    code: str
    message: str
    span: Span
    valid: tuple[str, ...] = ()
    nearest: str | None = None
    note: str | None = None
    detail: tuple[str, ...] = ()
    severity: Severity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "severity", CODES[self.code].severity)


LONG, MANY = 200, 5000
"""Characters of a name, and names, past which no nearest one is looked for."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of ``names`` to ``name``, or None where nothing is close, or comparing would take long."""
    names = list(itertools.islice(names, MANY + 1))
    if len(name) > LONG or len(names) > MANY:
        return None
    found = difflib.get_close_matches(str(name), [str(n) for n in names], n=1, cutoff=0.6)
    return found[0] if found else None


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    return any(d.severity == "error" for d in diagnostics)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sorted by place, one per (code, span, message)."""
    unique = {(d.span, d.code, d.message): d for d in diagnostics}
    return [unique[k] for k in sorted(unique)]

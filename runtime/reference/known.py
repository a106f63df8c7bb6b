"""Which fields of a lock's entries the reference understands: one that it does not is never taken for nothing.

A new field of an entry is added to :data:`KNOWN` together with what makes sense of it, or to :data:`NOT_CHECKED` with
the reason why nothing does; a test fails for one that stands in neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from vtaps.runtime.program import (
    ArmEntry,
    EditEntry,
    GateEntry,
    MetricEntry,
    OverrideEntry,
    Point,
    PointEdit,
    Program,
    ReadEntry,
)
from vtaps.spec.rows import Rows

KNOWN: Mapping[type, frozenset[str]] = {
    EditEntry: frozenset(
        {"verb", "sites", "tokens", "vectors", "keep_norm", "matrices", "python", "sae", "value", "when", "slots"}
    ),
    PointEdit: frozenset({"edit", "sites", "coefficient", "vector", "low", "high", "feature", "position"}),
    GateEntry: frozenset({"cosine", "reduce"}),
    ReadEntry: frozenset(
        {"kind", "sites", "tokens", "vectors", "top", "ids", "step_rows", "requests", "python", "sae", "store"}
    ),
    MetricEntry: frozenset({"kind", "ids", "tokens"}),
    OverrideEntry: frozenset({"ids"}),
    Point: frozenset({"edits", "overrides"}),
    ArmEntry: frozenset({"reads", "metrics", "points", "sampling"}),
    Rows: frozenset(
        {"word", "steps", "positions", "match", "ids", "turn", "skip", "after", "exclude"}
    ),
}  # fmt: skip

NOT_CHECKED: Mapping[tuple[type, str], str] = {}
"""(entry, field) → why the reference does without it."""


def strange(entry: Any) -> str | None:
    """Why ``entry`` cannot be repeated: the first of its fields that says something and is not understood."""
    for field in fields(entry):
        value = getattr(entry, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in KNOWN[type(entry)] and value != default:
            return NOT_CHECKED.get((type(entry), field.name), f"{field.name} is not known to the reference")
    return next((told for rows in _rows(entry) if (told := strange(rows)) is not None), None)


def _rows(entry: Any) -> Iterator[Rows]:
    if isinstance(entry, Rows):
        return
    tokens = getattr(entry, "tokens", None)
    if isinstance(tokens, Rows):
        yield from tokens.parts()


def gate_name(key: str) -> str:
    """How the spec calls the gate under a key of :attr:`Program.gates`."""
    return key.partition(".")[2]


def strange_arm(program: Program, arm: str, point: int) -> tuple[str, str, str] | None:
    """(section, name, reason) of the first strange entry of an arm's point, its reads and metrics left aside."""
    chosen = program.point(arm, point)
    entries: list[tuple[str, str, Any]] = [("arm", arm, program.arms[arm]), ("arm", arm, chosen)]
    for use in chosen.edits:
        section, name = ("gate", gate_name(use.edit)) if use.edit in program.gates else ("edit", use.edit)
        entries += [(section, name, program.edits[use.edit]), (section, name, use)]
        entries += [(section, name, program.gates[use.edit])] if use.edit in program.gates else []
    entries += [("override", name, program.overrides[name]) for name in chosen.overrides]
    return next(
        ((section, name, told) for section, name, entry in entries if (told := strange(entry)) is not None), None
    )

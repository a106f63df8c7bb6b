"""Arms and their sweeps: every arm becomes points, every point the edits and overrides that act in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vtaps.spec.diagnostics import Diagnostic, Span, nearest
from vtaps.spec.document import Document
from vtaps.spec.names import MANY, defined
from vtaps.spec.plan import ArmPlan, EditPlan, OverridePlan, Point, PointEdit, PointGate
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Rows, compile_rows
from vtaps.spec.selectors import facts_of, gates_of
from vtaps.spec.spec import BOUNDS, Arm, Axis, Spec

Prompts = Mapping[str, tuple[ReadyPrompt, ...]]

FIELDS = {"add": ("vector",), "set": ("vector",), "clamp": ("vector", "min", "max"), "feature": ("index",)}
"""What a sweep may give an edit beside its coefficient."""
IDENTITY = {"add": 0.0, "scale": 1.0, "project_out": 0.0, "affine": 0.0}
MOST_POINTS = 65_536
"""Sweep points of an arm."""
NUMBERS = ("scale", "by", "to", "value", "min", "max", "above", "below")


@dataclass(frozen=True)
class _Setting:
    """What one value of one axis changes."""

    target: str
    field: str
    value: Any


def plan_arms(
    spec: Spec, edits: Mapping[str, EditPlan], overrides: Mapping[str, OverridePlan], prompts: Prompts, doc: Document,
    found: list[Diagnostic],
) -> dict[str, ArmPlan]:  # fmt: skip
    return {name: _arm(arm, spec, edits, overrides, prompts, doc, found) for name, arm in spec.arms.items()}


def _arm(
    arm: Arm, spec: Spec, edits: Mapping[str, EditPlan], overrides: Mapping[str, OverridePlan], prompts: Prompts,
    doc: Document, found: list[Diagnostic],
) -> ArmPlan:  # fmt: skip
    for section in ("reads", "edits", "overrides", "metrics", "prompts"):
        names = getattr(arm, section) or ()
        for i, name in enumerate(names):
            if name in names[:i]:
                found.append(Diagnostic("VT319", f"{name!r} stands twice in {section}", doc.at(*arm.where, section, i)))
    sampling = {**spec.sampling, **arm.sampling}
    factors = [f for factor in arm.sweep if (f := _factor(arm, factor, spec, edits, prompts, doc, found))]
    points = []
    count = math.prod(len(factor) for factor in factors)
    if count > MOST_POINTS:
        message = f"the sweep has {count:,} points; an arm has {MOST_POINTS:,} at most"
        found.append(Diagnostic("VT318", message, doc.key(*arm.where, "sweep")))
        factors = [factor[:1] for factor in factors]
    for combination in itertools.product(*factors):
        settings = [s for step in combination for s in step]
        points.append(_point(arm, spec, settings, edits, overrides))
    crossed = [
        f"a sweep point of {e.edit} has min {e.low:g} above max {e.high:g}"
        for p in points if arm.sweep for e in p.edits
        if e.low is not None and e.high is not None and e.low > e.high
    ]  # fmt: skip
    crossed += [
        f"a sweep point of {g.gate} has above {g.above:g} and below {g.below:g}"
        for p in points if arm.sweep for g in p.gates
        if g.above is not None and g.below is not None and g.above >= g.below
    ]  # fmt: skip
    if crossed:
        found.append(Diagnostic("VT318", crossed[0], doc.key(*arm.where, "sweep")))
    for point in points:
        if not _fits(arm, point, overrides, sampling, doc, found):
            break
    groups = arm.prompts if arm.prompts is not None else tuple(spec.prompts)
    return ArmPlan(arm, tuple(dict.fromkeys(groups)), sampling, tuple(points))


def _factor(
    arm: Arm, factor: tuple[Axis, ...], spec: Spec, edits: Mapping[str, EditPlan], prompts: Prompts, doc: Document,
    found: list[Diagnostic],
) -> list[tuple[_Setting, ...]]:  # fmt: skip
    """The steps of one factor: in each, every axis has one value."""
    columns: list[list[_Setting]] = []
    for axis in factor:
        values = _axis(arm, axis, spec, edits, prompts, doc, found)
        if values is not None:
            columns.append(values)
    lengths = {len(c) for c in columns}
    if len(lengths) > 1:
        listed = ", ".join(f"{a.path} has {len(c)}" for a, c in zip(factor, columns, strict=False))
        found.append(
            Diagnostic("VT318", f"axes that run in step need equally many values: {listed}", doc.key(*factor[0].where))
        )
        return []
    return list(zip(*columns, strict=True))


def _paths(arm: Arm, spec: Spec) -> list[str]:
    out = []
    for name in arm.edits:
        if name in spec.edits:
            edit = spec.edits[name]
            own = (edit.coefficient_key,) if edit.coefficient_key is not None else ()
            more = () if edit.by_value or edit.rows is not None else FIELDS.get(edit.verb, ())
            fields = (f"{name}.{edit.verb}.{f}" for f in (*own, *more))
            out += [f"{name}.at", f"{name}.tokens", f"{name}.on", *fields]
    out += [f"{name}.{bound}" for name in gates_of(arm, spec) for bound in BOUNDS]
    return out + [f"{name}.start" for name in arm.overrides if name in spec.overrides]


def _axis(
    arm: Arm, axis: Axis, spec: Spec, edits: Mapping[str, EditPlan], prompts: Prompts, doc: Document,
    found: list[Diagnostic],
) -> list[_Setting] | None:  # fmt: skip
    target, _, field = axis.path.partition(".")
    paths = _paths(arm, spec)
    if axis.path not in paths:
        if target in (defined(spec, "edits") - set(spec.edits)) | (defined(spec, "gates") - set(spec.gates)) | (
            defined(spec, "overrides") - set(spec.overrides)
        ):
            return None
        known = defined(spec, "edits") | defined(spec, "gates"), defined(spec, "overrides")
        if not (set(arm.edits) <= defined(spec, "edits") and set(arm.overrides) <= known[1]):
            return None  # the arm's own list is at fault, and says so
        elsewhere = target in known[0] | known[1]
        listed = target in (*arm.edits, *arm.overrides, *gates_of(arm, spec))
        wants = "lists no edit by" if target in spec.gates else "does not list"
        note = f"the arm {arm.name!r} {wants} {target!r}" if elsewhere and not listed else None
        found.append(
            Diagnostic(
                "VT215",
                f"the sweep path {axis.path!r} names nothing",
                doc.key(*axis.where),
                tuple(paths),
                nearest(axis.path, paths) if len(found) < MANY else None,
                note,
            )
        )
        return None
    span = doc.at(*axis.where)
    if field in ("at", "tokens"):
        if axis.values is not None:
            found.append(Diagnostic("VT318", f"{axis.path} takes `each`", span))
            return None
        if target not in edits:
            return None
        if field == "tokens":
            return _positions(arm, edits[target], spec, prompts, span, found)
        return [_Setting(target, "at", site.name) for site in edits[target].sites]
    if axis.values is None:
        found.append(
            Diagnostic("VT318", f"`each` ranges over locations or rows; {axis.path} takes a list of values", span)
        )
        return None
    kind = field.rpartition(".")[2]
    for i, value in enumerate(axis.values):
        if (problem := _wrong(kind, value)) is not None:
            found.append(Diagnostic("VT318", f"{axis.path}: {problem}", doc.at(*axis.where, i)))
            return None
    values = [float(v) if kind in NUMBERS else v for v in axis.values]
    return [_Setting(target, kind, v) for v in values]


def _positions(
    arm: Arm, edit: EditPlan, spec: Spec, prompts: Prompts, span: Span, found: list[Diagnostic]
) -> list[_Setting] | None:
    """A setting for each prompt position that the edit selects of some prompt of the arm."""
    rows = edit.edit.tokens
    if any(part.after is not None for part in rows.parts()):
        found.append(Diagnostic("VT318", "`each` ranges over prompt positions; `after` selects none", span))
        return None
    groups = arm.prompts if arm.prompts is not None else tuple(spec.prompts)
    selected: set[int] = set()
    for prompt in (p for group in groups for p in prompts.get(group, ())):
        selected.update(prompt_rows(rows, prompt))
    if not selected:  # of a selector that selects nothing at all there is a finding of its own
        text = f"`each` ranges over prompt positions, and {edit.edit.name!r} selects none"
        found.append(Diagnostic("VT318", text, span))
        return None
    return [_Setting(edit.edit.name, "tokens", position) for position in sorted(selected)]


def prompt_rows(rows: Rows, prompt: ReadyPrompt) -> list[int]:
    """The positions of a prompt that a selector without ``after`` selects."""
    found: list[int] = compile_rows(rows, facts_of(prompt, [rows], {})).select(0, np.array(prompt.ids)).tolist()
    return found


def points_of(arm: ArmPlan, edits: Mapping[str, EditPlan], prompt: ReadyPrompt) -> Iterator[tuple[int, Point]]:
    """The points at which a prompt is served, numbered: one that sweeps the rows of an edit is for prompts that have
    the row."""
    rows: dict[str, set[int]] = {}
    for number, point in enumerate(arm.points):
        swept = [(path.removesuffix(".tokens"), at) for path, at in point.values.items() if path.endswith(".tokens")]
        for name, _ in swept:
            if name not in rows:
                rows[name] = set(prompt_rows(edits[name].edit.tokens, prompt))
        if all(at in rows[name] for name, at in swept):
            yield number, point


def _wrong(kind: str, value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in NUMBERS and not (number and abs(value) < float("inf")):
        return f"{value!r} is not a finite number"
    if kind == "on" and not isinstance(value, bool):
        return f"{value!r} is neither true nor false"
    if kind == "vector" and not isinstance(value, str):
        return f"{value!r} is not the name of a vector"
    if kind == "index" and (type(value) is not int or value < 0):
        return f"{value!r} is not a feature (0, 1, …)"
    if kind == "start" and (type(value) is not int or value < 0):
        return f"{value!r} is not a step (0, 1, …)"
    return None


def _point(
    arm: Arm, spec: Spec, settings: list[_Setting], edits: Mapping[str, EditPlan], overrides: Mapping[str, OverridePlan]
) -> Point:
    starts = {n: overrides[n].override.start for n in arm.overrides if n in overrides}
    chosen: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for s in settings:
        chosen.setdefault(s.target, {})[s.field] = s.value
        plain = s.field in ("at", "tokens", "on", *BOUNDS)
        verb = edits[s.target].edit.verb if s.target in edits and not plain else None
        values[f"{s.target}.{verb}.{s.field}" if verb else f"{s.target}.{s.field}"] = s.value
        if s.field == "start" and s.target in starts:
            starts[s.target] = s.value
    acting = []
    for name in arm.edits:
        if name not in edits:
            continue
        edit, own = edits[name].edit, chosen.get(name, {})
        point = PointEdit(
            edit=name,
            sites=(own["at"],) if "at" in own else tuple(s.name for s in edits[name].sites),
            coefficient=edit.coefficient,
            vector=own.get("vector", edit.vector),
            low=own.get("min", edit.low),
            high=own.get("max", edit.high),
            feature=None if edit.feature is None else own.get("index", edit.feature.index),
            position=own.get("tokens"),
        )
        if (key := edit.coefficient_key) in own:
            point = replace(point, coefficient=own[key])
        does = None if edit.feature is None else edit.feature.does
        if own.get("on", True) and not is_identity(edit.operation, point.coefficient, does):
            acting.append(point)
    used = dict.fromkeys(edits[p.edit].edit.when for p in acting)
    gates = []
    for gate in (spec.gates[name] for name in used if name is not None and name in spec.gates):
        own = chosen.get(gate.name, {})
        gates.append(PointGate(gate.name, gate.vector, own.get("above", gate.above), own.get("below", gate.below)))
    return Point(values, tuple(acting), tuple(starts.items()), tuple(gates))


def is_identity(verb: str, coefficient: float | None, does: str | None = None) -> bool:
    """Whether the verb changes nothing at this coefficient: such an edit stores nothing and is not expected to act.
    ``does``: what ``feature`` does, ``to`` or ``by``."""
    if verb == "feature" and does == "by":
        return coefficient == 0.0
    return verb in IDENTITY and coefficient == IDENTITY[verb]


def _fits(
    arm: Arm, point: Point, overrides: Mapping[str, OverridePlan], sampling: Mapping[str, Any], doc: Document,
    found: list[Diagnostic],
) -> bool:  # fmt: skip
    """Overrides end before the text does and do not overlap."""
    limit = sampling["max_tokens"]
    taken: dict[int, str] = {}
    for name, start in point.overrides:
        length = len(overrides[name].ids)
        span = doc.at(*arm.where, "overrides", arm.overrides.index(name))
        if start + length > limit:
            what = f"{name!r} replaces tokens {start} … {start + length - 1} of at most {limit}"
            found.append(Diagnostic("VT314", what, span, note=f"raise max_tokens to {start + length}"))
            return False
        for step in range(start, start + length):
            if step in taken:
                found.append(Diagnostic("VT314", f"{name!r} and {taken[step]!r} both replace token {step}", span))
                return False
            taken[step] = name
    return True

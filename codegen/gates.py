"""Gates: a :class:`~vtaps.spec.spec.Gate` and the value it looks at → the block's statement."""

from __future__ import annotations

import libcst as cst

from vtaps.codegen import nodes
from vtaps.spec.plan import Plan
from vtaps.spec.spec import Gate

VERSION = 1
"""Counts changes of what the statement does: part of the structure digest."""


def emit(gate: Gate, values: list[cst.BaseExpression]) -> cst.Call:
    return nodes.call("vt.gate", cst.Name("t"), nodes.literal(gate.name), *values)


def numbers(plan: Plan) -> dict[str, int]:
    """The gates of a plan, counted in the order of the model: what a structure knows them by."""
    names = [s.name for p in plan.locations for s in p.statements if s.kind == "gate"]
    return {name: number for number, name in enumerate(names)}

"""Reads: a :class:`ReadPlan` and the value it looks at → the block's statement."""

from __future__ import annotations

import libcst as cst

from vtaps.codegen import nodes
from vtaps.spec.plan import ReadPlan

CALLS = {
    "rows": "keep", "mean": "mean", "norm": "norm", "project": "project", "probe": "probe", "lens": "lens",
    "features": "features", "python": "python_read",
}  # fmt: skip
VERSION = 1
"""Counts changes of what the statements do: part of the structure digest."""


def emit(plan: ReadPlan, values: list[cst.BaseExpression]) -> cst.Call:
    return nodes.call(f"vt.{CALLS[plan.read.kind]}", cst.Name("t"), nodes.literal(plan.read.name), *values)

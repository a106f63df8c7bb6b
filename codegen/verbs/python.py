"""`python`: see ``vtaps.runtime.block.python``."""

from __future__ import annotations

import libcst as cst

from vtaps.codegen import nodes
from vtaps.spec.plan import EditPlan

VERSION = 1
"""Counts changes of what the statement does: part of the structure digest."""


def emit(plan: EditPlan, values: list[cst.BaseExpression]) -> cst.Call:
    return nodes.edit("python", plan, values)

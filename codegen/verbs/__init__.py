"""One file a verb: an :class:`EditPlan` and the value it acts on → the block's statement."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from vtaps.codegen.verbs import add, scale, set, zero
from vtaps.spec.plan import EditPlan

Emit = Callable[[EditPlan, list[cst.BaseExpression]], cst.Call]

VERBS: dict[str, Emit] = {"add": add.emit, "scale": scale.emit, "zero": zero.emit, "set": set.emit}
VERSIONS = {"add": add.VERSION, "scale": scale.VERSION, "zero": zero.VERSION, "set": set.VERSION}

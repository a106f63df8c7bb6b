"""One file a verb: an :class:`EditPlan` and the value it acts on → the block's statement."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from vtaps.codegen.verbs import add, affine, clamp, feature, project_out, put, python, reconstruct, scale, set, zero
from vtaps.spec.plan import EditPlan

Emit = Callable[[EditPlan, list[cst.BaseExpression]], cst.Call]

_FILES = {
    "add": add, "scale": scale, "zero": zero, "set": set, "put": put, "project_out": project_out, "clamp": clamp,
    "affine": affine, "feature": feature, "reconstruct": reconstruct, "python": python,
}  # fmt: skip
VERBS: dict[str, Emit] = {name: file.emit for name, file in _FILES.items()}
VERSIONS: dict[str, int] = {name: file.VERSION for name, file in _FILES.items()}

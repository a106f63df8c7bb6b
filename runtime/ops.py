"""The operations that a tapped model calls: opaque to the compiler, inside its graphs.

They name a location by number and find their tables through :func:`serve`, so that a compiled model holds no address
of ours: one that comes back from a compile cache looks its tables up like a fresh one.  Both declare what they write,
a read its own operand, and that they do more than that: a compiler removes an operation that writes nothing, or nothing
that anyone goes on with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

VERSION = 2
"""Counts changes of what a compiled model calls: in the operations' names, and so in every compile cache's key."""

Run = Callable[[int, Tensor, "Tensor | None"], None]

_LIBRARY = torch.library.Library("vtaps", "DEF")
_TAP, _TAP_PAIR = f"tap_v{VERSION}", f"tap_pair_v{VERSION}"
_LIBRARY.define(f"{_TAP}(Tensor(a!) x, Tensor? residual, int location) -> ()")
_LIBRARY.define(f"{_TAP_PAIR}(Tensor(a!) x, Tensor(b!)? residual, int location) -> ()")

_serving: list[Run] = []


def serve(run: Run | None) -> None:
    """Whose tables the operations of this process look at, until the next call: ``run(location, x, residual)``."""
    _serving[:] = [] if run is None else [run]


def leave(run: Run) -> None:
    """Undo :func:`serve`, if ``run`` is still the one."""
    if run in _serving:
        _serving.clear()


def _tap(x: Tensor, residual: Tensor | None, location: int) -> None:
    if _serving:
        _serving[0](location, x, residual)


def _fake(x: Tensor, residual: Tensor | None, location: int) -> None:
    return None


for _name in (_TAP, _TAP_PAIR):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _tap, _key)
    torch.library.register_fake(f"vtaps::{_name}", _fake, lib=_LIBRARY)
    # Functionalization puts a copy where the operand was, and nothing may go on with the copy.
    has_side_effect(getattr(torch.ops.vtaps, _name).default)

tap: Any = getattr(torch.ops.vtaps, _TAP).default
"""Edits and reads of ``x`` ``[rows, width]`` in place; ``residual`` is only read."""

tap_pair: Any = getattr(torch.ops.vtaps, _TAP_PAIR).default
"""The same, where a statement writes the residual too."""


def apart(x: Tensor, residual: Tensor | None, location: int) -> None:
    """:data:`tap` of a copy that is then written back, for an ``x`` that may be a view of what another one writes.

    With auto-functionalization V1, which vLLM asks for, Inductor loses writes of two operations into views of one
    tensor, as attention's query, key and value are; copies it keeps.
    """
    own = x.clone(memory_format=torch.contiguous_format)
    tap(own, residual, location)
    x.copy_(own)

"""The operations that a tapped model calls: opaque to the compiler, inside its graphs.

They name a location by number and find their tables through :func:`serve`, so that a compiled model holds no address
of ours: one that comes back from a compile cache looks its tables up like a fresh one.  All declare what they write,
a read its own operand, and that they do more than that: a compiler removes an operation that writes nothing, or nothing
that anyone goes on with.

A break runs Python in every forward.  A CUDA graph cannot hold that: one in capture is cut there (:func:`cutting`).
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

_TAP, _TAP_PAIR, _TAP_BREAK = (f"{name}_v{VERSION}" for name in ("tap", "tap_pair", "tap_break"))

BREAK = f"vtaps::{_TAP_BREAK}"

_LIBRARY = torch.library.Library("vtaps", "DEF")
_LIBRARY.define(f"{_TAP}(Tensor(a!) x, Tensor? residual, int location) -> ()")
_LIBRARY.define(f"{_TAP_PAIR}(Tensor(a!) x, Tensor(b!)? residual, int location) -> ()")
_LIBRARY.define(f"{_TAP_BREAK}(Tensor(a!) x, Tensor(b!)? residual, int location) -> ()")

_serving: list[tuple[Run, Run | None]] = []
_cutting: list[Run] = []


def serve(run: Run | None, broken: Run | None = None) -> None:
    """Whose tables the operations of this process look at, until the next call: ``run(location, x, residual)`` for
    taps, ``broken`` for breaks."""
    _serving[:] = [] if run is None else [(run, broken)]


def leave(run: Run) -> None:
    """Undo :func:`serve`, if ``run`` is still the one."""
    if _serving and _serving[0][0] == run:
        _serving.clear()


def cutting(cut: Run | None) -> None:
    """The graph in capture that breaks cut, until the next call: ``cut(location, x, residual)``."""
    _cutting[:] = [] if cut is None else [cut]


def at_break(location: int, x: Tensor, residual: Tensor | None) -> None:
    """What a break does in a forward."""
    if _serving and (broken := _serving[0][1]) is not None:
        broken(location, x, residual)


def _tap(x: Tensor, residual: Tensor | None, location: int) -> None:
    if _serving:
        _serving[0][0](location, x, residual)


def _break(x: Tensor, residual: Tensor | None, location: int) -> None:
    if _cutting:
        _cutting[0](location, x, residual)
    elif x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"location {location} is a break, inside a CUDA graph that is not cut at breaks")
    else:
        at_break(location, x, residual)


def _fake(x: Tensor, residual: Tensor | None, location: int) -> None:
    return None


for _name, _run in ((_TAP, _tap), (_TAP_PAIR, _tap), (_TAP_BREAK, _break)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"vtaps::{_name}", _fake, lib=_LIBRARY)
    # Functionalization puts a copy where the operand was, and nothing may go on with the copy.
    has_side_effect(getattr(torch.ops.vtaps, _name).default)

tap: Any = getattr(torch.ops.vtaps, _TAP).default
"""Edits and reads of ``x`` ``[rows, width]`` in place; ``residual`` is only read."""

tap_pair: Any = getattr(torch.ops.vtaps, _TAP_PAIR).default
"""The same, where a statement writes the residual too."""

tap_break: Any = getattr(torch.ops.vtaps, _TAP_BREAK).default
"""The same, by Python."""


def apart(x: Tensor, residual: Tensor | None, location: int) -> None:
    """:data:`tap` of a copy that is then written back, for an ``x`` that may be a view of what another one writes.

    With auto-functionalization V1, which vLLM asks for, Inductor loses writes of two operations into views of one
    tensor, as attention's query, key and value are; copies it keeps.
    """
    own = x.clone(memory_format=torch.contiguous_format)
    tap(own, residual, location)
    x.copy_(own)


def break_apart(x: Tensor, residual: Tensor | None, location: int) -> None:
    """:data:`tap_break` of a copy, as :func:`apart`."""
    own = x.clone(memory_format=torch.contiguous_format)
    tap_break(own, residual, location)
    x.copy_(own)

"""The operations that a tapped model calls: opaque to the compiler, inside its graphs.

They name a location by number and find their tables through :func:`serve`, so that a compiled model holds no address
of ours: one that comes back from a compile cache looks its tables up like a fresh one.  All declare what they write,
a read its own operand: an operation that writes nothing would be removed as dead code.

A break runs Python in every forward.  A CUDA graph cannot hold that: one in capture is cut there (:func:`cutting`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VERSION = 1
"""Counts changes of what a compiled model calls: part of the structure digest."""

Run = Callable[[int, Tensor, "Tensor | None"], None]

BREAK = "vtaps::tap_break"

_LIBRARY = torch.library.Library("vtaps", "DEF")
_LIBRARY.define("tap(Tensor(a!) x, Tensor? residual, int location) -> ()")
_LIBRARY.define("tap_pair(Tensor(a!) x, Tensor(b!)? residual, int location) -> ()")
_LIBRARY.define("tap_break(Tensor(a!) x, Tensor(b!)? residual, int location) -> ()")

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


for _name, _run in (("tap", _tap), ("tap_pair", _tap), ("tap_break", _break)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"vtaps::{_name}", _fake, lib=_LIBRARY)

tap: Any = torch.ops.vtaps.tap.default
"""Edits and reads of ``x`` ``[rows, width]`` in place; ``residual`` is only read."""

tap_pair: Any = torch.ops.vtaps.tap_pair.default
"""The same, where a statement writes the residual too."""

tap_break: Any = torch.ops.vtaps.tap_break.default
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

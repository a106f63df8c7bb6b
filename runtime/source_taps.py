"""Taps inside forwards: a module's forward is replaced by the same function with taps around some of its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, contiguous_format, nn

from vtaps.codegen.instrument import InstrumentError
from vtaps.codegen.source_ops import SourceError
from vtaps.runtime.block import Location
from vtaps.runtime.compat import forwards
from vtaps.runtime.program import Program
from vtaps.spec.source import value_name, without


class ForwardError(Exception):
    """A forward cannot get its taps; the message names it."""


@dataclass(frozen=True)
class At:
    """A location in a forward, and what happens there: ``act(x, None, number)``."""

    place: Location
    number: int
    act: Callable[[Tensor, Tensor | None, int], None]


def put(module: nn.Module, places: Sequence[At], program: Program) -> None:
    """Let ``module``, on this instance, run its forward with ``places``.

    A compiler that traces the model later sees the taps.  Raises ForwardError where the forward is not the one that was
    compiled for, or this platform runs another body.
    """
    path = places[0].place.module
    named: dict[str, set[str]] = {}
    for at in places:
        site = program.sites[at.place.name]
        named.setdefault("", set()).add(str(site.forward))
        if call := without(str(at.place.op))[0]:
            named.setdefault(call, set()).add(str(site.inside))
    where = min(named[""])
    for several in named.values():
        if len(several) > 1 or min(several) not in program.forwards:
            raise ForwardError(f"{path}: the lock names {', '.join(sorted(several))} as its forward; compile again")
    try:
        tapped = forwards.tapped(module, {value_of(at.place) for at in places})
    except (InstrumentError, SourceError) as error:
        raise ForwardError(f"{path}: {where}: {error}") from error
    if tapped is None:
        raise ForwardError(f"{path}: this platform does not run {where} there")
    for function in tapped.functions:
        wanted, found = min(named[function.within]), f"sha256:{function.digest}"
        if found != program.forwards[wanted].digest or function.where != wanted:
            raise ForwardError(f"{path}: {function.where} ({found}) is not the {wanted} of the lock; compile again")
    try:
        tapped.put(module, path, lambda function: _tap(function, places))
    except InstrumentError as error:
        raise ForwardError(f"{path}: {where}: {error}") from error


def value_of(place: Location) -> str:
    """What :func:`vtaps.runtime.compat.forwards.tapped` calls it."""
    return value_name(str(place.op), place.input)


def _tap(function: forwards.TappedFunction, places: Sequence[At]) -> Callable[[str, Any], Any]:
    """What the taps in ``function`` call."""
    own = [(at, name) for at in places for call, name in [without(value_of(at.place))] if call == function.within]
    here = {
        names: tuple(_acting(at) for at, name in own if name in values) for names, values in function.points.items()
    }

    def tap(names: str, value: Any) -> Any:
        for act in here[names]:
            value = act(value)
        return value

    return tap


def _acting(at: At) -> Callable[[Any], Any]:
    element, act, number, name = at.place.output, at.act, at.number, at.place.name
    taken_in = at.place.input is not None

    def acting(value: Any) -> Any:
        x = value if element is None else value[element]
        if not isinstance(x, Tensor):
            raise ForwardError(f"{name}: {type(x).__name__} is there, not a tensor")
        if taken_in and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            raise ForwardError(f"{name}: {list(x.shape)} with strides {list(x.stride())} shares its rows or columns")
        # What an op computes may share memory with other values, as the parts of a split do. An edit is of this value
        # alone, and Inductor loses the writes of two operations into views of one tensor where vLLM has it use
        # auto-functionalization V1.
        own = x.clone(memory_format=contiguous_format)
        act(rows_of(own, name), None, number)
        if taken_in:
            # What a call takes in it may write into, for whoever holds the tensor: it gets the tensor itself.
            x.copy_(own)
            return value
        return own if element is None else _replaced(value, element, own)

    return acting


def _replaced(value: Any, element: int, x: Tensor) -> Any:
    """The tuple or list ``value`` with ``x`` as its ``element``."""
    items = [x if number == element else item for number, item in enumerate(value)]
    if type(value) is list:
        return items
    if type(value) is tuple:
        return tuple(items)
    # A named tuple takes its fields one by one, torch's return types take them together.
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def rows_of(x: Tensor, name: str) -> Tensor:
    """``[rows, columns]`` of ``[rows, …]``: a view, so that what is written there is written in ``x``.

    Raises ForwardError, with the location's ``name``, for one that has no such view.
    """
    if x.dim() <= 2:
        return x
    for axis in range(1, x.dim() - 1):
        # The stride of an axis of one says nothing.
        side_by_side = x.stride(axis) == x.shape[axis + 1] * x.stride(axis + 1)
        if not side_by_side and x.shape[axis] != 1 and x.shape[axis + 1] != 1:
            raise ForwardError(f"{name}: {list(x.shape)} with strides {list(x.stride())} is not rows of columns")
    return x.view(x.shape[0], -1)

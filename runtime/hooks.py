"""The block in a model: a wrapper around a tapped module's forward picks the value out and acts on it."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vtaps.runtime import source_taps
from vtaps.runtime.block import Block, Location
from vtaps.runtime.program import Program
from vtaps.runtime.source_taps import rows_of
from vtaps.spec.behind import SAMPLES

Act = Callable[[Tensor, "Tensor | None", int], None]
"""``(x, residual, number of the location)``"""


class InstallError(Exception):
    """The block does not fit the model; the message names the location."""


class BlockFault(Exception):
    """The block failed at work; the message names the location, or the block's line and the spec's."""


def install(block: Block, program: Program, model: nn.Module, act_of: Callable[[Location], Act]) -> tuple[str, ...]:
    """Wrap the forward of every tapped module of ``model``, and put taps into those with a location inside; returns
    the locations' names, in the order of their numbers.

    The wrappers are seen by a compiler that traces the model later.  Raises InstallError for a module or parameter
    that is not there, and a forward that is not the lock's.
    """
    modules = dict(model.named_modules())
    # What is sampled comes out of vLLM's sampler: the runner hands it to the session.
    numbered = [(n, place) for n, place in enumerate(block.locations.values()) if place.name != SAMPLES]
    for _, place in numbered:
        if place.module not in modules:
            raise InstallError(f"{place.name}: the model has no module {place.module}")
    inside: dict[str, list[source_taps.At]] = {}
    for number, place in numbered:
        if place.op is not None:
            inside.setdefault(place.module, []).append(source_taps.At(place, number, act_of(place)))
    # Before the wrappers, which go around whatever the module runs.
    for path, places in inside.items():
        try:
            source_taps.put(modules[path], places, program)
        except source_taps.ForwardError as error:
            raise InstallError(str(error)) from error
    inputs = [(n, p) for n, p in numbered if p.input is not None and p.op is None]
    outputs = [(n, p) for n, p in numbered if p.input is None and p.op is None]
    # The last wrapper around a forward acts first on its inputs and last on its output.
    for number, place in [*reversed(inputs), *outputs]:
        module = modules[place.module]
        if place.input is None:
            _wrap(module, _after(module.forward, place, number, act_of(place)))
            continue
        names = parameter_names(module)
        for name in (place.input, place.residual):
            if isinstance(name, str) and name not in names:
                raise InstallError(f"{place.name}: {place.module} has no input {name}; it has {', '.join(names)}")
        _wrap(module, _before(module.forward, place, number, act_of(place), names))
    return tuple(block.locations)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's inputs in order.

    vLLM's custom ops dispatch through ``forward(*args, **kwargs)``: their names are those of ``forward_native``.
    """
    for method in ("forward", "forward_native"):
        function = getattr(module, method, None)
        if function is None:
            continue
        kinds = inspect.signature(function).parameters.values()
        names = tuple(p.name for p in kinds if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        if names:
            return names
    return ()


def _wrap(module: nn.Module, tapped: Callable[..., Any]) -> None:
    tapped.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    # On the instance: vLLM's compile decorator replaces __call__, which skips hooks but looks forward up here.
    module.forward = tapped


def _before(
    forward: Callable[..., Any], place: Location, number: int, act: Act, names: tuple[str, ...]
) -> Callable[..., Any]:
    wanted, other = str(place.input), place.residual
    index = names.index(wanted)
    paired = isinstance(other, str)
    other_name = str(other)
    other_index = names.index(other_name) if paired else -1

    def tapped(*args: Any, **kwargs: Any) -> Any:
        x = kwargs[wanted] if wanted in kwargs else args[index] if index < len(args) else None
        residual = None
        if paired:
            if other_name in kwargs:
                residual = kwargs[other_name]
            elif other_index < len(args):
                residual = args[other_index]
        if not isinstance(x, Tensor):
            raise BlockFault(f"{place.name} ({wanted}): {place.module} has {type(x).__name__} there, not a tensor")
        act(rows_of(x, place.name), None if residual is x else residual, number)
        return forward(*args, **kwargs)

    return tapped


def _after(forward: Callable[..., Any], place: Location, number: int, act: Act) -> Callable[..., Any]:
    wanted, other = place.output, place.residual

    def tapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        x = output if wanted is None else _element(place, wanted, output)
        if not isinstance(x, Tensor):
            raise BlockFault(f"{place.name}: {place.module} has {type(x).__name__} there, not a tensor")
        residual = _element(place, other, output) if isinstance(other, int) else None
        act(rows_of(x, place.name), None if residual is x else residual, number)
        return output

    return tapped


def _element(place: Location, index: int, output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        if -len(output) <= index < len(output):
            return output[index]
        raise BlockFault(f"{place.name}: {place.module} put out {len(output)} values; there is no element {index}")
    if index == 0:
        return output
    raise BlockFault(f"{place.name}: {place.module} put out {type(output).__name__}, which has no element {index}")


SOURCE_COMMENT = re.compile(r"\s*# (?P<place>\S+:\d+|\w+\.[\w-]+)\b")
"""What stands above a statement: ``paris.yaml:16 …`` or ``edits.steer: …``."""


def describe(error: BaseException, place: Location, program: Program) -> str:
    """``FILE:LINE (SPEC:LINE or SPEC edits.NAME), at LOCATION: what happened``, from the traceback and the block's
    line map, or the comment above the statement."""
    filename = place.function.__code__.co_filename
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    line = frames[-1].lineno if frames and frames[-1].lineno else place.function.__code__.co_firstlineno
    source = program.block_lines.get(line)
    spec = f"{program.spec_file}:{source}" if source is not None else _comment_above(filename, line, program)
    told = f" ({spec})" if spec else ""
    what = f"{type(error).__name__}: {error}"
    return f"{Path(filename).name}:{line}{told}, at {place.name}: {what}"


def _comment_above(filename: str, line: int, program: Program) -> str | None:
    for number in range(line - 1, 0, -1):
        text = linecache.getline(filename, number)
        if match := SOURCE_COMMENT.match(text):
            place = match["place"]
            return place if ":" in place else f"{program.spec_file} {place}"
        if text.startswith("def "):
            return None
    return None

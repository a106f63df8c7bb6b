"""The block on an eager model: one hook a location, which picks the value out and calls the block's function."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vtaps.runtime.block import Block, Location, Tap
from vtaps.runtime.program import Program, SiteEntry


class InstallError(Exception):
    """The block does not fit the model; the message names the location."""


class BlockFault(Exception):
    """The block failed at work; the message names the block's line and the spec's."""


@dataclass
class StepSize:
    """Rows (tokens) and requests of the step at work, for comparison with the tensors that hooks see."""

    rows: int = 0
    requests: int = 0


@dataclass
class _Point:
    """One location at work."""

    location: Location
    site: SiteEntry
    tap: Tap
    size: StepSize
    program: Program
    names: tuple[str, ...] = field(default=())

    def act(self, pick: Callable[[int | str], Any], whole: Any) -> None:
        """Call the block's function on what ``pick`` finds; ``whole`` is an output that is no tuple."""
        place = self.location
        if self.tap.called:
            raise BlockFault(f"{place.name}: {place.module} was called twice in one step")
        self.tap.called = True
        which = place.input if place.input is not None else place.output
        first = self._tensor(whole if which is None else pick(which), which)
        values: tuple[Tensor | None, ...] = (first,)
        if place.residual is not None:
            other = pick(place.residual)
            values = (first, None if other is None else self._tensor(other, place.residual))
        try:
            place.function(self.tap, *values)
        except Exception as error:
            raise BlockFault(describe(error, place, self.program)) from error

    def _tensor(self, value: Any, which: int | str | None) -> Tensor:
        if isinstance(value, Tensor):
            columns = self.location.columns
            if columns is not None:
                value = value[..., columns[0] : columns[1]]
            shape = value.shape
            if len(shape) == 2 and shape[1] == self.site.width and shape[0] >= self.needed():
                return value
        name = self.location.name if which is None else f"{self.location.name} ({which})"
        if not isinstance(value, Tensor):
            raise BlockFault(f"{name}: {self.location.module} has {type(value).__name__} there, not a tensor")
        raise BlockFault(
            f"{name}: {self.location.module} has shape {list(value.shape)} there; "
            f"[{self.needed()}, {self.site.width}] was compiled"
        )

    def needed(self) -> int:
        return self.size.requests if self.site.sampled else self.size.rows


def install(
    block: Block, program: Program, model: nn.Module, taps: Mapping[str, Tap], size: StepSize
) -> tuple[str, ...]:
    """Register every location of the block on ``model``; returns their names.

    Raises InstallError for a module or parameter that is not there.
    """
    modules = dict(model.named_modules())
    for place in block.locations.values():
        module = modules.get(place.module)
        if module is None:
            raise InstallError(f"{place.name}: the model has no module {place.module}")
        if place.name not in program.sites:
            raise InstallError(f"{place.name}: the lock has no such site")
        point = _Point(place, program.sites[place.name], taps[place.name], size, program)
        if place.input is not None:
            point.names = parameter_names(module)
            for name in (place.input, place.residual):
                if isinstance(name, str) and name not in point.names:
                    raise InstallError(
                        f"{place.name}: {place.module} has no input {name}; it has {', '.join(point.names)}"
                    )
        _register(module, point)
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


def _register(module: nn.Module, point: _Point) -> None:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if point.tap.live:
            point.act(lambda name: _input(point, name, args, kwargs), None)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if point.tap.live:
            point.act(lambda index: _element(point, index, output), output)

    if type(module).__call__ is not nn.Module.__call__:
        # vLLM's compile decorator replaces __call__ and skips hooks; it still looks forward up on the instance.
        _wrap_forward(module, before if point.location.input is not None else after, point)
    elif point.location.input is not None:
        module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        module.register_forward_hook(after)


def _wrap_forward(module: nn.Module, hook: Callable[..., None], point: _Point) -> None:
    forward = module.forward

    def tapped(*args: Any, **kwargs: Any) -> Any:
        if point.location.input is not None:
            hook(module, args, kwargs)
            return forward(*args, **kwargs)
        output = forward(*args, **kwargs)
        hook(module, args, output)
        return output

    tapped.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    module.forward = tapped


def _input(point: _Point, name: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[str(name)]
    index = point.names.index(str(name))
    return args[index] if index < len(args) else None


def _element(point: _Point, index: int | str, output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        if not isinstance(index, int) or not -len(output) <= index < len(output):
            raise BlockFault(
                f"{point.location.name}: {point.location.module} put out {len(output)} values; "
                f"there is no element {index}"
            )
        return output[index]
    if index == 0:
        return output
    raise BlockFault(
        f"{point.location.name}: {point.location.module} put out {type(output).__name__}, which has no element {index}"
    )


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

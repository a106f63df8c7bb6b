"""The functions that a model's modules run, and the ops in them."""

from __future__ import annotations

import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from vtaps.codegen.instrument import TAP, Instrumented, InstrumentError, instrument
from vtaps.codegen.source_ops import SourceError, ops_of
from vtaps.runtime.compat.compiled_forwards import AlreadyTraced, is_compiled, replace_forward
from vtaps.spec.source import Forward, Op


def forward_function(module: Any) -> Callable[..., Any] | None:
    """The function that a module runs: its class's ``forward``, and of vLLM's ops with a body a platform the one that
    a compiler traces.  None for a module that only holds others."""
    kind = type(module)
    forward = kind.forward
    if getattr(forward, "__qualname__", "") == "CustomOp.forward":
        forward = kind.forward_native
    function: Callable[..., Any] = inspect.unwrap(forward)
    return None if function.__name__ == "_forward_unimplemented" else function


def read_forwards(module: Any) -> list[Forward]:
    """The forward of a module with its ops, and the functions that it calls, with theirs: one level down.

    The first is the module's own; none for a module that only holds others.  ``reason`` is in one without ops.
    """
    function = forward_function(module)
    if function is None:
        return []
    forward = _read(function)
    inner: dict[str, Forward] = {}
    ops = []
    for op in forward.ops:
        called = _callee(op, function, type(module)) if op.kind == "call" else None
        found = _read(called) if called is not None else None
        if found is not None and found.ops and found.where != forward.where:
            inner[found.where] = found
            op = replace(op, inside=found.where)
        ops.append(op)
    return [replace(forward, ops=tuple(ops)), *inner.values()]


def _callee(op: Op, function: Callable[..., Any], kind: type) -> Callable[..., Any] | None:
    """The Python function of vLLM's that an op calls, found without running anything: a method of the class other than
    ``forward``, or a function of the module's."""
    root, *names = op.text.split(".")
    if not all(name.isidentifier() for name in (root, *names)):
        return None
    if root == "self" and len(names) == 1:
        found = inspect.getattr_static(kind, names[0], None)
    elif root != "self":
        found = getattr(function, "__globals__", {}).get(root)
        for name in names:
            found = getattr(found, name, None) if isinstance(found, ModuleType) else None
    else:
        return None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if not isinstance(found, FunctionType) or found.__name__ == "forward":
        return None
    called: Callable[..., Any] = inspect.unwrap(found)
    return called


@lru_cache(maxsize=4096)
def _read(function: Callable[..., Any]) -> Forward:
    where = f"{function.__module__}.{function.__qualname__}"
    if not function.__module__.startswith("vllm."):
        return Forward(where, reason="it is not vLLM's own")
    try:
        source, first, file = _source(function)
    except (OSError, TypeError) as error:
        return Forward(where, reason=f"its source is not at hand: {error}")
    digest = hashlib.sha256(source.encode()).hexdigest()
    try:
        ops, reason = ops_of(source), ""
    except SourceError as error:
        ops, reason = (), str(error)
    place = _below_packages(Path(file).resolve())
    return Forward(where, place, first, source.count("\n"), digest, ops, reason)


def _source(function: Callable[..., Any]) -> tuple[str, int, str]:
    """The text of a function, its first line and its file.  Raises OSError and TypeError."""
    lines, first = inspect.getsourcelines(function)
    return "".join(lines), first, inspect.getfile(function)


def tap_ops(model: Any, seen: Callable[[str, str, Any], None]) -> Callable[[], None]:
    """Let ``seen(path, name, value)`` hear of every op of every module's forward, under the path at which the module
    stands first; what is returned takes it back.

    An op that is bound to names, or unpacked, is heard of under each of them.
    """
    undo: list[Callable[[], None]] = []
    for path, module in model.named_modules():
        function = forward_function(module)
        made = None if function is None else _instrumented(function)
        if made is None:
            continue
        items = {op.name: op.item for op in made.ops if op.kind == "element"}

        def tap(names: str, value: Any, path: str = path, items: dict[str, int | None] = items) -> Any:
            for name in names.split():
                item = items.get(name)
                whole = isinstance(value, (tuple, list))
                seen(path, name, value[item] if item is not None and whole and item < len(value) else value)
            return value

        attribute = "forward" if inspect.unwrap(type(module).forward) is function else "_forward_method"
        old: Any = getattr(module, attribute, None)
        if old is None or inspect.unwrap(getattr(old, "__func__", old)) is not function:
            continue  # this platform runs another body
        bound = made.forward.bind(tap)
        had = attribute in module.__dict__
        setattr(module, attribute, MethodType(bound, module) if inspect.ismethod(old) else bound)
        undo.append(partial(setattr, module, attribute, old) if had else partial(delattr, module, attribute))

    def restore() -> None:
        for one in undo:
            one()

    return restore


@dataclass(frozen=True)
class _Tapped:
    forward: Instrumented
    ops: tuple[Op, ...]


@lru_cache(maxsize=4096)
def _instrumented(function: Callable[..., Any]) -> _Tapped | None:
    """None for a function without ops, or one that does not compile with taps."""
    read = _read(function)
    if not read.ops or not isinstance(function, FunctionType):
        return None
    try:
        return _Tapped(instrument(function, *_source(function)), read.ops)
    except InstrumentError:
        return None


@dataclass(frozen=True)
class TappedForward:
    """A module's forward with taps around some ops.  ``points``: what each tap is called with → its ops; ``digest``:
    sha256 of the function's text."""

    where: str
    digest: str
    points: Mapping[str, tuple[str, ...]]
    _made: Instrumented
    _attribute: str
    _method: bool

    def put(self, module: Any, path: str, tap: Callable[[str, Any], Any]) -> None:
        """Let the ``module`` at ``path`` run it; ``tap(name, value)`` gives the value to go on with.

        Raises InstrumentError where vLLM has compiled the module's own already.
        """
        if self._made.own:
            try:
                replace_forward(module, self._made.bind(), path)
            except AlreadyTraced as error:
                raise InstrumentError(str(error)) from error
            setattr(module, TAP, tap)
            return
        bound = self._made.bind(tap)
        setattr(module, self._attribute, MethodType(bound, module) if self._method else bound)


def tapped(module: Any, ops: Collection[str]) -> TappedForward | None:
    """The forward of ``module`` with taps around ``ops``; None where it runs another function than the one that
    the tree shows.  Raises InstrumentError, SourceError."""
    function = forward_function(module)
    if not isinstance(function, FunctionType):
        return None
    attribute = "forward" if type(module).forward is function else "_forward_method"
    old: Any = getattr(module, attribute, None)
    if old is None or getattr(old, "__func__", old) is not function:
        return None
    # Where vLLM compiles this very function it keeps the cells, in its cache too: a tap would be in there.
    made = instrument(function, *_source(function), ops, own=attribute == "forward" and is_compiled(module))
    read = _read(function)
    points = {name: tuple(name.split()) for name in made.names}
    return TappedForward(read.where, read.digest, points, made, attribute, inspect.ismethod(old))


def _below_packages(file: Path) -> str:
    for name in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(name)).resolve()
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    parts = file.parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("vllm") :]) if "vllm" in parts else file.name

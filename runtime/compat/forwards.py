"""The functions that a model's modules run, and the ops in them."""

from __future__ import annotations

import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from vtaps.codegen.instrument import TAP, Instrumented, InstrumentError, copy_name, instrument
from vtaps.codegen.source_ops import SourceError, decorators_of, ops_of
from vtaps.runtime.compat.callees import COMPILED, DECORATED, RECURSIVE, Callee, callee
from vtaps.runtime.compat.compiled_forwards import AlreadyTraced, is_compiled, replace_forward
from vtaps.spec.source import Forward, Op, within, without


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
        called = _called(op, function, type(module))
        if called is not None:
            found = _read(called.function) if called.function is not None else None
            shown = found is not None and found.ops and found.where != forward.where
            if found is not None and shown:
                inner[found.where] = found
            op = replace(op, inside=found.where if found and shown else "", sealed=called.reason)
        ops.append(op)
    return [replace(forward, ops=tuple(ops)), *inner.values()]


def _called(op: Op, function: Callable[..., Any], kind: type) -> Callee | None:
    """What ``op`` calls; with a reason where it has no ops, or calls itself."""
    found = callee(op, function, kind)
    if found is None or found.function is None or found.reason not in ("", DECORATED):
        return found
    ops = _read(found.function).ops
    if not ops:
        return replace(found, reason="without ops")
    # By the text: whether a decorator compiles, or does anything, depends on the platform.
    decorators = decorators_of(_source(found.function)[0]) - {"staticmethod", "classmethod"}
    if found.reason or decorators:
        return replace(found, reason=COMPILED if "torch.compile" in decorators else DECORATED)
    again = (callee(inner, found.function, kind) for inner in ops)
    recursive = any(one is not None and one.function is found.function for one in again)
    return replace(found, reason=RECURSIVE) if recursive else found


def merged(one: Forward, other: Forward) -> Forward:
    """A forward that modules of two classes run: where they call different functions, no spec can use their ops."""
    ops = [
        a
        if (a.inside, a.sealed) == (b.inside, b.sealed)
        else replace(a, inside="", sealed="another function in each class that runs this forward")
        for a, b in zip(one.ops, other.ops, strict=True)
    ]
    return replace(one, ops=tuple(ops))


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


def tap_ops(model: Any, seen: Callable[[str, str, Any], None], *, inside: bool = True) -> Callable[[], None]:
    """Let ``seen(path, name, value)`` hear of every op of every module's forward, under the path at which the module
    stands first; what is returned takes it back.

    An op that is bound to names, or unpacked, is heard of under each of them.  ``inside``: of arguments too, and of
    the functions that a forward calls.
    """
    undo: list[Callable[[], None]] = []
    for path, module in model.named_modules():
        function = forward_function(module)
        kind: Any = type(module) if inside else None
        made = None if function is None else _instrumented(function, kind)
        if function is None or made is None or (attribute := _runs(module, function)) is None:
            continue
        old = getattr(module, attribute)
        bound = made.bind(partial(seen, path), module)
        had = attribute in module.__dict__
        setattr(module, attribute, MethodType(bound, module) if inspect.ismethod(old) else bound)
        undo.append(partial(setattr, module, attribute, old) if had else partial(delattr, module, attribute))

    def restore() -> None:
        for one in undo:
            one()

    return restore


def _runs(module: Any, function: Callable[..., Any]) -> str | None:
    """Under which name ``module`` has ``function`` as what it runs; None where this platform runs another body."""
    attribute = "forward" if inspect.unwrap(type(module).forward) is function else "_forward_method"
    old: Any = getattr(module, attribute, None)
    return attribute if old is not None and inspect.unwrap(getattr(old, "__func__", old)) is function else None


@dataclass(frozen=True)
class _Tapped:
    """A forward with all taps, and the functions that its ops call, with theirs."""

    made: Instrumented
    ops: tuple[Op, ...]
    within: Mapping[str, tuple[Callee, _Tapped]]

    def bind(self, seen: Callable[[str, Any], None], module: Any, prefix: str = "") -> FunctionType:
        items = {op.name: op.item for op in self.ops if op.kind == "element"}

        def tap(names: str, value: Any) -> Any:
            for name in names.split():
                item = items.get(name)
                whole = isinstance(value, (tuple, list))
                seen(prefix + name, value[item] if item is not None and whole and item < len(value) else value)
            return value

        copies = {
            op: called.adapted(inner.bind(seen, module, within(op, ""))) for op, (called, inner) in self.within.items()
        }
        return self.made.bind(tap, copies)


@lru_cache(maxsize=4096)
def _instrumented(function: Callable[..., Any], kind: type | None) -> _Tapped | None:
    """None for a function without ops, or one that does not compile with taps.  ``kind``: the class whose methods it
    calls; None for one that is not looked into."""
    read = _read(function)
    if not read.ops or not isinstance(function, FunctionType):
        return None
    inner: dict[str, tuple[Callee, _Tapped]] = {}
    for op in read.ops if kind is not None else ():
        called = None if op.fixed or op.repeats else _called(op, function, kind or type)
        if called is None or called.reason or called.function is None:
            continue
        found = _instrumented_alone(called.function)
        if found is not None:
            inner[op.name] = (called, found)
    wanted = None if kind is not None else [op.name for op in read.ops if not op.fixed]
    for calls in (inner, {}):
        try:
            return _Tapped(instrument(function, *_source(function), wanted, tuple(calls)), read.ops, calls)
        except InstrumentError:
            continue
    return None


@lru_cache(maxsize=4096)
def _instrumented_alone(function: FunctionType) -> _Tapped | None:
    read = _read(function)
    try:
        return _Tapped(instrument(function, *_source(function)), read.ops, {}) if read.ops else None
    except InstrumentError:
        return None


@dataclass(frozen=True)
class TappedFunction:
    """A function of vLLM's with taps.  ``points``: what each tap is called with → its names; ``digest``: sha256 of the
    function's text; ``within``: the op that calls it, empty for a module's own forward."""

    where: str
    digest: str
    points: Mapping[str, tuple[str, ...]]
    within: str = ""


@dataclass(frozen=True)
class TappedForward:
    """A module's forward with taps around some values: its own function, and those that its ops call."""

    functions: tuple[TappedFunction, ...]
    _made: Mapping[str, Instrumented]
    _callees: Mapping[str, Callee]
    _attribute: str
    _method: bool

    def put(self, module: Any, path: str, tap_of: Callable[[TappedFunction], Callable[[str, Any], Any]]) -> None:
        """Let the ``module`` at ``path`` run it; ``tap_of(function)(names, value)`` gives the value to go on with.

        Raises InstrumentError where vLLM has compiled the module's own already.
        """
        taps = {function.within: tap_of(function) for function in self.functions}
        copies = {op: called.adapted(self._made[op].bind(taps[op])) for op, called in self._callees.items()}
        if self._made[""].own:
            try:
                replace_forward(module, self._made[""].bind(), path)
            except AlreadyTraced as error:
                raise InstrumentError(str(error)) from error
            for name, value in {TAP: taps[""], **{copy_name(op): made for op, made in copies.items()}}.items():
                setattr(module, name, value)
            return
        bound = self._made[""].bind(taps[""], copies)
        setattr(module, self._attribute, MethodType(bound, module) if self._method else bound)


def tapped(module: Any, values: Collection[str]) -> TappedForward | None:
    """The forward of ``module`` with taps around ``values`` (``q_0``, ``f_0.input[1]``, ``f_0.source.q_0``); None where
    it runs another function than the one that the tree shows.  Raises InstrumentError, SourceError."""
    function = forward_function(module)
    if not isinstance(function, FunctionType) or (attribute := _runs(module, function)) is None:
        return None
    if type(module).forward is not function and attribute == "forward":
        return None
    wanted: dict[str, set[str]] = {"": set()}
    for value in values:
        op, name = without(value)
        wanted.setdefault(op, set()).add(name)
    callees: dict[str, Callee] = {}
    ops = {op.name: op for op in _read(function).ops}
    for name in wanted:
        if name:
            callees[name] = _callable(ops.get(name), name, function, module)
    texts = {"": function} | {name: called.function for name, called in callees.items()}
    made, functions = {}, []
    for name, text in texts.items():
        assert text is not None
        # Where vLLM compiles this very function it keeps the cells, in its cache too: a tap would be in there.
        own = not name and attribute == "forward" and is_compiled(module)
        made[name] = instrument(text, *_source(text), wanted[name], () if name else tuple(callees), own=own)
        read = _read(text)
        points = {names: tuple(names.split()) for names in made[name].names}
        functions.append(TappedFunction(read.where, read.digest, points, name))
    method = inspect.ismethod(getattr(module, attribute))
    return TappedForward(tuple(functions), made, callees, attribute, method)


def _callable(op: Op | None, name: str, function: Callable[..., Any], module: Any) -> Callee:
    """What ``op`` calls, where a copy of it can be called instead.  Raises InstrumentError."""
    called = _called(op, function, type(module)) if op is not None else None
    if op is None or called is None or called.function is None:
        raise InstrumentError(f"{name} calls no function whose text is known")
    if called.reason:
        raise InstrumentError(f"{name}: {op.text} is {called.reason}")
    if not called.is_called_by(module, op):
        raise InstrumentError(f"{name}: this module has a {op.text} of its own")
    return called


def _below_packages(file: Path) -> str:
    for name in ("purelib", "platlib"):
        folder = Path(sysconfig.get_path(name)).resolve()
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    parts = file.parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("vllm") :]) if "vllm" in parts else file.name

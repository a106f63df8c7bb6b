"""A forward with taps around some of its ops: the same function, but these values go through one more call each."""

from __future__ import annotations
import __future__

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import libcst as cst

from vtaps.codegen.source_ops import Function, find_ops, parse_function
from vtaps.spec.source import Op

TAP = "__vtaps_tap__"
_SHELL = "__vtaps_shell__"
_CELL = cst.Name(TAP)
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class InstrumentError(ValueError):
    """The function cannot be had with these taps."""


@dataclass(frozen=True)
class Point:
    """One expression of a function and the ops whose value it is: itself, and the names that it is bound to."""

    node: cst.BaseExpression
    ops: tuple[Op, ...]


def points(function: Function, wanted: Collection[str] | None = None) -> list[Point]:
    """The expressions to put a tap around for the ops ``wanted`` (None: all that can have one).

    A name that is bound to an op's value, or to an element of it, has that op's.  Raises InstrumentError for an op that
    is not there or cannot have one.
    """
    found = find_ops(function)
    by_name = {f.op.name: f for f in found}
    if wanted is not None and (absent := sorted(set(wanted) - set(by_name))):
        raise InstrumentError(f"no op {', '.join(absent)}; there are {', '.join(by_name)}")
    out: dict[int, tuple[cst.BaseExpression, list[Op]]] = {}
    for name in by_name if wanted is None else wanted:
        one = by_name[name]
        source = by_name[one.op.of] if one.op.of else one
        why = source.op.fixed
        if not why:
            out.setdefault(id(source.node), (source.node, []))[1].append(one.op)
        elif wanted is not None:
            raise InstrumentError(f"{name}: nothing can be put around it ({why})")
    return [Point(node, tuple(ops)) for node, ops in out.values()]


def instrumented_source(source: str, wanted: Collection[str] | None = None) -> str:
    """``source``, at the left margin, with ``TAP("names", value)`` in place of each value; no line is moved.

    The names are those of the ops at that place, in order, joined by a space.  Raises SourceError, InstrumentError.
    """
    function = parse_function(source)
    made = _instrument(function, wanted)
    module = cst.Module([made], default_indent=function.module.default_indent)
    return module.code


def _instrument(function: Function, wanted: Collection[str] | None, tap: cst.BaseExpression = _CELL) -> cst.FunctionDef:
    found = points(function, wanted)
    names = {id(p.node): " ".join(op.name for op in p.ops) for p in found}
    augmented = [p.node for p in found if p.ops[0].kind == "augmented"]
    made = function.node.visit(_Inserter(names, augmented, tap))
    assert isinstance(made, cst.FunctionDef)
    return made


class _Inserter(cst.CSTTransformer):
    def __init__(
        self, names: Mapping[int, str], augmented: Collection[cst.BaseExpression], tap: cst.BaseExpression
    ) -> None:
        super().__init__()
        self._names, self._augmented, self._tap = names, {id(node) for node in augmented}, tap

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return self._after_augmented(original_node, updated)
        name = self._names.get(id(original_node))
        if name is None or id(original_node) in self._augmented:
            return updated
        return _call(self._tap, name, updated)

    def _after_augmented(self, original: Any, updated: Any) -> Any:
        """An augmented assignment has no value to go through a call: its target does, behind it."""
        body: list[cst.BaseSmallStatement] = []
        for before, after in zip(original.body, updated.body, strict=True):
            body.append(after)
            name = self._names.get(id(before.target)) if isinstance(before, cst.AugAssign) else None
            if name is not None:
                body.append(cst.Assign([cst.AssignTarget(after.target)], _call(self._tap, name, after.target)))
        if len(body) == len(updated.body):
            return updated
        semicolon = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
        return updated.with_changes(body=[*(s.with_changes(semicolon=semicolon) for s in body[:-1]), body[-1]])


def _call(tap: cst.BaseExpression, names: str, value: Any) -> cst.Call:
    if isinstance(value, (cst.Tuple, cst.GeneratorExp, cst.Yield)) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.Call(tap, [cst.Arg(cst.SimpleString(f'"{names}"'), comma=comma), cst.Arg(value)])


@dataclass(frozen=True)
class Instrumented:
    """The compiled form of a function with taps; :meth:`bind` makes functions of it.  ``names``: what each tap is
    called with, the names of its ops joined by a space; ``own``: the tap is an attribute of the first argument."""

    function: FunctionType
    code: CodeType
    source: str
    names: tuple[str, ...]
    own: bool = False

    def bind(self, tap: Callable[[str, Any], Any] | None = None) -> FunctionType:
        """The function with ``tap(names, value)`` called at each point; what it returns is the value there.  None for
        one whose first argument has the tap, under the name :data:`TAP`.

        Globals, defaults, annotations and the cells of its closure are the function's own.  The tap is in a cell too: a
        compiler looks globals up in the module.
        """
        assert (tap is None) == self.own
        old = self.function
        cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
        if tap is not None:
            cells[TAP] = CellType(tap)
        closure = tuple(cells[name] for name in self.code.co_freevars)
        made = FunctionType(self.code, old.__globals__, old.__name__, old.__defaults__, closure)
        made.__kwdefaults__, made.__qualname__ = old.__kwdefaults__, old.__qualname__
        made.__annotations__, made.__doc__, made.__module__ = old.__annotations__, old.__doc__, old.__module__
        made.__dict__.update(old.__dict__)
        return made


def instrument(
    function: FunctionType,
    source: str,
    line: int,
    file: str,
    wanted: Collection[str] | None = None,
    *,
    own: bool = False,
) -> Instrumented:
    """``function`` with taps around the ops ``wanted``; ``source`` is its text, which starts at ``line`` of ``file``.

    ``own``: the tap is not a cell of the function but an attribute of its first argument, so that the function's cells
    are those that it had.  Decorators are left out: what they made of the function is not the function.  Raises
    SourceError, InstrumentError.
    """
    parsed = parse_function(source)
    names_of = [" ".join(op.name for op in p.ops) for p in points(parsed, wanted)]
    tap = cst.Attribute(_first(parsed), cst.Name(TAP)) if own else _CELL
    made = _instrument(parsed, wanted, tap).with_changes(decorators=[], leading_lines=[])
    dropped = parsed.line(parsed.node.name) - 1
    names = (*function.__code__.co_freevars, *(() if own else (TAP,)))
    shell = cst.FunctionDef(
        cst.Name(_SHELL),
        cst.Parameters([cst.Param(cst.Name(name)) for name in names]),
        cst.IndentedBlock([made, cst.parse_statement(f"return {made.name.value}\n")]),
    )
    text = cst.Module([shell], default_indent=parsed.module.default_indent).code
    # The shell's own line stands above the definition's, so that every line keeps its number in the file.
    text = "\n" * (line + dropped - 2) + text if line + dropped >= 2 else text
    flags = function.__code__.co_flags & _FUTURE
    try:
        compiled = compile(text, file, "exec", dont_inherit=True, flags=flags)
    except SyntaxError as error:
        raise InstrumentError(f"it does not compile with taps: {error.msg}, line {error.lineno}") from error
    shell_code = _code(compiled, _SHELL)
    code = _code(shell_code, function.__code__.co_name)
    missing = set(code.co_freevars) - set(names)
    if missing:
        raise InstrumentError(f"it does not compile with taps: {', '.join(sorted(missing))} are not in its closure")
    # Outside its class a private name (`self.__x`) is another.
    if other := set(code.co_names) - set(function.__code__.co_names) - {TAP}:
        raise InstrumentError(f"it does not compile with taps: {', '.join(sorted(other))} would be other names")
    return Instrumented(function, code, text, tuple(names_of), own)


def _first(function: Function) -> cst.Name:
    parameters = function.node.params
    positional = [*parameters.posonly_params, *parameters.params]
    if not positional:
        raise InstrumentError(f"{function.node.name.value} takes no argument that could have the taps")
    return cst.Name(positional[0].name.value)


def _code(inside: CodeType, name: str) -> CodeType:
    return next(c for c in inside.co_consts if isinstance(c, CodeType) and c.co_name == name)

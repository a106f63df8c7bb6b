"""A forward with taps around some of its ops: the same function, but these values go through one more call each."""

from __future__ import annotations
import __future__

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import libcst as cst

from vtaps.codegen.source_ops import Found, Function, dotted, find_ops, parse_function

TAP = "__vtaps_tap__"
_SHELL = "__vtaps_shell__"
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class InstrumentError(ValueError):
    """The function cannot be had with these taps."""


@dataclass(frozen=True)
class Point:
    """One expression of a function and what its value is: that of an op, and of the names that it is bound to, or an
    argument (``f_0.input[1]``).  ``behind``: it is assigned to in place, and the tap is behind that."""

    node: cst.BaseExpression
    names: tuple[str, ...]
    behind: bool


def points(function: Function, wanted: Collection[str] | None = None) -> list[Point]:
    """The expressions to put a tap around for the ops and arguments ``wanted`` (None: all that can have one).

    A name that is bound to an op's value, or to an element of it, has that op's.  Raises InstrumentError for what is
    not there or cannot have one.
    """
    found = find_ops(function)
    by_name = {f.op.name: f for f in found}
    places: dict[str, tuple[cst.BaseExpression, Found]] = {}
    for one in found:
        # A value that is subscripted before it is bound is not the op's.
        whole = one.op.of and (one.op.kind == "element" or one.op.item is None)
        source = by_name[one.op.of] if whole else one
        places[one.op.name] = (source.node, source)
        for arg, node in zip(one.op.args, one.args, strict=True):
            if arg.tapped:
                places[f"{one.op.name}.{arg.place}"] = (node, one)
    if wanted is not None and (absent := sorted(set(wanted) - set(places))):
        raise InstrumentError(f"no op {', '.join(absent)}; there are {', '.join(by_name)}")
    out: dict[int, Point] = {}
    for name in places if wanted is None else wanted:
        node, source = places[name]
        if not source.op.fixed:
            known = out.get(id(node))
            behind = source.op.kind == "augmented" and node is source.node
            out[id(node)] = Point(node, (*(known.names if known else ()), name), behind)
        elif wanted is not None:
            raise InstrumentError(f"{name}: nothing can be put around it ({source.op.fixed})")
    return list(out.values())


def instrumented_source(source: str, wanted: Collection[str] | None = None, calls: Collection[str] = ()) -> str:
    """``source``, at the left margin, with ``TAP("names", value)`` in place of each value; no line is moved.

    The names are those at that place, in order, joined by a space.  What the ops ``calls`` call is a copy of it with
    taps, :func:`copy_name`.  Raises SourceError, InstrumentError.
    """
    function = parse_function(source)
    made = _instrument(function, points(function, wanted), calls)
    module = cst.Module([made], default_indent=function.module.default_indent)
    return module.code


def copy_name(op: str) -> str:
    """What a forward with taps names the copy of the function that ``op`` calls."""
    return f"__vtaps_{op}__"


def _instrument(
    function: Function, found: Collection[Point], calls: Collection[str], own: cst.BaseExpression | None = None
) -> cst.FunctionDef:
    """``own``: what has the tap and the copies as attributes; None where they are names."""
    by_name = {f.op.name: f for f in find_ops(function)} if calls else {}
    copies: dict[int, str] = {}
    for name in calls:
        one = by_name.get(name)
        if one is None or one.op.kind != "call":
            raise InstrumentError(f"no call {name}")
        assert isinstance(one.node, cst.Call)
        if one.op.fixed or one.op.repeats:
            raise InstrumentError(f"{name}: it is {one.op.fixed or 'in a loop'}")
        if "\n" in function.module.code_for_node(one.node.func):
            raise InstrumentError(f"{name}: what it calls is written over several lines")
        copies[id(one.node)] = copy_name(name)
    made = function.node.visit(_Inserter(found, copies, own))
    assert isinstance(made, cst.FunctionDef)
    return made


class _Inserter(cst.CSTTransformer):
    """``copies``: calls whose callee is a copy of that name; a method's takes ``self`` first."""

    def __init__(self, found: Collection[Point], copies: Mapping[int, str], own: cst.BaseExpression | None) -> None:
        super().__init__()
        self._names = {id(p.node): " ".join(p.names) for p in found}
        self._behind = {id(p.node) for p in found if p.behind}
        self._copies, self._own = copies, own

    def _called(self, name: str) -> cst.BaseExpression:
        return cst.Name(name) if self._own is None else cst.Attribute(self._own.deep_clone(), cst.Name(name))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return self._after_augmented(original_node, updated)
        if (copy := self._copies.get(id(original_node))) is not None:
            updated = _calling(self._called(copy), original_node, updated)
        name = self._names.get(id(original_node))
        if name is None or id(original_node) in self._behind:
            return updated
        return _call(self._called(TAP), name, updated)

    def _after_augmented(self, original: Any, updated: Any) -> Any:
        """An augmented assignment has no value to go through a call: its target does, behind it."""
        body: list[cst.BaseSmallStatement] = []
        for before, after in zip(original.body, updated.body, strict=True):
            body.append(after)
            name = self._names.get(id(before.target)) if isinstance(before, cst.AugAssign) else None
            if name is not None:
                body.append(cst.Assign([cst.AssignTarget(after.target)], _call(self._called(TAP), name, after.target)))
        if len(body) == len(updated.body):
            return updated
        semicolon = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
        return updated.with_changes(body=[*(s.with_changes(semicolon=semicolon) for s in body[:-1]), body[-1]])


def _calling(copy: cst.BaseExpression, original: cst.Call, updated: cst.Call) -> cst.Call:
    args = list(updated.args)
    if isinstance(original.func, cst.Attribute) and dotted(original.func)[0] == "self":
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")) if args else cst.MaybeSentinel.DEFAULT
        args.insert(0, cst.Arg(cst.Name("self"), comma=comma))
    return updated.with_changes(func=copy, args=args)


def _call(tap: cst.BaseExpression, names: str, value: Any) -> cst.Call:
    if isinstance(value, (cst.Tuple, cst.GeneratorExp, cst.Yield)) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.Call(tap, [cst.Arg(cst.SimpleString(f'"{names}"'), comma=comma), cst.Arg(value)])


@dataclass(frozen=True)
class Instrumented:
    """The compiled form of a function with taps; :meth:`bind` makes functions of it.  ``names``: what each tap is
    called with, its names joined by a space; ``calls``: the ops that call a copy; ``own``: tap and copies are
    attributes of the first argument."""

    function: FunctionType
    code: CodeType
    source: str
    names: tuple[str, ...]
    calls: tuple[str, ...] = ()
    own: bool = False

    def bind(
        self,
        tap: Callable[[str, Any], Any] | None = None,
        copies: Mapping[str, Callable[..., Any]] | None = None,
    ) -> FunctionType:
        """The function with ``tap(names, value)`` called at each point; what it returns is the value there.  None for
        one whose first argument has the tap, under the name :data:`TAP`, and the copies, under theirs.

        ``copies``: what each of :attr:`calls` calls instead, a method's with ``self`` first.  Globals, defaults,
        annotations and the cells of its closure are the function's own.  The tap is in a cell too, and so are the
        copies: a compiler looks globals up in the module.
        """
        assert (tap is None) == self.own
        old = self.function
        cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
        if tap is not None:
            cells[TAP] = CellType(tap)
            cells |= {copy_name(op): CellType((copies or {})[op]) for op in self.calls}
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
    calls: Collection[str] = (),
    *,
    own: bool = False,
) -> Instrumented:
    """``function`` with taps around what is ``wanted``, and ``calls`` that call copies; ``source`` is its text, which
    starts at ``line`` of ``file``.

    ``own``: the tap is not a cell of the function but an attribute of its first argument, so that the function's cells
    are those that it had.  Decorators are left out: what they made of the function is not the function.  Raises
    SourceError, InstrumentError.
    """
    parsed = parse_function(source)
    found = points(parsed, wanted)
    holder = _first(parsed) if own else None
    made = _instrument(parsed, found, calls, holder).with_changes(decorators=[], leading_lines=[])
    dropped = parsed.line(parsed.node.name) - 1
    names = (*function.__code__.co_freevars, *(() if own else (TAP, *map(copy_name, calls))))
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
    if other := set(code.co_names) - set(function.__code__.co_names) - {TAP, *map(copy_name, calls)}:
        raise InstrumentError(f"it does not compile with taps: {', '.join(sorted(other))} would be other names")
    return Instrumented(function, code, text, tuple(" ".join(p.names) for p in found), tuple(calls), own)


def _first(function: Function) -> cst.Name:
    parameters = function.node.params
    positional = [*parameters.posonly_params, *parameters.params]
    if not positional:
        raise InstrumentError(f"{function.node.name.value} takes no argument that could have the taps")
    return cst.Name(positional[0].name.value)


def _code(inside: CodeType, name: str) -> CodeType:
    return next(c for c in inside.co_consts if isinstance(c, CodeType) and c.co_name == name)

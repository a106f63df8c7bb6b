"""The ops of a function, by name: every call, binary expression and assignment of a forward.

An op is named after what it calls, dots as underscores, and a number counted per name in the order in which Python
evaluates: ``self_qkv_proj_0``, ``qkv_split_0``.  A binary expression is ``binop_add_0``, an assignment is named after
its target (``attn_output_0``), and so is each name that a tuple is unpacked into (``q_0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from vtaps.codegen.loose_names import loose_names
from vtaps.spec.source import Arg, Op

TEXT_LIMIT = 60

_BINARY = {
    cst.Add: "add", cst.Subtract: "sub", cst.Multiply: "mul", cst.Divide: "truediv", cst.FloorDivide: "floordiv",
    cst.Modulo: "mod", cst.Power: "pow", cst.MatrixMultiply: "matmul", cst.LeftShift: "lshift",
    cst.RightShift: "rshift", cst.BitAnd: "and", cst.BitOr: "or", cst.BitXor: "xor",
}  # fmt: skip


_CONSTANT = (
    cst.BaseNumber, cst.SimpleString, cst.ConcatenatedString, cst.FormattedString, cst.Lambda, cst.ListComp,
    cst.SetComp, cst.DictComp, cst.GeneratorExp, cst.Ellipsis,
)  # fmt: skip


class SourceError(ValueError):
    """The text is not one function."""


@dataclass
class Function:
    """A parsed function; ``offset`` lines stand above it in ``module``."""

    module: cst.Module
    node: cst.FunctionDef
    positions: dict[cst.CSTNode, CodeRange]
    offset: int
    found: list[Found] = field(default_factory=list)

    def line(self, node: cst.CSTNode) -> int:
        """Counted from 1 at the first line of the function's text, its decorators included."""
        return int(self.positions[node].start.line) - self.offset

    def text(self, node: cst.CSTNode) -> str:
        words = " ".join(self.module.code_for_node(node).split())
        words = re.sub(r"(?<=[(\[{]) | (?=[)\]}])", "", words)
        return words if len(words) <= TEXT_LIMIT else words[: TEXT_LIMIT - 1] + "…"


@dataclass
class Found:
    """An op, the expression whose value it is (of an unpacked name the whole tuple), and those of its arguments."""

    op: Op
    node: cst.BaseExpression
    args: tuple[cst.BaseExpression, ...] = ()


@lru_cache(maxsize=64)
def parse_function(source: str) -> Function:
    """``source`` as ``inspect.getsource`` gives it, indented or not.  Shared: do not change it.  Raises SourceError."""
    # Not dedented: lines of a string may stand left of the definition.
    inside = source[:1].isspace()
    text = f"class _:\n{source}" if inside else source
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise SourceError(f"it does not parse: {error.message}") from error
    body: Iterable[cst.CSTNode] = wrapper.module.body
    if inside:
        (holder,) = wrapper.module.body
        assert isinstance(holder, cst.ClassDef)
        body = holder.body.body
    functions = [node for node in body if isinstance(node, cst.FunctionDef)]
    if len(functions) != 1:
        raise SourceError("it is not one function")
    positions = dict(wrapper.resolve(PositionProvider))
    return Function(wrapper.module, functions[0], positions, int(inside))


def ops_of(source: str) -> tuple[Op, ...]:
    """The ops of one function, in the order of evaluation.  Raises SourceError."""
    return tuple(found.op for found in find_ops(parse_function(source)))


def decorators_of(source: str) -> set[str]:
    """What decorates one function, dotted.  Raises SourceError."""
    found = (decorator.decorator for decorator in parse_function(source).node.decorators)
    return {".".join(dotted(node.func if isinstance(node, cst.Call) else node)) for node in found}


def find_ops(function: Function) -> list[Found]:
    """Shared, as the function is: do not change it."""
    if not function.found:
        walker = _Walker(function, loose_names(function.node), found=function.found)
        walker.walk(function.node.body)
    return function.found


def dotted(node: cst.CSTNode) -> list[str]:
    """``["self", "attn"]`` of ``self.attn``, subscripts left out; of another root, what follows it."""
    parts: list[str] = []
    while True:
        if isinstance(node, cst.Attribute):
            parts.append(node.attr.value)
            node = node.value
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            if isinstance(node, cst.Name):
                parts.append(node.value)
            return parts[::-1]


def _names_only(node: cst.CSTNode) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _constant(node: cst.BaseExpression) -> bool:
    """Whether it can be no tensor of the model's."""
    if isinstance(node, cst.UnaryOperation):
        return _constant(node.expression)
    named = isinstance(node, cst.Name) and node.value in ("None", "True", "False", "self")
    return named or isinstance(node, _CONSTANT)


def _in_part(node: cst.CSTNode) -> bool:
    """Whether what is assigned to is a part of another value."""
    return isinstance(node, cst.Subscript) or (isinstance(node, cst.Attribute) and dotted(node)[0] != "self")


def _rooted(node: cst.CSTNode) -> bool:
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        node = node.value
    return isinstance(node, cst.Name)


@dataclass
class _Walker:
    """Visits in the order in which Python evaluates: a value before its targets, a test before what it chooses,
    positional before keyword arguments."""

    function: Function
    loose: frozenset[str]
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    loops: int = 0
    fixed: str = ""

    def add(
        self,
        name: str,
        node: cst.BaseExpression,
        kind: str,
        text: str,
        *,
        of: str = "",
        item: int | None = None,
        args: Iterable[tuple[Arg, cst.BaseExpression]] = (),
    ) -> str:
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        made = f"{name}_{number}"
        # In a loop or where nothing can be put around the op, nothing can be put around these either.
        line, pairs = self.function.line(node), [] if self.loops or self.fixed else list(args)
        op = Op(
            made, line, kind, text, of, item, bool(self.loops), self.fixed, args=tuple(arg for arg, _ in pairs)
        )  # fmt: skip
        self.found.append(Found(op, node, tuple(value for _, value in pairs)))
        return made

    def walk(self, node: cst.CSTNode) -> str:
        """Visits ``node``; returns the name of the op whose value it is, if there is one."""
        match node:
            case cst.Call():
                return self._call(node)
            case cst.BinaryOperation(left=left, operator=operator, right=right):
                sides = [(self._arg(n, side, self.walk(side)), side) for n, side in enumerate((left, right))]
                return self.add(
                    f"binop_{_BINARY[type(operator)]}", node, "binary", self.function.text(node), args=sides
                )
            case cst.Assign(targets=targets, value=value):
                of = self.walk(value)
                for target in targets:
                    self.walk(target.target)
                for target in targets:
                    self._bind(target.target, value, of)
            case cst.AnnAssign(target=target, value=value) if value is not None:
                of = self.walk(value)
                self._bind(target, value, of)
            case cst.AnnAssign():
                pass
            case cst.AugAssign(target=target, value=value):
                self.walk(value)
                if _rooted(target):
                    # A tap looks its target up once more, so it may be nothing but names.
                    held, self.fixed = self.fixed, self.fixed or ("" if _names_only(target) else "part of a value")
                    self.add("_".join(dotted(target)), target, "augmented", self.function.text(node))
                    self.fixed = held
            case cst.Subscript(
                value=value, slice=[cst.SubscriptElement(slice=cst.Index(value=cst.Integer() as number))]
            ):
                if of := self.walk(value):
                    self.parts[id(node)] = (of, int(number.evaluated_value))
            case cst.NamedExpr(target=target, value=value):
                of = self.walk(value)
                self._bind(target, value, of)
                return of
            case cst.IfExp(test=test, body=body, orelse=orelse):
                for part in (test, body, orelse):
                    self.walk(part)
            case cst.Dict(elements=elements):
                for element in elements:
                    if isinstance(element, cst.DictElement):
                        self.walk(element.key)
                    self.walk(element.value)
            case cst.For(target=target, iter=over, body=body, orelse=orelse):
                self.walk(over)
                self._within(target, body)
                if orelse is not None:
                    self.walk(orelse)
            case cst.While(test=test, body=body, orelse=orelse):
                self._within(test, body)
                if orelse is not None:
                    self.walk(orelse)
            case cst.ListComp() | cst.SetComp() | cst.DictComp() | cst.GeneratorExp():
                self._fixed("in a comprehension", node.for_in, *_elements(node), loop=True)
            case cst.Lambda(body=body):
                self._fixed("in a lambda", body)
            case cst.FunctionDef(body=body, name=name):
                self._fixed(f"in the nested function {name.value}", body)
            case cst.ClassDef(name=name):
                self._fixed(f"in the nested class {name.value}", *node.children)
            case cst.FormattedString():
                self._fixed("in an f-string", *node.children)
            case cst.Annotation():
                pass
            case _:
                for child in node.children:
                    self.walk(child)
        return ""

    def _call(self, node: cst.Call) -> str:
        if isinstance(node.func, cst.Name) and node.func.value == "super" and not node.args:
            return ""  # its frame is its meaning
        self.walk(node.func)
        made: dict[int, Arg] = {}
        for keyword in (False, True):
            for number, arg in enumerate(node.args):
                if (arg.keyword is not None or arg.star == "**") == keyword:
                    of = self.walk(arg.value)
                    starred = any(before.star for before in node.args[: number + 1]) and arg.keyword is None
                    key = "" if starred else number if arg.keyword is None else arg.keyword.value
                    made[number] = self._arg(key, arg.value, of)
        args = [(made[number], arg.value) for number, arg in enumerate(node.args)]
        return self.add("_".join(dotted(node.func)) or "call", node, "call", self.function.text(node.func), args=args)

    def _arg(self, key: int | str, value: cst.BaseExpression, of: str) -> Arg:
        """``of``: the op whose value it is."""
        if key == "" or _constant(value):
            return Arg(key)
        if of:
            return Arg(key, of)
        if id(value) in self.parts:
            return Arg(key, *self.parts[id(value)])
        if isinstance(value, cst.Name) and value.value not in self.loose:
            return Arg(key, name=value.value)
        return Arg(key, other=True)

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression, of: str) -> None:
        """The names that an assignment binds; of a tuple, each with the element of ``of`` that it is."""
        if isinstance(target, (cst.Tuple, cst.List)):
            items = [element.value for element in target.elements]
            if any(isinstance(element, cst.StarredElement) for element in target.elements):
                return
            if isinstance(value, (cst.Tuple, cst.List)):
                if len(value.elements) == len(items):
                    begin = len(self.found)
                    for item, element in zip(items, value.elements, strict=True):
                        self._bind(item, element.value, "")
                    # They are bound together, however many lines they are written over.
                    for one in self.found[begin:]:
                        one.op = replace(one.op, line=self.found[begin].op.line)
                return
            for place, item in enumerate(items):
                if isinstance(item, cst.Name) and item.value != "_":
                    self.add(item.value, value, "element", self.function.text(value), of=of, item=place)
            return
        if _rooted(target) and not (isinstance(target, cst.Name) and target.value == "_"):
            kind = "item" if _in_part(target) else "bind"
            number: int | None = None
            if not of:
                of, number = self.parts.get(id(value), ("", None))
            held = self.fixed
            if isinstance(value, cst.Name) and value.value in self.loose:
                self.fixed = held or f"a name of what `{value.value}` is then"
            self.add("_".join(dotted(target)), value, kind, self.function.text(value), of=of, item=number)
            self.fixed = held

    def _within(self, *nodes: cst.CSTNode) -> None:
        self.loops += 1
        for node in nodes:
            self.walk(node)
        self.loops -= 1

    def _fixed(self, why: str, *nodes: cst.CSTNode, loop: bool = False) -> None:
        before, self.fixed = self.fixed, self.fixed or why
        self.loops += loop
        for node in nodes:
            self.walk(node)
        self.loops -= loop
        self.fixed = before


def _elements(node: cst.ListComp | cst.SetComp | cst.DictComp | cst.GeneratorExp) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.DictComp):
        yield node.key
        yield node.value
    else:
        yield node.elt

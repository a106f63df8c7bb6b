"""The inside of a module's forward as data: which function it is, and its ops."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("call", "binary", "bind", "item", "element", "augmented")


@dataclass(frozen=True)
class Arg:
    """One argument of a call, or side of a binary expression.

    ``key`` is its number, from 0, or its keyword; empty for one without either: starred, or behind a starred one.  It
    is what the op ``of`` computes (element ``item`` of it, or row), or what ``name`` is bound to, or another expression
    (``other``), or none of these: a constant, or starred.
    """

    key: int | str
    of: str = ""
    item: int | None = None
    name: str = ""
    other: bool = False

    @property
    def place(self) -> str:
        """``input[0]``, ``input.dim``"""
        return f"input[{self.key}]" if isinstance(self.key, int) else f"input.{self.key}"

    @property
    def tapped(self) -> bool:
        """Whether a tap can stand here: what an op computes has one there."""
        return self.key != "" and (self.other or bool(self.name) or (bool(self.of) and self.item is not None))


@dataclass(frozen=True)
class Op:
    """One value that a forward computes.

    ``name`` is unique in it; ``line`` counts from 1 at the first line of its text; ``kind`` is one of :data:`KINDS`;
    ``text`` is what is called, bound or computed, shortened.  An ``element`` is number ``item`` of what ``of``
    puts out; a ``bind`` is what ``of`` puts out, where that is an op, or with ``item`` ``of``'s value subscripted;
    an ``item`` is a bind to a part of another value.  ``repeats``: it is in a loop; ``fixed``: why nothing can be put
    around it; ``inside``: the function it calls, in :attr:`ModelTree.forwards`, where that has ops, and ``sealed`` why
    no spec can use those.
    """

    name: str
    line: int
    kind: str
    text: str
    of: str = ""
    item: int | None = None
    repeats: bool = False
    fixed: str = ""
    inside: str = ""
    sealed: str = ""
    args: tuple[Arg, ...] = ()


@dataclass(frozen=True)
class Forward:
    """The function that modules of one class run: ``where`` is ``module.Class.function`` as Python names it, ``file``
    the path below the folder of installed packages, ``line`` and ``lines`` its place there, ``digest`` the sha256 of
    its text.  ``reason`` says why it has no ops, where it has none to show."""

    where: str
    file: str = ""
    line: int = 0
    lines: int = 0
    digest: str = ""
    ops: tuple[Op, ...] = ()
    reason: str = ""


def value_name(op: str, argument: int | str | None) -> str:
    """Of what ``op`` computes, or takes in: ``q_0``, ``f_0.input[1]``, ``f_0.source.q_0``."""
    return op if argument is None else f"{op}.{Arg(argument).place}"


def within(op: str, name: str) -> str:
    """The name, in a forward, of the value ``name`` in the function that its op ``op`` calls."""
    return f"{op}.source.{name}"


def without(name: str) -> tuple[str, str]:
    """The inverse: ``("", name)`` for a value of the forward's own."""
    op, _, inner = name.rpartition(".source.")
    return op, inner


def is_argument(name: str) -> bool:
    """Whether it is the name of an argument, not of what an op computes."""
    return ".input[" in name or ".input." in name


_OP = re.compile(
    r"(?P<line>\d+) (?P<name>\w+) (?P<kind>\w+)(?P<repeats>\*?)(?:\((?P<args>[^()]+)\))?"
    r"(?: of (?P<of>\w*)(?:\[(?P<item>\d+)\])?)?(?: !(?P<fixed>[^:]+)!)?"
    r"(?: >(?: (?P<inside>[^: (]+))?(?: \((?P<sealed>[^:()]+)\))?)?: (?P<text>.*)"
)
_ARG = re.compile(r"(?:(?P<key>\w+)=)?(?:@(?P<of>\w+)(?:\[(?P<item>\d+)\])?|(?P<name>\w+)|(?P<mark>[?*-]))")


def op_text(op: Op) -> str:
    """One line: ``3 q_0 element of qkv_split_0[0]: qkv.split(…)``, ``4 f_0 call(x, @g_0, dim=-): f``."""
    of = "" if not op.of and op.item is None else f" of {op.of}" + ("" if op.item is None else f"[{op.item}]")
    fixed = f" !{op.fixed}!" if op.fixed else ""
    called = (f" {op.inside}" if op.inside else "") + (f" ({op.sealed})" if op.sealed else "")
    args = f"({', '.join(map(_arg_text, op.args))})" if op.args else ""
    return f"{op.line} {op.name} {op.kind}{'*' * op.repeats}{args}{of}{fixed}{called and ' >' + called}: {op.text}"


def _arg_text(arg: Arg) -> str:
    """``?`` is another expression, ``-`` a constant, ``*`` one without a key."""
    item = "" if arg.item is None else f"[{arg.item}]"
    what = f"@{arg.of}{item}" if arg.of else arg.name or ("?" if arg.other else "-")
    return "*" if arg.key == "" else what if isinstance(arg.key, int) else f"{arg.key}={what}"


def parse_op(text: str) -> Op:
    """The inverse of :func:`op_text`; raises ValueError."""
    found = _OP.fullmatch(text)
    if found is None or found["kind"] not in KINDS:
        raise ValueError(f"not an op: {text!r}")
    return Op(
        found["name"], int(found["line"]), found["kind"], found["text"], found["of"] or "", _number(found["item"]),
        bool(found["repeats"]), found["fixed"] or "", found["inside"] or "", found["sealed"] or "",
        tuple(_args(found["args"])) if found["args"] else (),
    )  # fmt: skip


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _args(text: str) -> list[Arg]:
    made: list[Arg] = []
    for number, part in enumerate(text.split(", ")):
        found = _ARG.fullmatch(part)
        if found is None:
            raise ValueError(f"not an argument: {part!r}")
        key: int | str = "" if found["mark"] == "*" else found["key"] or number
        made.append(Arg(key, found["of"] or "", _number(found["item"]), found["name"] or "", found["mark"] == "?"))
    return made

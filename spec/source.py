"""The inside of a module's forward as data: which function it is, and its ops."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("call", "binary", "bind", "element", "augmented")


@dataclass(frozen=True)
class Op:
    """One value that a forward computes.

    ``name`` is unique in it; ``line`` counts from 1 at the first line of its text; ``kind`` is one of :data:`KINDS`;
    ``text`` is what is called, bound or computed, shortened.  An ``element`` is number ``item`` of what ``of``
    puts out, and a ``bind`` is what ``of`` puts out, where that is an op.  ``repeats``: it is in a loop; ``fixed``: why
    nothing can be put around it; ``inside``: the function it calls, in :attr:`ModelTree.forwards`, where that has ops.
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


_OP = re.compile(
    r"(?P<line>\d+) (?P<name>\w+) (?P<kind>\w+)(?P<repeats>\*?)"
    r"(?: of (?P<of>\w*)(?:\[(?P<item>\d+)\])?)?(?: !(?P<fixed>[^:]+)!)?(?: > (?P<inside>[^: ]+))?: (?P<text>.*)"
)


def op_text(op: Op) -> str:
    """One line: ``3 q_0 element of qkv_split_0[0]: qkv.split(…)``."""
    of = "" if not op.of and op.item is None else f" of {op.of}" + ("" if op.item is None else f"[{op.item}]")
    fixed = f" !{op.fixed}!" if op.fixed else ""
    inside = f" > {op.inside}" if op.inside else ""
    return f"{op.line} {op.name} {op.kind}{'*' * op.repeats}{of}{fixed}{inside}: {op.text}"


def parse_op(text: str) -> Op:
    """The inverse of :func:`op_text`; raises ValueError."""
    found = _OP.fullmatch(text)
    if found is None or found["kind"] not in KINDS:
        raise ValueError(f"not an op: {text!r}")
    item = None if found["item"] is None else int(found["item"])
    return Op(
        found["name"], int(found["line"]), found["kind"], found["text"], found["of"] or "", item,
        bool(found["repeats"]), found["fixed"] or "", found["inside"] or "",
    )  # fmt: skip

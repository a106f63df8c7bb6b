"""The few libcst shapes that a block is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst

from vtaps.spec.plan import EditPlan

Literal = str | int | float | bool | None | tuple[Any, ...]


def name(dotted: str) -> cst.Name | cst.Attribute:
    first, *rest = dotted.split(".")
    node: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


def literal(value: Literal) -> cst.BaseExpression:
    """A constant; texts are double-quoted with JSON's escapes, which Python reads the same."""
    if isinstance(value, str):
        return cst.SimpleString(json.dumps(value, ensure_ascii=True))
    if isinstance(value, tuple):
        return cst.Tuple([cst.Element(literal(v)) for v in value])
    return cst.parse_expression(repr(value))


def call(callee: str, *args: cst.BaseExpression, **keywords: Literal) -> cst.Call:
    plain = [cst.Arg(a) for a in args]
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    named = [cst.Arg(literal(v), keyword=cst.Name(k), equal=equal) for k, v in keywords.items()]
    return cst.Call(name(callee), [*plain, *named])


def call_in_lines(callee: str, **keywords: Literal) -> cst.Call:
    """A call with one keyword a line, where one line would be too long to review."""
    inner = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))
    outer = cst.ParenthesizedWhitespace(indent=True)
    made = call(callee, **keywords)
    args = [
        a.with_changes(comma=cst.Comma(whitespace_after=inner if i + 1 < len(made.args) else outer))
        for i, a in enumerate(made.args)
    ]
    return made.with_changes(args=args, whitespace_before_args=inner)


def statement(node: cst.BaseExpression, comment: str | None = None) -> cst.SimpleStatementLine:
    lines = [comment_line(comment)] if comment else []
    return cst.SimpleStatementLine([cst.Expr(node)], leading_lines=lines)


def comment_line(text: str) -> cst.EmptyLine:
    """A comment of one line: what is not printable ASCII is escaped."""
    safe = text.encode("unicode_escape").decode("ascii")
    return cst.EmptyLine(comment=cst.Comment(f"# {safe}".rstrip()))


def blank(count: int) -> list[cst.EmptyLine]:
    return [cst.EmptyLine(indent=False) for _ in range(count)]


def assign(target: str, value: cst.BaseExpression) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(cst.Name(target))], value)])


def docstring(text: str) -> cst.SimpleStatementLine:
    escaped = json.dumps(text, ensure_ascii=True)[1:-1].replace('\\"', '"').replace('"""', '\\"\\"\\"')
    return cst.SimpleStatementLine([cst.Expr(cst.SimpleString(f'"""{escaped}"""'))])


def function(
    title: str, parameters: Sequence[tuple[str, str]], body: Sequence[cst.SimpleStatementLine], decorator: cst.Call
) -> cst.FunctionDef:
    params = [cst.Param(cst.Name(n), annotation=cst.Annotation(cst.parse_expression(kind))) for n, kind in parameters]
    return cst.FunctionDef(
        name=cst.Name(title),
        params=cst.Parameters(params),
        body=cst.IndentedBlock(list(body)),
        decorators=[cst.Decorator(decorator)],
        returns=cst.Annotation(cst.Name("None")),
        leading_lines=blank(2),
    )


def keywords(pairs: Mapping[str, Literal]) -> dict[str, Literal]:
    """``pairs`` without what stays at its default."""
    return {k: v for k, v in pairs.items() if v is not None}


def edit(verb: str, plan: EditPlan, values: Sequence[cst.BaseExpression], **more: Literal) -> cst.Call:
    """The statement of an edit: its name, what it acts on, the columns that it is narrowed to, and ``more``."""
    named = keywords({"columns": plan.columns, **more, "when": plan.edit.when})
    return call(f"vt.{verb}", cst.Name("t"), literal(plan.edit.name), *values, **named)

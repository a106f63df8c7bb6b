"""The generated text held against the plan it came from, before it replaces a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vtaps.codegen.block import Block, statements_of
from vtaps.spec.plan import Plan


def verify(block: Block, plan: Plan) -> Iterator[str]:
    """What is wrong with a block; nothing where it parses, compiles and says what the plan says."""
    try:
        tree = ast.parse(block.source)
        compile(block.source, "<block>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        yield f"the block does not parse: {error}"
        return
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    others = [n for n in tree.body if not isinstance(n, ast.FunctionDef)]
    if [type(n) for n in others] != [ast.Expr, ast.ImportFrom, ast.Assign]:
        yield "the block holds more than a docstring, an import, BLOCK and its functions"
    if len({f.name for f in functions}) != len(functions):
        yield "two functions of the block share a name"
    locations = [_constant(f.decorator_list[0]) for f in functions]
    if locations != [p.site.name for p in plan.locations]:
        yield "the block's locations are not the plan's"
        return
    for function, location in zip(functions, plan.locations, strict=True):
        said = [v for line, v in sorted(block.statements.items()) if _inside(line, function)]
        meant = [(f"{s.kind}s", s.name) for s in location.statements]
        if said != meant:
            yield f"{function.name} does {said}, the plan {meant}"
        if len(function.body) != len(meant):
            yield f"{function.name} holds a statement that is not a call of the vocabulary"
    if statements_of(block.source) != block.statements:
        yield "the line map is not that of the source"


def _inside(line: int, function: ast.FunctionDef) -> bool:
    return function.lineno <= line <= (function.end_lineno or function.lineno)


def _constant(node: ast.expr) -> object:
    match node:
        case ast.Call(args=[ast.Constant(value=value), *_]):
            return value
    return None

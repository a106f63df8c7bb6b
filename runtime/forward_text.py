"""The text of vLLM's functions as they are installed, read without importing them."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import io
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from vtaps.codegen.instrument import instrumented_source
from vtaps.codegen.source_ops import SourceError, ops_of
from vtaps.runtime.program import Program
from vtaps.spec.source import Forward, parse_op


def file_lines(file: str) -> list[str] | None:
    """The lines of ``file``, a path below the folder of installed packages; None where there is none."""
    try:
        found = importlib.util.find_spec(file.partition("/")[0]) if file else None
        if found is None or found.origin is None:
            return None
        text = (Path(found.origin).parents[1] / file).read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError):
        return None
    # As Python counts them: a form feed or a line separator in a string ends no line.
    return list(io.StringIO(text))


def source_of(forward: Forward) -> list[str] | None:
    """The lines of a forward as they are installed here; None where the file is absent or its text another."""
    lines = (file_lines(forward.file) or [])[forward.line - 1 : forward.line - 1 + forward.lines]
    same = hashlib.sha256("".join(lines).encode()).hexdigest() == forward.digest
    return [line.rstrip("\n") for line in lines] if lines and same else None


def find_texts(where: str, file: str) -> list[str]:
    """The texts of ``module.Class.function`` in ``file``, wherever it stands there: below an ``if`` there may be
    several, and a name in a function is written ``function.<locals>.name``."""
    lines = file_lines(file)
    if lines is None:
        return []
    try:
        bodies = [ast.parse("".join(lines)).body]
    except SyntaxError:
        return []
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: list[ast.ClassDef | ast.FunctionDef] = []
    for name in where.removeprefix(module + ".").replace(".<locals>", "").split("."):
        found = [one for body in bodies for one in _defined(body) if one.name == name]
        bodies = [one.body for one in found]
    texts = []
    for one in found:
        if isinstance(one, ast.FunctionDef):
            first = min([one.lineno, *(d.lineno for d in one.decorator_list)])
            texts.append("".join(inspect.getblock(lines[first - 1 :])))
    return texts


def _defined(body: Iterable[ast.AST]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions that statements define, those in their branches too."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _defined(ast.iter_child_nodes(node))


def changed(program: Program) -> str | None:
    """The first function of the lock whose text here is another, with the ops that it had and those it has."""
    for where, entry in program.forwards.items():
        texts = find_texts(where, entry.file)
        if not texts:
            return f"there is no {where} in the installed vLLM"
        # Which of several is run, a worker sees.
        if any(entry.digest == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" for text in texts):
            continue
        try:
            now = [op.name for op in ops_of(texts[0])]
        except SourceError as error:
            return f"{where} is another text in the installed vLLM, and has no ops: {error}"
        then = [parse_op(op).name for op in entry.ops]
        return (
            f"{where} is another text in the installed vLLM: compiled for the ops {', '.join(then)}; "
            f"here it has {', '.join(now)}"
        )
    return None


def tapped_diff(forward: Forward, values: Collection[str], calls: Collection[str] = ()) -> list[str] | None:
    """A unified diff of the forward's file that shows it with taps around ``values``, and with copies called by the ops
    ``calls``, as a worker compiles it; None where the text is not installed here."""
    whole, own = file_lines(forward.file), source_of(forward)
    if whole is None or own is None:
        return None
    made = instrumented_source("\n".join(own) + "\n", values, calls).removesuffix("\n").split("\n")
    depth = own[0][: len(own[0]) - len(own[0].lstrip())]
    # No line moves: those that say the same stay as they are, indentation and all.
    lines = [old if old.strip() == new.strip() else depth + new for old, new in zip(own, made, strict=True)]
    start = forward.line - 1
    after = [*whole[:start], *(line + "\n" for line in lines), *whole[start + forward.lines :]]
    diff = difflib.unified_diff(whole, after, f"a/{forward.file}", f"b/{forward.file}")
    return [line.rstrip("\n") for line in diff]

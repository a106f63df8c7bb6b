"""The text of vLLM's functions as they are installed, read without importing them."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import io
from collections.abc import Collection, Iterable
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


def find_text(where: str, file: str) -> str | None:
    """The text of ``module.Class.function`` in ``file``, wherever it stands there; None where it is not there."""
    lines = file_lines(file)
    if lines is None:
        return None
    try:
        body: Iterable[ast.stmt] = ast.parse("".join(lines)).body
    except SyntaxError:
        return None
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: ast.stmt | None = None
    for name in where.removeprefix(module + ".").split("."):
        found = next(
            (n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name), None
        )  # fmt: skip
        if found is None:
            return None
        body = found.body if isinstance(found, (ast.ClassDef, ast.FunctionDef)) else ()
    if not isinstance(found, ast.FunctionDef):
        return None
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return "".join(inspect.getblock(lines[first - 1 :]))


def changed(program: Program) -> str | None:
    """The first function of the lock whose text here is another, with the ops that it had and those it has."""
    for where, entry in program.forwards.items():
        text = find_text(where, entry.file)
        if text is None:
            return f"there is no {where} in the installed vLLM"
        if entry.digest == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}":
            continue
        try:
            now = [op.name for op in ops_of(text)]
        except SourceError as error:
            return f"{where} is another text in the installed vLLM, and has no ops: {error}"
        then = [parse_op(op).name for op in entry.ops]
        return (
            f"{where} is another text in the installed vLLM: compiled for the ops {', '.join(then)}; "
            f"here it has {', '.join(now)}"
        )
    return None


def tapped_diff(forward: Forward, ops: Collection[str]) -> list[str] | None:
    """A unified diff of the forward's file that shows it with taps around ``ops``, as a worker compiles it; None where
    the text is not installed here."""
    whole, own = file_lines(forward.file), source_of(forward)
    if whole is None or own is None:
        return None
    made = instrumented_source("\n".join(own) + "\n", ops).removesuffix("\n").split("\n")
    depth = own[0][: len(own[0]) - len(own[0].lstrip())]
    # No line moves: those that say the same stay as they are, indentation and all.
    lines = [old if old.strip() == new.strip() else depth + new for old, new in zip(own, made, strict=True)]
    start = forward.line - 1
    after = [*whole[:start], *(line + "\n" for line in lines), *whole[start + forward.lines :]]
    diff = difflib.unified_diff(whole, after, f"a/{forward.file}", f"b/{forward.file}")
    return [line.rstrip("\n") for line in diff]

"""The functions that ``python`` edits and reads name, looked at without being run."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from vtaps.spec import digests
from vtaps.spec.diagnostics import Diagnostic, nearest
from vtaps.spec.document import Document
from vtaps.spec.files import nearest_file, path_in, read_bytes
from vtaps.spec.plan import EditPlan, ReadPlan
from vtaps.spec.spec import Edit, Read

LARGEST_PYTHON = 4 << 20
"""Bytes of a file of functions."""


def check_functions(
    edits: Mapping[str, EditPlan], reads: Mapping[str, ReadPlan], doc: Document, found: list[Diagnostic]
) -> dict[str, str]:
    """VT322 for a file or function that cannot be used; returns file → digest."""
    known: dict[str, str] = {}
    owners: list[Edit | Read] = [*(p.edit for p in edits.values()), *(p.read for p in reads.values())]
    for owner in owners:
        if owner.python is None:
            continue
        file, function = owner.python
        who = f"{str(owner.where[0]).removesuffix('s')} {owner.name!r}"
        span = doc.at(*owner.where, "python")
        try:
            path = path_in(doc.folder, file)
            content = read_bytes(path, LARGEST_PYTHON)
        except OSError as error:
            near = nearest_file(doc.folder / file, ".py")
            found.append(Diagnostic("VT322", f"{who}: {file}: {error.strerror}", span, nearest=near))
            continue
        known[file] = digests.of_bytes(content)
        try:
            body = ast.parse(content.decode("utf-8")).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            message = error.msg if isinstance(error, SyntaxError) else _why(error)
            found.append(Diagnostic("VT322", f"{who}: {file} does not parse: {message}{line}", span))
            continue
        functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
        if function not in functions:
            found.append(
                Diagnostic(
                    "VT322", f"{who}: {file} has no function `{function}`", span, tuple(functions),
                    nearest(function, functions),
                )
            )  # fmt: skip
        elif (wrong := _wrong_parameters(functions[function].args)) is not None:
            found.append(
                Diagnostic(
                    "VT322", f"{who}: {file}:{function} {wrong}", span,
                    note="it is called with the rows, or with the rows and where they are from: `def f(rows, at)`",
                )
            )  # fmt: skip
    return known


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deep" if isinstance(error, RecursionError | MemoryError) else str(error)


def _wrong_parameters(args: ast.arguments) -> str | None:
    count = len(args.posonlyargs) + len(args.args)
    required = count - len(args.defaults)
    named = [a.arg for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    if named:
        return f"needs {', '.join(named)} by name"
    if required > 2 or (count == 0 and args.vararg is None):
        return f"takes {count} parameters"
    return None

"""What a YAML syntax error means to the person who wrote the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vtaps.spec.diagnostics import Diagnostic, Span

# a location with layers in brackets: resid_post[10, 12], model.layers[3].mlp.output[0]
_LOCATION = re.compile(r"[A-Za-z_][\w.*]*\[[^\[\]{}\"'\r\n]*\](?:(?:\.\w+)+(?:\[-?\d+\])?)?")
_Spans = Callable[[int, int], Span]


def unquoted_bracket(error: Any, text: str) -> tuple[int, int] | None:
    """The stretch of an unquoted ``name[…]`` that ``error`` stumbled over inside a flow collection, or None."""
    at = _offset(error)
    if at is None:
        return None
    start = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
    stops = [e for e in (text.find("\n", at), text.find("\r", at)) if e >= 0]
    end = min(stops, default=len(text))
    problem = str(error.problem or "")
    if not (("',' or" in problem and text[at : at + 1] == "[") or "alphabetic or numeric" in problem):
        return None
    for match in _LOCATION.finditer(text, start, end):
        if match.start() < at < match.end():
            return match.span()
    return None


def explain(error: Any, text: str, span: _Spans, bracket: tuple[int, int] | None) -> Diagnostic:
    """VT001, VT002, VT006 or VT008 for ``error``; ``bracket`` is what :func:`unquoted_bracket` found."""
    if bracket:
        written = text[bracket[0] : bracket[1]]
        message = f"`{written}` needs quotes here: inside {{…}} or […], YAML takes its bracket for a list"
        return Diagnostic("VT002", message, span(*bracket), note=f'write "{written}"')
    at = _offset(error) or 0
    opened = error.context_mark.index if error.context_mark else at
    problem, context = str(error.problem or ""), str(error.context or "")
    char = text[at : at + 1]
    here = span(at, at + 1)
    if "nesting depth" in problem:  # libyaml scans ahead of the events that are counted
        return Diagnostic("VT006", "nested far too deep", here)
    if "undefined tag handle" in problem or "tag" in context:
        return Diagnostic("VT008", "a tag (`!`) that is not defined", here, note="a spec is plain data: remove the tag")
    if "',' or" in problem and char in ("[", "{") and _after_text(text, at):
        message = f"text with `{char}` in it needs quotes inside {{…}} or […]"
        return Diagnostic("VT002", message, here, note="put the whole value in double quotes")
    message, place, note = _syntax(problem, context, text, at, opened)
    return Diagnostic("VT001", message, span(place, place + 1), note=note)


def _offset(error: Any) -> int | None:
    mark = error.problem_mark or error.context_mark
    return None if mark is None else int(mark.index)


def _after_text(text: str, at: int) -> bool:
    """Whether unquoted text stands right before ``at`` on its line."""
    before = text[max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1 : at].rstrip(" \t")
    return bool(before) and before[-1] not in ",:{[\"'}]"


def _syntax(problem: str, context: str, text: str, at: int, opened: int) -> tuple[str, int, str | None]:
    """(message, offset, note).  The phrases are those of both of PyYAML's parsers."""
    char = text[at : at + 1]
    if char == "\t" or "tab character" in problem:
        return "a tab cannot indent YAML", at, "indent with spaces"
    if "cannot start any token" in problem:
        return f"unquoted text cannot start with `{char}`", at, "put the value in quotes"
    if "',' or" in problem:
        bracket = text[opened : opened + 1]
        close = {"{": "}", "[": "]"}.get(bracket, "}")
        line = text.count("\n", 0, at) + 1
        if text.count("\n", 0, opened) + 1 == line:
            return f"a `,` or `{close}` is missing before this", min(at, max(len(text) - 1, 0)), None
        quote = _open_quote(text, opened)
        if quote is not None:
            return "the quote opened here is not closed on its line", quote, None
        return f"the `{bracket}` opened here is not closed before line {line}", opened, f"add the `{close}`"
    if "mapping values are not allowed" in problem:
        note = "text that holds `: ` needs quotes; a nested mapping starts on a line of its own"
        return "a second `:` where a value stands already", at, note
    if "unexpected end of stream" in problem or "unexpected document separator" in problem:
        return "the quote opened here is not closed", opened, None
    if "escape" in problem or "hexdecimal" in problem or "hexadecimal" in problem:
        slash = text.rfind("\\", 0, at + 1)
        note = r"write \\ for a backslash, or use single quotes"
        return "an escape that YAML does not know", slash if slash >= 0 else at, note
    if "alias" in context:
        return "a value that starts with `*` is a YAML alias", opened, "put the value in quotes"
    if "anchor" in context:
        return "a value that starts with `&` is a YAML anchor", opened, "put the value in quotes"
    if "could not find expected ':'" in problem:
        return "a key without its `:`", opened, "write `key: value`, with a space after the colon"
    if "simple key" in context or "expected key" in problem or "<block end>" in problem:
        return _misplaced(char, at)
    if "document start" in problem:
        return "text after the end of the spec", at, "the spec is one mapping, with its keys at one indentation"
    if "'-' indicator" in problem:
        return "this does not continue the list above", at, "check the indentation; a list item starts with `- `"
    if "node content" in problem:
        return f"`{char}` where a value should stand" if char.strip() else "a value is missing here", at, None
    if "incompatible YAML" in problem:
        return "a YAML version this cannot read", at, "specs are YAML 1.2: remove the directive"
    words = ", ".join(w for w in (context, problem) if w)
    return f"not YAML: {words}", at, None


def _open_quote(text: str, start: int) -> int | None:
    """Where, between ``start`` and the end of its line, a double quote opens and does not close."""
    end = text.find("\n", start)
    quotes = [m.start() for m in re.finditer(r'(?<!\\)"', text[start : end if end >= 0 else None])]
    return start + quotes[-1] if len(quotes) % 2 else None


def _misplaced(char: str, at: int) -> tuple[str, int, str | None]:
    if char in ("}", "]"):
        return f"a `{char}` that closes nothing", at, None
    if char == "-":
        return "a list item among keys", at, "a list stands below its key or inside […]"
    return "this does not continue the mapping above", at, "check the indentation, and quotes that close too early"

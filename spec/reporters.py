"""Findings → text for a terminal, JSON, GitHub annotations or SARIF."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args
from urllib.parse import quote

from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import Diagnostic, in_order
from vtaps.spec.explain import page

Format = Literal["text", "json", "github", "sarif"]
FORMATS: tuple[Format, ...] = get_args(Format)

_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "info": "\x1b[1;36m"}
_BOLD, _BLUE, _RESET = "\x1b[1m", "\x1b[1;34m", "\x1b[0m"
_WIDTH = 120
_SARIF_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def render(
    diagnostics: Iterable[Diagnostic], format: Format, documents: Mapping[str, str], *, color: bool = False
) -> str:
    """The findings, sorted, in one of ``FORMATS``; ``documents`` maps a file's name to its text.

    The text form quotes the source line where the file is in ``documents``; control characters are escaped in it.
    ``color`` is for the text form alone.  Raises ValueError for another format.
    """
    found = in_order(diagnostics)
    match format:
        case "text":
            return _text(found, documents, color)
        case "json":
            return _json(found)
        case "github":
            return "".join(_github(d) + "\n" for d in found)
        case "sarif":
            return _sarif(found)
    raise ValueError(f"no format {format!r}; one of {', '.join(FORMATS)}")


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """``2 errors, 1 warning``"""
    severities = [d.severity for d in diagnostics]
    parts = []
    for name in ("error", "warning", "info"):
        if count := severities.count(name):
            parts.append(f"{count} {name}{'s' if count > 1 and name != 'info' else ''}")
    return ", ".join(parts) or "no findings"


# Text


def _text(found: list[Diagnostic], documents: Mapping[str, str], color: bool) -> str:
    lines: dict[str, list[str]] = {}
    blocks = []
    for d in found:
        if d.span.file in documents and d.span.file not in lines:
            lines[d.span.file] = re.split("\r\n|\r|\n", documents[d.span.file].removeprefix("\ufeff"))
        blocks.append(_block(d, lines.get(d.span.file), color))
    return "\n".join([*blocks, summary(found) + "\n"])


def _block(d: Diagnostic, lines: list[str] | None, color: bool) -> str:
    def paint(code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if color else text

    span, shade = d.span, _COLOURS[d.severity]
    out = [paint(shade, f"{d.severity}[{d.code}]") + paint(_BOLD, f": {visible(d.message)}")]
    gutter = " " * len(str(span.line))
    out.append(f"{gutter}{paint(_BLUE, '-->')} {visible(span.file)}:{span.line}:{span.column}")
    if lines and span.line <= len(lines) and lines[span.line - 1].strip():
        source, marks = _quoted(lines[span.line - 1], span.column, _end(d, lines))
        out.append(paint(_BLUE, f"{gutter} |"))
        out.append(paint(_BLUE, f"{span.line} |") + f" {source}")
        out.append(paint(_BLUE, f"{gutter} |") + f" {marks[0]}{paint(shade, marks[1])}")
    if d.valid:
        out.append(f"{gutter} {paint(_BLUE, '=')} valid: {visible(', '.join(d.valid))}")
    if d.nearest:
        out.append(f"{gutter} {paint(_BLUE, '=')} nearest: {visible(d.nearest)}")
    if d.note:
        out.append(f"{gutter} {paint(_BLUE, '=')} note: {visible(d.note)}")
    out += [f"{gutter}   {visible(line)}" for line in d.detail]
    return "\n".join(out) + "\n"


def _end(d: Diagnostic, lines: list[str]) -> int:
    """The column, exclusive, where the underline of the first line ends."""
    if d.span.end_line == d.span.line:
        return d.span.end_column
    return len(lines[d.span.line - 1].rstrip()) + 1


def _quoted(line: str, column: int, end: int) -> tuple[str, tuple[str, str]]:
    """A window of the line around the span, and (blanks, carets) as wide as it is on a terminal."""
    start = max(0, column - _WIDTH // 2) if len(line) > _WIDTH else 0
    stop = min(len(line), start + _WIDTH)
    cells = [visible(c) for c in line[start:stop]]
    before, after = ("… " if start else ""), (" …" if stop < len(line) else "")
    at = column - 1 - start
    wide = [sum(_cell(c) for c in cell) for cell in cells]
    carets = sum(wide[at : max(at, min(end - 1, stop) - start)])
    return before + "".join(cells) + after, (" " * (len(before) + sum(wide[:at])), "^" * max(1, carets))


def _cell(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def visible(text: str) -> str:
    """Control characters, lone surrogates and direction marks as escapes: a spec must not drive the terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if harmless(c) else escape(c) for c in text)


def harmless(char: str) -> bool:
    """Whether a terminal shows the character and does nothing else."""
    return char.isprintable() or unicodedata.category(char) in ("Zs", "Cn", "Co")


def escape(char: str) -> str:
    code = ord(char)
    if char in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# For machines


def _json(found: list[Diagnostic]) -> str:
    findings = [
        {
            "code": d.code,
            "severity": d.severity,
            "title": CODES[d.code].title,
            "message": d.message,
            "file": d.span.file,
            "line": d.span.line,
            "column": d.span.column,
            "end_line": d.span.end_line,
            "end_column": d.span.end_column,
            "valid": list(d.valid),
            "nearest": d.nearest,
            "note": d.note,
            "detail": list(d.detail),
        }
        for d in found
    ]
    counts = {f"{s}s" if s != "info" else s: sum(d.severity == s for d in found) for s in _COLOURS}
    # Escaped to ASCII: a file name may hold bytes that no text encoding takes.
    return json.dumps({"version": 1, "findings": findings, "summary": counts}, indent=2) + "\n"


def _github(d: Diagnostic) -> str:
    span = d.span
    where = {"file": _printable(span.file), "line": str(span.line), "endLine": str(span.end_line)}
    if span.line == span.end_line:  # GitHub drops columns of a longer stretch
        where |= {"col": str(span.column), "endColumn": str(span.end_column)}
    where["title"] = d.code
    return github_command(_GITHUB_LEVELS[d.severity], where, _long(d))


def github_command(level: str, fields: Mapping[str, str], text: str) -> str:
    """A workflow command of GitHub: ``::notice file=…,line=…::text``."""
    told = ",".join(f"{k}={_property(v)}" for k, v in fields.items())
    return f"::{level} {told}::{_data(text)}"


def _long(d: Diagnostic) -> str:
    extra = [f"valid: {', '.join(d.valid)}"] if d.valid else []
    extra += [f"nearest: {d.nearest}"] if d.nearest else []
    extra += [f"note: {d.note}"] if d.note else []
    return _printable("\n".join([d.message, *extra, *d.detail]))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(found: list[Diagnostic]) -> str:
    codes = sorted({d.code for d in found})
    run = {
        "tool": {"driver": {"name": "vtaps", "rules": [_rule(code) for code in codes]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(d, codes.index(d.code)) for d in found],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: str) -> dict[str, Any]:
    text = page(code)
    return {
        "id": code,
        "shortDescription": {"text": CODES[code].title},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": _SARIF_LEVELS[CODES[code].severity]},
    }


def _result(d: Diagnostic, rule: int) -> dict[str, Any]:
    span = d.span
    return {
        "ruleId": d.code,
        "ruleIndex": rule,
        "level": _SARIF_LEVELS[d.severity],
        "message": {"text": _long(d)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(_printable(span.file).replace("\\", "/"))},
                    "region": {
                        "startLine": span.line,
                        "startColumn": span.column,
                        "endLine": span.end_line,
                        "endColumn": span.end_column,
                    },
                }
            }
        ],
    }

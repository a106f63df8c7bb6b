"""A difference as text for a terminal, Markdown for a comment, JSON, or annotations of a GitHub workflow."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Literal, get_args

from vtaps.codegen.changes import Change, Rename
from vtaps.diffing import Difference
from vtaps.spec.document import Document
from vtaps.spec.reporters import github_command, visible

DiffFormat = Literal["text", "json", "github", "markdown"]
DIFF_FORMATS: tuple[DiffFormat, ...] = get_args(DiffFormat)

MARKS = {"added": "+", "removed": "-", "changed": "~"}
_SHADES = {"+": "\x1b[32m", "-": "\x1b[31m", "~": "\x1b[33m", "@": "\x1b[36m"}
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"
LONG = 100
"""Characters of a line past which old and new value get lines of their own."""

COLUMNS = {
    "edits": "fired.{0} and expected.{0}", "reads": "the read {0}", "metrics": "the metric {0}", "arms": "the arm {0}",
    "prompts": "the group {0}", "gates": "the gate {0}",
}  # fmt: skip
"""What of a result bears a definition's name."""


def render(found: Difference, format: DiffFormat, doc: Document | None = None, *, color: bool = False) -> str:
    """``doc``: the new side's spec, whose lines the annotations of ``github`` point at; ``color`` is of ``text``."""
    match format:
        case "text":
            return _text(found, color)
        case "markdown":
            return _markdown(found)
        case "json":
            return _json(found)
    return _github(found, doc)


def _of(change: Change) -> str:
    """What a line is of: the name alone in its own group."""
    if change.group == "rows":
        return f"{change.section}.{change.name}"
    return change.name


def _named(rename: Rename) -> str:
    return f"{rename.section}.{rename.old} → {rename.new}{_in_results(rename)}"


def _in_results(rename: Rename) -> str:
    where = COLUMNS.get(rename.section)
    return f" (in results: {where.format(rename.new)})" if where else ""


def _values(change: Change) -> str:
    """``scale: 4 → 8``"""
    field = change.field.removeprefix("vllm.") if change.section == "engine" else change.field
    if change.kind == "added":
        return f"{field}: {change.new}" if field else str(change.new)
    if change.kind == "removed":
        return f"{field}: {change.old}" if field else str(change.old)
    values = f"{_or_none(change.old)} → {_or_none(change.new)}"
    return f"{field}: {values}" if field else values


def _or_none(value: str | None) -> str:
    return "none" if value is None else value


def _grouped(found: Difference) -> list[tuple[str, list[Change]]]:
    out: dict[str, list[Change]] = {}
    for change in found.comparison.changes:
        out.setdefault(change.group, []).append(change)
    return list(out.items())


# Text


def _text(found: Difference, color: bool) -> str:
    def paint(mark: str, text: str) -> str:
        shade = _SHADES.get(mark, _BOLD if mark == "#" else "")
        return f"{shade}{text}{_RESET}" if color and shade else text

    lines = [paint("#", visible(f"{found.old} → {found.new}: {found.headline}"))]
    if found.comparison.renames:
        lines += ["", paint("#", "renamed")]
        lines += [f"  {visible(_named(r))}" for r in found.comparison.renames]
    for group, changes in _grouped(found):
        lines += ["", paint("#", group)]
        width = max(len(visible(_of(c))) for c in changes)
        for c in changes:
            head = f"{visible(_of(c)):{width}}  ".lstrip() if width else ""
            line = f"  {MARKS[c.kind]} {head}{visible(_values(c))}"
            if len(line) > LONG and c.kind == "changed":
                lines.append(paint(MARKS[c.kind], f"  {MARKS[c.kind]} {head}{visible(c.field)}:"))
                lines += [
                    paint("-", f"      - {visible(_or_none(c.old))}"),
                    paint("+", f"      + {visible(_or_none(c.new))}"),
                ]
            else:
                lines.append(paint(MARKS[c.kind], line))
            lines += [paint(d[:1], f"      {visible(d)}") for d in c.detail]
    if found.means:
        width = max(len(visible(m.about)) for m in found.means)
        lines += ["", paint("#", "for a run")]
        lines += [f"  {visible(m.about):{width}}  {visible(m.text)}" for m in found.means]
    lines += [f"  note: {visible(n)}" for n in found.notes]
    if found.block:
        lines += ["", paint("#", "block")]
        lines += [paint("#" if d.startswith(("---", "+++")) else d[:1], visible(d)) for d in found.block]
    return "\n".join(lines) + "\n"


# Markdown


def _markdown(found: Difference) -> str:
    lines = [f"### vtaps: {_code(found.old)} → {_code(found.new)}", "", f"**{_prose(found.headline)}**"]
    if found.comparison.renames:
        lines += ["", "Renamed:", ""]
        for r in found.comparison.renames:
            lines.append(f"- {_code(f'{r.section}.{r.old}')} → {_code(r.new)}{_prose(_in_results(r))}")
    if found.comparison.changes:
        lines += ["", "| | of | what | before | after |", "|---|---|---|---|---|"]
        for group, changes in _grouped(found):
            for c in changes:
                field = c.field.removeprefix("vllm.") if c.section == "engine" else c.field
                of = " ".join(filter(None, [_prose(group), _code(_of(c), table=True) if _of(c) else ""]))
                cells = [MARKS[c.kind], of, _prose(field), _cell(c.old, c.kind), _cell(c.new, c.kind)]
                lines.append("| " + " | ".join(cells) + " |")
        for c in found.comparison.changes:
            if c.detail:
                lines += ["", f"{_prose(c.group)} {_code(c.name)}:", "", *(f"- {_code(d)}" for d in c.detail)]
    if found.means:
        lines += ["", "For a run:", "", *(f"- **{_prose(m.about)}**: {_prose(m.text)}" for m in found.means)]
    if found.notes:
        lines += ["", *(f"> {_prose(n)}" for n in found.notes)]
    if found.block:
        fence = _fence(found.block)
        changed = sum(line[:1] in "+-" and not line.startswith(("---", "+++")) for line in found.block)
        lines += ["", f"<details><summary>The block, {changed} lines differ</summary>", ""]
        lines += [f"{fence}diff", *map(visible, found.block), fence, "", "</details>"]
    return "\n".join(lines) + "\n"


def _cell(value: str | None, kind: str) -> str:
    if value is None:
        return "none" if kind == "changed" else ""
    return _code(value, table=True)


def _code(text: str, table: bool = False) -> str:
    """A code span that holds whatever ``text`` holds; in a ``table`` a bar must be escaped."""
    text = visible(text).replace("|", "\\|") if table else visible(text)
    fence = _fence([text], 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def _fence(lines: Iterable[str], least: int = 3) -> str:
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    return "`" * max(least, longest + 1)


def _prose(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", visible(text))


# For machines


def _json(found: Difference) -> str:
    out = {
        "version": 1,
        "old": found.old,
        "new": found.new,
        "same": found.same,
        "headline": found.headline,
        "renames": [dataclasses.asdict(r) for r in found.comparison.renames],
        "changes": [dataclasses.asdict(c) for c in found.comparison.changes],
        "run": {m.about: {"text": m.text, "value": m.value} for m in found.means},
        "untouched": list(found.comparison.untouched),
        "notes": list(found.notes),
        "block": "".join(f"{line}\n" for line in found.block),
    }
    return json.dumps(out, indent=2) + "\n"  # ASCII: a file name may hold bytes that no text encoding takes


def _github(found: Difference, doc: Document | None) -> str:
    file = found.new.rpartition(":")[2]
    lines = [github_command("notice", {"file": file, "title": "vtaps diff"}, visible(f"{found.old}: {found.headline}"))]
    lines += [
        github_command("notice", {"file": file, "title": "renamed"}, visible(_named(r)))
        for r in found.comparison.renames
    ]
    for c in found.comparison.changes:
        fields = {"file": file, "title": f"{c.group}: {visible(_of(c))}".removesuffix(": ")}
        if doc is not None:
            section = {"locations": "", "sampling": "arms"}.get(c.section, c.section)
            first = c.name.split(", ")[0]
            fields = {"file": file, "line": str(doc.line(section, first) if section else 1), "title": fields["title"]}
        said = {"added": "added ", "removed": "removed ", "changed": ""}[c.kind]
        lines.append(github_command("notice", fields, "\n".join([visible(said + _values(c)), *map(visible, c.detail)])))
    return "\n".join(lines) + "\n"

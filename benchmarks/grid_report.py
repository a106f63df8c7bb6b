"""The grid's tables: several calls' files → Markdown and JSON.

usage: python -m benchmarks.grid report FILE.json… --out FILE.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.grid_rows import COLUMNS, ROWS
from benchmarks.grid_stats import Call, Cell, PlainCell, cells, plain_cells
from benchmarks.loads import Load

SAME = ("benchmark", "shape", "process", "side_by_side", "seed", "vllm", "warmup", "gpus", "settings")
"""What calls must agree in to stand in one table; versions and commits are listed."""

HEADINGS = (
    "row", "requests", "install", "base tok/s", "tok/s", "share", "min–max", "A/A ±", "goal", "met", "starts",
    "same tokens",
)  # fmt: skip
PLAIN_HEADINGS = ("engine", "requests", "tok/s", "of its base", "min–max", "starts")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grid report")
    parser.add_argument("files", nargs="+", type=Path, help="what calls of the grid wrote")
    parser.add_argument("--out", type=Path, help="FILE.md; FILE.json is written beside it (default: print only)")
    args = parser.parse_args(argv)
    calls = [json.loads(file.read_text(encoding="utf-8")) for file in args.files]
    differs = mismatch([call["about"] for call in calls])
    if differs:
        parser.error(f"these calls are not comparable: {differs}")
    text = markdown(calls)
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
        data = json.dumps(as_json(calls), indent=1, ensure_ascii=False) + "\n"
        args.out.with_suffix(".json").write_text(data, encoding="utf-8")
    return 0


def mismatch(abouts: Sequence[Mapping[str, Any]]) -> str | None:
    """Names of what the calls do not agree in."""
    wrong = [name for name in SAME if any(a[name] != abouts[0][name] for a in abouts)]
    return ", ".join(wrong) or None


def markdown(calls: Sequence[Call]) -> str:
    about = calls[0]["about"]
    loads = {x["name"]: Load(**x) for x in about["loads"]}
    found = cells(calls)
    out = [_heading(calls), ""]
    for column in COLUMNS.values():
        lines = [_line(c, loads) for c in found if c.column == column.name]
        if lines:
            out += [f"**{column.title}**, against {COLUMNS[column.base].title}", "", *_table(HEADINGS, lines), ""]
    plain = [_plain_line(c, loads) for c in plain_cells(calls)]
    if plain:
        out += ["**Without vtaps**", "", *_table(PLAIN_HEADINGS, plain), ""]
    trouble = [f"- {text}" for call in calls for text in [*_failures(call), *_left_out(call), *_without_base(call)]]
    if trouble:
        out += ["**Not measured**", "", *trouble, ""]
    return "\n".join(out)


def _heading(calls: Sequence[Call]) -> str:
    about = calls[0]["about"]
    dates = sorted({call["about"]["date"] for call in calls})
    gpus = ", ".join(f"{g['name']} (driver {g['driver']})" for g in about["gpus"]) or f"{about['processor']}, no GPU"
    told = {
        name: sorted({c["about"]["versions"].get(name, "–") for c in calls}) for name in ("vllm", "torch", "triton")
    }
    versions = ", ".join(f"{name} {'/'.join(found)}" for name, found in told.items())
    shape = about["shape"]
    lines = [
        f"{shape['title']} shapes, {shape['dtype']}, random weights; {gpus}; {versions}, "
        f"Python {about['versions']['python']}; engine core {_PROCESS[about['process']]}; "
        f"{_TURNS[about['side_by_side']]}. "
        f"Measured {' and '.join(dates)}, {about['warmup']} warm-up runs and "
        f"{'/'.join(sorted({str(c['about']['repeats']) for c in calls}))} repeats a start, with",
        "",
        "```",
        *(call["about"]["command"] for call in calls),
        "```",
    ]
    return "\n".join(lines)


_TURNS = {False: "one engine after another", True: "the engines of a round side by side"}
_PROCESS = {"in": "in the caller's process", "child": "in a process of its own"}


def _line(cell: Cell, loads: Mapping[str, Load]) -> tuple[str, ...]:
    load = loads[ROWS[cell.row].load]
    return (
        f"{cell.row}: {ROWS[cell.row].title}",
        _requests(load),
        cell.install,
        f"{cell.base_rate:.1f}",
        f"{cell.rate:.1f}",
        f"{cell.share:.3f}",
        f"{cell.low:.3f}–{cell.high:.3f}",
        "" if cell.half_width is None else f"{cell.half_width:.3f}",
        "" if cell.goal is None else f"{cell.goal:.3f}",
        "" if cell.goal is None else {None: "unclear", True: "yes", False: "no"}[cell.met],
        str(cell.rounds),
        f"{cell.same[0]}/{cell.same[1]}",
    )


def _plain_line(cell: PlainCell, loads: Mapping[str, Load]) -> tuple[str, ...]:
    found = cell.shares
    told = (f"{median(found):.3f}", f"{min(found):.3f}–{max(found):.3f}") if found else ("", "")
    title = COLUMNS[cell.column].title
    return (title, _requests(loads[cell.load]), f"{cell.rate:.1f}", *told, str(cell.rounds))


def _requests(load: Load) -> str:
    return f"{load.requests:,} × {load.prompt} + {load.generated}"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|---" * len(headings) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def _failures(call: Call) -> list[str]:
    return [
        f"{child['column']}, {child['group']}, start {child['start']}: {child['failed']}"
        for child in call["children"]
        if child.get("failed")
    ]


def _left_out(call: Call) -> list[str]:
    return [f"left out: {text}" for text in call["left_out"]]


def _without_base(call: Call) -> list[str]:
    ran = {(c["column"], c["start"]) for c in call["children"] if c.get("cells")}
    bases = {(name, at): (COLUMNS[name].base, at) for name, at in ran if COLUMNS[name].kind != "plain"}
    return [
        f"{name}, start {at}: served, but {base[0]} was not, so that there is no share"
        for (name, at), base in sorted(bases.items())
        if base not in ran
    ]


def as_json(calls: Sequence[Call]) -> dict[str, Any]:
    """Every repeat, and the table's numbers; logs of engines that failed stay behind."""
    return {
        "calls": [
            {**call, "children": [{k: v for k, v in child.items() if k != "log"} for child in call["children"]]}
            for call in calls
        ],
        "cells": [{**_rounded(asdict(c)), "met": c.met} for c in cells(calls)],
        "plain": [_rounded(asdict(c)) for c in plain_cells(calls)],
    }


def _rounded(data: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in data.items()}

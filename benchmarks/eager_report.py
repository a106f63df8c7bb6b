"""Numbers of the eager benchmark: from every engine's times to a table, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.eager_columns import AGAIN, COLUMNS, LOADS, PLAIN
from benchmarks.loads import Load

Starts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One column at one load.

    ``median``, ``fastest``, ``slowest``: seconds to serve it, over every repeat of every start.  ``share``: plain's
    median over this one's (1: costs nothing, 0.9: a tenth fewer tokens a second); ``low`` and ``high``: the extremes
    of that share round by round.  ``processor``: the same share of the processor's seconds.  ``inside``: 1 less the
    share of this engine's own time that was spent in vtaps (the median over starts), in milliseconds a step
    ``inside_ms``; None for plain.
    """

    column: str
    load: str
    median: float
    fastest: float
    slowest: float
    tokens_per_second: float
    share: float
    low: float
    high: float
    processor: float
    inside: float | None
    inside_ms: float | None


def cells(starts: Starts) -> list[Cell]:
    """``starts``: what each engine told, in the order in which they ran; the n-th start of a column is of round n.

    Both plain columns are plain: the others are held against the repeats of both.
    """
    return [_cell(name, load, starts) for load in LOADS for name in COLUMNS]


def _cell(name: str, load: Load, starts: Starts) -> Cell:
    def seconds(kind: str, *columns: str) -> list[list[float]]:
        by_column = [[s[kind][load.name] for s in starts if s["column"] == c] for c in columns]
        return [[value for part in one for value in part] for one in zip(*by_column, strict=True)]

    base = (PLAIN,) if name in (PLAIN, AGAIN) else (PLAIN, AGAIN)
    own, plain = seconds("seconds", name), seconds("seconds", *base)
    rounds = [median(b) / median(a) for a, b in zip(own, plain, strict=True)]
    mine = _flat(own)
    inside = [_inside(s["inside"][load.name]) for s in starts if s["column"] == name]
    block = COLUMNS[name].block
    return Cell(
        column=name,
        load=load.name,
        median=median(mine),
        fastest=min(mine),
        slowest=max(mine),
        tokens_per_second=load.tokens / median(mine),
        share=median(_flat(plain)) / median(mine),
        low=min(rounds),
        high=max(rounds),
        processor=median(_flat(seconds("processor_seconds", *base)))
        / median(_flat(seconds("processor_seconds", name))),
        inside=1 - median(spent / whole for spent, whole in inside) if block else None,
        inside_ms=median(spent for spent, _ in inside) / load.generated * 1e3 if block else None,
    )


def _inside(account: Mapping[str, float]) -> tuple[float, float]:
    return sum(seconds for part, seconds in account.items() if part != "all"), account["all"]


def _flat(rounds: list[list[float]]) -> list[float]:
    return [value for each in rounds for value in each]


def resolution(found: Sequence[Cell]) -> dict[str, float]:
    """Load → the difference between shares that this run can tell: how far plain is from plain, or half of what the
    rounds of any one column differ by, whichever is more."""
    out = {}
    for load in LOADS:
        mine = [c for c in found if c.load == load.name]
        again = next(c for c in mine if c.column == AGAIN)
        apart = max(abs(1 - x) for x in (again.share, again.low, again.high))
        out[load.name] = max(apart, *((c.high - c.low) / 2 for c in mine))
    return out


def agreement(starts: Starts) -> dict[str, bool]:
    """Column → whether it gave plain vLLM's tokens; a steered one does not."""
    plain = next(s["received"] for s in starts if s["column"] == PLAIN)
    return {
        name: all(
            s["received"][load.name]["tokens"] == plain[load.name]["tokens"]
            for s in starts
            if s["column"] == name
            for load in LOADS
        )
        for name in COLUMNS
    }


HEADINGS = ("", "seconds", "min–max", "tok/s", "of plain", "rounds", "of CPU", "inside", "ms/step", "goal")


def _line(cell: Cell) -> tuple[str, ...]:
    column = COLUMNS[cell.column]
    base = cell.column == PLAIN
    return (
        column.title,
        f"{cell.median:.3f}",
        f"{cell.fastest:.3f}–{cell.slowest:.3f}",
        f"{cell.tokens_per_second:.1f}",
        "1" if base else f"{cell.share:.3f}",
        "" if base else f"{cell.low:.3f}–{cell.high:.3f}",
        "" if base else f"{cell.processor:.3f}",
        "" if cell.inside is None else f"{cell.inside:.3f}",
        "" if cell.inside_ms is None else f"{cell.inside_ms:.2f}",
        "" if column.goal is None else f"{column.goal:.2f}",
    )


def tables(found: Sequence[Cell]) -> list[Table]:
    limits = resolution(found)
    out = []
    for load in LOADS:
        title = f"{load.title}, {load.prompt}-token prompts, resolution ±{limits[load.name]:.3f}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for cell in found:
            if cell.load == load.name:
                table.add_row(*_line(cell))
        out.append(table)
    return out


def markdown(found: Sequence[Cell], about: Mapping[str, Any]) -> str:
    limits = resolution(found)
    out = [
        f"Measured {about['date']} with `{about['command']}`: {about['model']['name']}, {about['model']['dtype']}, "
        f"vLLM {about['versions']['vllm']}, torch {about['versions']['torch']}, {about['cores']} cores, "
        f"{about['starts']} starts a column × {about['repeats']} repeats.",
    ]
    for load in LOADS:
        out += [
            "",
            f"**{load.title}**, {load.prompt}-token prompts, resolution ±{limits[load.name]:.3f}",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---" * len(HEADINGS) + "|",
        ]
        out += ["| " + " | ".join(_line(c)) + " |" for c in found if c.load == load.name]
    return "\n".join(out) + "\n"


def as_json(found: Sequence[Cell]) -> list[dict[str, Any]]:
    return [{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(c).items()} for c in found]

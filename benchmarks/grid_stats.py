"""From the times of many engine starts to shares of plain vLLM, paired start by start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.grid_rows import AGAIN_OF, COLUMNS, ROWS, Column, goal_of

Call = Mapping[str, Any]
"""What one call of the grid wrote: ``about`` and ``children``."""

COARSE = 0.05
"""A half-width above which a run decides nothing."""

Round = tuple[int, int]
"""(number of the call, number of the start in it): only what ran in one round is compared."""


@dataclass(frozen=True)
class Taken:
    """One cell in one round: the median of its repeats in seconds, the tokens of a repeat, digests of its token
    ids."""

    seconds: float
    tokens: int
    digests: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


Rounds = dict[Round, Taken]


@dataclass(frozen=True)
class Cell:
    """One row in one column, against the column's base.

    ``rate``, ``base_rate``: tokens a second, the median over rounds.  ``share``: the median over rounds of base's
    seconds over this one's (1: costs nothing), ``low`` and ``high`` its extremes.  ``half_width``: see
    :func:`half_width`; None where base ran only once a round.  ``same``: repeats with base's tokens, of how many.
    """

    column: str
    row: str
    install: str
    rounds: int
    rate: float
    base_rate: float
    share: float
    low: float
    high: float
    half_width: float | None
    goal: float | None
    same: tuple[int, int]

    @property
    def met(self) -> bool | None:
        """Whether the lower end of the interval reaches the goal within the half-width; None without a goal, and
        where two equal engines differed by so much that nothing can be said."""
        width = self.half_width or 0.0
        return None if self.goal is None or width > COARSE else self.low + width >= self.goal


def taken(calls: Sequence[Call]) -> dict[tuple[str, str, str], Rounds]:
    """(column, install, row or load) → rounds; ``install`` is empty for plain columns, which install nothing."""
    out: dict[tuple[str, str, str], Rounds] = {}
    for number, call in enumerate(calls):
        for child in call["children"]:
            plain = COLUMNS[child["column"]].kind == "plain"
            for cell, told in (child.get("cells") or {}).items():
                key = (child["column"], "" if plain else child["install"], cell)
                found = Taken(median(told["seconds"]), told["tokens"], tuple(told["digests"]))
                out.setdefault(key, {})[number, child["start"]] = found
    return out


def shares(own: Rounds, base: Rounds) -> dict[Round, float]:
    """Base's seconds over this one's, in each round that has both."""
    return {r: base[r].seconds / own[r].seconds for r in own if r in base}


def half_width(again: Sequence[float]) -> float:
    """Half of the least interval that holds 1 and every share of plain by plain.

    It is how far two equal engines are apart in this run; a smaller difference was not seen.
    """
    return (max(1.0, *again) - min(1.0, *again)) / 2


def resolution(found: Mapping[tuple[str, str, str], Rounds], base: str, load: str) -> float | None:
    again = AGAIN_OF.get(base)
    if again is None:
        return None
    ratios = shares(found.get((again, "", load), {}), found.get((base, "", load), {}))
    return half_width(list(ratios.values())) if ratios else None


def cells(calls: Sequence[Call]) -> list[Cell]:
    """Every row of every vtaps and peer column that has a base in the same round, in the grid's order."""
    found = taken(calls)
    return [cell for column in COLUMNS.values() if column.kind != "plain" for cell in _column(column, found)]


def _column(column: Column, found: Mapping[tuple[str, str, str], Rounds]) -> Iterator[Cell]:
    installs = sorted({install for name, install, _ in found if name == column.name})
    for row in ROWS.values():
        for install in installs:
            own = found.get((column.name, install, row.name), {})
            base = found.get((column.base, "", row.load), {})
            ratios = shares(own, base)
            if not ratios:
                continue
            same = [a == b for r in ratios for a, b in zip(own[r].digests, base[r].digests, strict=True)]
            yield Cell(
                column=column.name,
                row=row.name,
                install=install,
                rounds=len(ratios),
                rate=median(own[r].rate for r in ratios),
                base_rate=median(base[r].rate for r in ratios),
                share=median(ratios.values()),
                low=min(ratios.values()),
                high=max(ratios.values()),
                half_width=resolution(found, column.base, row.load),
                goal=goal_of(row, column),
                same=(sum(same), len(same)),
            )


@dataclass(frozen=True)
class PlainCell:
    """A plain column at one load; ``shares`` are of its base, round by round (empty for the base itself)."""

    column: str
    load: str
    rounds: int
    rate: float
    shares: tuple[float, ...]


def plain_cells(calls: Sequence[Call]) -> list[PlainCell]:
    found = taken(calls)
    out = []
    for column in COLUMNS.values():
        for (name, _, load), rounds in found.items():
            if name == column.name and column.kind == "plain":
                base = {} if column.base == name else found.get((column.base, "", load), {})
                ratios = tuple(shares(rounds, base).values())
                out.append(PlainCell(name, load, len(rounds), median(t.rate for t in rounds.values()), ratios))
    return out

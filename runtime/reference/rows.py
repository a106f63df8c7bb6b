"""The definition of a selector, row by row: what :mod:`vtaps.spec.rows` compiles to intervals, and is held against."""

from __future__ import annotations

from collections.abc import Sequence

from vtaps.spec.rows import Facts, Rows


def selected(rows: Rows, facts: Facts, tokens: Sequence[int], *, sampled: bool = False) -> list[int]:
    """The positions that ``rows`` selects among those of ``tokens``, one a row from the prompt's first on; ``sampled``:
    at a location that has rows for sampled tokens alone.  Raises KeyError where ``facts`` lack what a selector names.
    """
    first = facts.prompt - 1 if sampled else 0
    return [p for p in range(first, len(tokens)) if holds(rows, facts, p, tokens[p])]


def holds(rows: Rows, facts: Facts, position: int, token: int) -> bool:
    """Whether the row at ``position``, which holds ``token``, is selected."""
    prompt = facts.prompt
    step = position - (prompt - 1)
    asked = [
        {"all": True, "prompt": position < prompt, "sampling": step >= 0, "generated": step >= 1}[rows.word],
        rows.steps is None or any(first <= step <= last for first, last in rows.steps),
        rows.positions is None or position in _positions(rows, prompt),
        rows.match is None or any(start <= position < end for start, end in facts.matches[rows.match]),
        rows.ids is None or token in rows.ids,
        rows.turn is None
        or any(role == rows.turn and start + rows.skip <= position < end for role, start, end in facts.turns),
        rows.after is None or step > sum(facts.overrides[rows.after]),
        rows.exclude is None or not holds(rows.exclude, facts, position, token),
    ]
    return all(asked)


def _positions(rows: Rows, prompt: int) -> set[int]:
    found: set[int] = set()
    for first, last in rows.positions or ():
        a, b = (p if p >= 0 else p + prompt for p in (first, last))
        found |= {p for p in range(a, b + 1) if 0 <= p < prompt}
    return found

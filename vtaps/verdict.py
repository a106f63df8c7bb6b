"""What ``vtaps verify`` says on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtaps.show import visible
from vtaps.spec.layers import collapsed
from vtaps.verification import Comparison, Verification

TITLES = {
    "read": "read",
    "gate": "gate",
    "edit": "behind edit",
    "metric": "metric",
    "logprobs": "log probabilities",
    "tokens": "greedy tokens",
    "alone": "alone:",
    "chunked": "in pieces:",
}
"""What a comparison is called, in the order in which they are shown."""
REFERENCES = {"huggingface": "Hugging Face, float32 on the CPU", "eager": "vtaps' eager engine"}


NUMBERS = ("rows fired", "expected", "largest change")


def verdict(found: Verification) -> Group:
    """The header, one line for each thing compared with its worst location, and what was not checked."""
    parts: list[RenderableType] = [_header(found), _compared(found)]
    if found.fired:
        parts.append(_fired(found))
    if found.not_checked:
        parts.append(_not_checked(found))
    spaced = [part for one in parts for part in (one, Text())]
    return Group(*spaced, _last(found))


def _header(found: Verification) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    of = f" of {found.total}" if found.total != found.requests else ""
    isolation = found.isolation
    lines = {
        "spec": found.spec,
        "engine": f"{found.engine}, {found.dtype}",
        "reference": f"{REFERENCES.get(found.reference or '', 'none')} ({found.reason})",
        "bound": f"{found.bound:.1e} of a row's largest value",
        "requests": f"{found.requests}{of}"
        + ("" if found.chunk is None else f"; again with prompts in steps of {found.chunk} tokens"),
    }
    if isolation is not None:
        same = isolation.bits - len(isolation.differing)
        lines["isolation"] = (
            f"{same} of {isolation.bits} unedited requests are bit-identical to the same batch with nobody edited"
        )
    for name, value in lines.items():
        grid.add_row(name, visible(value))
    return grid


def _compared(found: Verification) -> RenderableType:
    table = _table("compared", "at", "largest error", "worst at", "rows", numbers=("largest error", "rows"))
    keys = dict.fromkeys((c.what, c.name) for what in TITLES for c in found.comparisons if c.what == what)
    for what, name in keys:
        same = [c for c in found.comparisons if (c.what, c.name) == (what, name)]
        worst = max(same, key=lambda c: c.error)
        position = [] if worst.position is None else [f"row {worst.position}"]
        where = ", ".join([worst.site, *position] if len(same) > 1 else position)
        table.add_row(
            visible(f"{TITLES[what]} {name}".strip()), visible(collapsed(c.site for c in same)),
            Text(error(worst), "" if worst.ok else "bold red"), visible(where if worst.error else ""),
            f"{sum(c.values for c in same):,}",
        )  # fmt: skip
    return table


def error(c: Comparison) -> str:
    return f"{c.error:.1e}" if math.isfinite(c.error) else "other rows"


def _fired(found: Verification) -> RenderableType:
    table = _table("edit", "rows fired", "expected", "largest change", "", numbers=NUMBERS)
    for one in found.fired:
        said = "" if one.ok else f"other rows in {len(one.wrong)} requests, first {one.wrong[0]}"
        moved = "" if one.moved is None else f"{one.moved:.3g}"
        table.add_row(visible(one.edit), f"{one.fired:,}", f"{one.expected:,}", moved, Text(said, "bold red"))
    return table


def _not_checked(found: Verification) -> RenderableType:
    table = _table("not checked", "name", "why")
    for one in found.not_checked:
        table.add_row(visible(one.what), visible(one.name), visible(one.reason))
    return table


def _last(found: Verification) -> Text:
    if found.ok:
        return Text("within bounds", "bold green")
    return Text(f"{len(found.findings)} finding{'s' * (len(found.findings) != 1)}", "bold red")


def _table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_edge = False
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table

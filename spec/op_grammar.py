"""What follows ``.source.`` in a location: text → :class:`OpPlace`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vtaps.spec.diagnostics import nearest
from vtaps.spec.places import Refused

_INDEX = re.compile(r"(output|input)(?:\[\s*(\d{1,4})\s*\])?")


@dataclass(frozen=True)
class OpPlace:
    """An op of a forward by ``name``, or with ``inner`` one of the function that it calls: which element of what it
    computes (``side`` output), or which argument of it, by number or keyword."""

    name: str
    element: int | str | None = None
    side: Literal["output", "input"] = "output"
    inner: str | None = None


def parse_op_place(text: str, tail: list[str]) -> OpPlace:
    """``tail``: the segments of the location ``text`` behind ``source``.  Raises :class:`Refused` (VT201)."""
    names, rest = _names(text, tail)
    name, inner = names[0], names[1] if len(names) > 1 else None
    if not rest:
        return OpPlace(name, inner=inner)
    side, *more = rest
    if side == "input" and len(more) == 1 and more[0].isidentifier():
        return OpPlace(name, more[0], "input", inner)
    found = _INDEX.fullmatch(side)
    if found is not None and not more:
        element = None if found[2] is None else int(found[2])
        return OpPlace(name, element, "output" if found[1] == "output" else "input", inner)
    if side.split("[")[0] in ("output", "input") and not more:
        what = "one element of a tuple" if side.startswith("output") else "one argument"
        raise Refused("VT201", f"{text!r}: `{side}` selects {what} by its number, from 0")
    raise Refused(
        "VT201",
        f"{text!r}: `.output`, `.output[i]`, `.input[i]` or `.input.KEYWORD` follows an op",
        near=nearest(rest[-1], ("output", "input")),
    )


def _names(text: str, tail: list[str]) -> tuple[list[str], list[str]]:
    """The op, the op of what it calls, if that is named, and the segments behind."""
    names, rest = [], list(tail)
    while True:
        if not rest or not rest[0].isidentifier():
            what = f"`{rest[0]}` is no op's name" if rest else "no op is named"
            raise Refused("VT201", f"{text!r}: {what}", note="as in `.source.qkv_split_0.output[0]`")
        names.append(rest.pop(0))
        if not rest or rest[0] != "source":
            return names, rest
        rest.pop(0)
        if len(names) == 2:
            raise Refused(
                "VT201",
                f"{text!r}: what `{names[0]}` calls is served one level down, not what `{names[1]}` calls in it",
                note=f"what that puts out is `.source.{'.source.'.join(names)}`",
            )

"""What one rank of a tensor-parallel group holds of a value: the whole, its part of an axis, or a partial sum."""

from __future__ import annotations

import re
from dataclasses import replace

from vtaps.spec.tree import ROWS, Value

RANKS = 2
"""The size of the group that the labels are found at: each rank's part of an axis is held against one rank's alone."""

_ROWS = re.compile(rf"(?:(\d+)\*)?{re.escape(ROWS)}")


def label(one: Value, two: Value | None) -> Value:
    """``one``, of a model on one rank, with the label that ``two``, the same value on one of :data:`RANKS`, gives it.

    Shapes say which axis is sharded; that ``two`` is a partial sum must be marked in it, its shape is the whole's.
    A tensor that is none in ``two`` is ``alone``: the branch that computes it is taken on one rank only.
    """
    if one.kind == "tuple":
        items = two.items if two is not None and two.kind == "tuple" and len(two.items) == len(one.items) else ()
        return replace(one, items=tuple(label(v, items[i] if items else None) for i, v in enumerate(one.items)))
    if one.kind != "tensor":
        return one
    if two is None or two.kind != "tensor" or len(two.shape) != len(one.shape):
        return replace(one, mark="alone")
    shards = tuple(
        (axis, None if part == half(whole) else part)
        for axis, (whole, part) in enumerate(zip(one.shape, two.shape, strict=True))
        if whole != part
    )
    return replace(one, shards=shards, mark=two.mark)


def half(axis: int | str) -> int | str | None:
    """A rank's part of an axis that divides evenly; None where it does not."""
    if isinstance(axis, int):
        return None if axis % RANKS else axis // RANKS
    found = _ROWS.fullmatch(axis)
    times, rest = divmod(int(found[1] or 1) if found else 1, RANKS)
    if rest:
        return None
    return ROWS if times == 1 else f"{times}*{ROWS}"


def axes(value: Value) -> tuple[str, ...]:
    """``960/tp``: each rank has its part; ``640>384``: one of two ranks has 384 where one alone has 640; else whole."""
    parts = dict(value.shards)
    return tuple(
        str(whole) if i not in parts else f"{whole}/tp" if parts[i] is None else f"{whole}>{parts[i]}"
        for i, whole in enumerate(value.shape)
    )


def parse_axis(text: str) -> tuple[int | str, bool, int | str | None]:
    """The whole axis, whether it is sharded, and a rank's part where that is not an even one."""

    def size(word: str) -> int | str:
        return int(word) if word.isdecimal() else word

    if text.endswith("/tp"):
        return size(text.removesuffix("/tp")), True, None
    whole, apart, part = text.partition(">")
    return size(whole), bool(apart), size(part) if apart else None


def words(value: Value | None) -> str:
    """``whole``, ``axis 1 sharded``, ``partial sum``, ``tp 1 only``; of a tuple the words of its tensors, once if they
    are the same; empty where there is no tensor."""
    if value is None:
        return ""
    if value.kind == "tuple":
        found = [words(item) for item in value.items]
        found = [text for text in found if text]
        return found[0] if len(set(found)) == 1 else ", ".join(found)
    if value.kind != "tensor":
        return ""
    if value.mark == "alone":
        return "tp 1 only"
    if value.shards:
        numbers = ", ".join(str(axis) for axis, _ in value.shards)
        text = f"{'axis' if len(value.shards) == 1 else 'axes'} {numbers} sharded"
        return f"{text}, partial sum" if value.mark else text
    return "partial sum" if value.mark else "whole"

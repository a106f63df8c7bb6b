"""Rows of many requests in one array: each in its place, none in a neighbour's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtaps.runtime.fills import Fill
from vtaps.runtime.live import Live, Places
from vtaps.runtime.program import Compiled
from vtaps.runtime.slabs import SHARE_BYTES, OnSlab, places
from vtaps.runtime.spool import Spool
from vtaps.runtime.store import Rows
from vtaps.spec.rows import OPEN, Selection

SITES = ("a", "b")
ROW = 2 * 3 * 4
"""Bytes of a row at both sites: three float32."""


def live(name: str, prompt: int, end: int) -> Live:
    compiled = Compiled(
        edits=(), reads=(("r", 0),), metrics=(), overrides=(), selections=(Selection(((0, OPEN),)),)
    )  # fmt: skip
    return Live(name, (name, 0), prompt, compiled, end)


def fill(shares: list[tuple[Live, int, int]]) -> Fill:
    """``(request, first position, rows)`` of each."""
    counts = [count for *_, count in shares]
    positions = [np.arange(first, first + count) for _, first, count in shares]
    bounds = np.concatenate([[0], np.cumsum(counts)])
    before = np.array([first for _, first, _ in shares], np.int64)
    rows = np.arange(sum(counts))
    return Fill("r", SITES, False, rows, np.concatenate(positions), tuple(x for x, *_ in shares), bounds, before)


def value(request: int, position: int) -> Any:
    return np.float32(1000 * request + position) + np.arange(6, dtype=np.float32).reshape(2, 3) / 8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6), st.integers(0, 3), st.data())
def test_every_row_is_in_its_place(sizes: list[tuple[int, int]], late: int, data: st.DataObject) -> None:
    """Prompts in one step each, then decoding in one plan, past the last row of the shorter requests."""
    spool = Spool()
    lives = [live(f"k{i}", prompt, prompt + new) for i, (prompt, new) in enumerate(sizes)]
    first = fill([(x, 0, x.prompt) for x in lives])
    whole = np.stack([value(i, p) for i, x in enumerate(lives) for p in range(x.prompt)])
    cut = data.draw(st.integers(0, len(whole)))
    for part in (slice(0, cut), slice(cut, len(whole))):
        rows = np.arange(len(whole))[part]
        if len(rows):
            places(first, SITES, "float32", ROW, spool).put(rows, np.zeros_like(rows), {"rows": whole[part]})
    steps = max(new for _, new in sizes) + late
    second = fill([(x, x.prompt, 1) for x in lives])
    for step in range(steps):
        rows = np.arange(len(lives))
        fields = {"rows": np.stack([value(i, x.prompt + step) for i, x in enumerate(lives)])}
        places(second, SITES, "float32", ROW, spool).put(rows, np.full_like(rows, step), fields)
    for i, x in enumerate(lives):
        x.places["r", False] = Places([(0, x.prompt + steps)], x.prompt + steps)
        kept = x.kept["r", SITES].read("r", SITES, x.end, x)
        assert kept.positions.tolist() == list(range(x.end)) and kept.dtype == "float32"
        np.testing.assert_array_equal(kept.values["rows"], np.stack([value(i, p) for p in range(x.end)]))


def test_large_and_unbounded_requests_have_arrays_of_their_own(tmp_path: Path) -> None:
    small, large, open_ = live("a", 2, 4), live("b", 2, 3 + SHARE_BYTES // ROW), live("c", 2, OPEN)
    made = fill([(small, 0, 2), (large, 0, 2), (open_, 0, 2)])
    found = places(made, SITES, "float32", ROW, Spool())
    assert isinstance(small.kept["r", SITES], OnSlab)
    assert isinstance(large.kept["r", SITES], Rows) and isinstance(open_.kept["r", SITES], Rows)
    assert found.which.tolist() == [0, 0, -1, -1, -1, -1]
    assert places(made, SITES, "float32", ROW, Spool()) is found


def test_where_memory_is_full_requests_that_may_have_a_file_share_nothing(tmp_path: Path) -> None:
    size = 1 << 20
    requests = [live(f"k{i}", 1, 2) for i in range(5)]
    places(fill([(x, 0, 1) for x in requests]), SITES, "float32", size, Spool(tmp_path, memory=3 * 2 * size))
    kinds = [isinstance(x.kept["r", SITES], OnSlab) for x in requests]
    assert kinds == [True, True, True, False, False]


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_comes_back_with_the_last_request(kept: int) -> None:
    spool = Spool()
    requests = [live(f"k{i}", 4, 4) for i in range(3)]
    made = fill([(x, 0, 4) for x in requests])
    rows = np.arange(12)
    places(made, SITES, "float32", ROW, spool).put(rows, 0 * rows, {"rows": np.zeros((12, 2, 3), np.float32)})
    assert spool.alive == 12 * ROW
    held = [x.kept["r", SITES].slab.fields["rows"][:1] for x in requests[:kept]]
    del made, requests
    gc.collect()
    spool.place(1, 1)
    assert spool.alive == (12 * ROW if held else 0)

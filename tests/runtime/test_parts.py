"""What ranks have of a location: together the whole, and what they report put together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtaps.runtime.parts import joined, owned, part, share


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    blocks = []
    for _ in range(draw(st.integers(1, 3))):
        units = draw(st.sampled_from([1, 2, 4, 8, 16]))
        blocks.append((units * draw(st.integers(1, 4)), units))
    return blocks, ranks


@given(cases())
def test_ranks_have_the_whole_and_put_it_together(case: tuple[list[tuple[int, int]], int]) -> None:
    blocks, ranks = case
    whole = np.arange(2 * sum(size for size, _ in blocks)).reshape(2, -1)
    parts = [part(blocks, None, rank, ranks) for rank in range(ranks)]
    assert all(p.size == sum(max(size // ranks, size // units) for size, units in blocks) for p in parts)
    assert np.array_equal(joined(whole.shape[1], [(p, p.cut(whole)) for p in parts]), whole)
    fresh = [piece for pieces in owned(parts) for piece in pieces]
    assert sum(b - a for a, b in fresh) == whole.shape[1]


@given(cases(), st.data())
def test_of_a_slice_the_columns_are_where_the_rank_s_tensor_has_them(
    case: tuple[list[tuple[int, int]], int], data: st.DataObject
) -> None:
    blocks, ranks = case
    which = data.draw(st.integers(0, len(blocks) - 1))
    first = sum(size for size, _ in blocks[:which])
    columns = (first, first + blocks[which][0])
    whole = np.arange(sum(size for size, _ in blocks))[None]
    for rank in range(ranks):
        mine = part(blocks, columns, rank, ranks)
        tensor = part(blocks, None, rank, ranks).cut(whole)
        assert mine.columns is not None
        assert np.array_equal(tensor[:, slice(*mine.columns)], mine.cut(whole[:, slice(*columns)]))


def test_queries_keys_and_values_of_a_fused_projection() -> None:
    """Eight heads and two pairs of keys and values on four ranks: two ranks have the same pair."""
    blocks = [(64, 8), (16, 2), (16, 2)]
    assert [share(16, 2, rank, 4) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    second = part(blocks, None, 1, 4)
    assert second.pieces == ((16, 32), (64, 72), (80, 88)) and second.size == 32
    assert owned([part(blocks, None, rank, 4) for rank in range(4)])[1] == ((16, 32),)
    keys = part(blocks, (64, 80), 2, 4)
    assert keys.pieces == ((8, 16),) and keys.columns == (16, 24) and not keys.first


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 units of 24 columns do not divide among 2 ranks"):
        share(24, 3, 0, 2)


def test_columns_on_no_rank_are_noticed() -> None:
    with pytest.raises(ValueError, match="4 of 8 columns are on no rank"):
        owned([part([(8, 8)], None, 0, 2)])

"""Row selectors on a request of P = 7 prompt tokens and n = 5 generated ones: rows 0 … 10."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtaps.runtime.reference.rows import holds
from vtaps.spec.rows import OPEN, Facts, Rows, compile_rows, from_ranges, to_ranges

P, N = 7, 5
ROWS = P + N - 1
"""The last generated token has no row."""

TOKENS = np.array([10, 11, 12, 13, 11, 15, 16, 20, 11, 22, 23], np.int64)
FACTS = Facts(
    prompt=P,
    matches={" Paris": [(2, 4), (5, 6)]},
    turns=[("user", 0, 3), ("assistant", 3, 5), ("assistant", 6, OPEN)],
    overrides={"think": (1, 2)},
)


def select(rows: Rows, facts: Facts = FACTS, tokens: Any = TOKENS) -> list[int]:
    return compile_rows(rows, facts).select(0, tokens).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (Rows(), list(range(11))),
        (Rows("prompt"), [0, 1, 2, 3, 4, 5, 6]),
        (Rows("sampling"), [6, 7, 8, 9, 10]),
        (Rows("generated"), [7, 8, 9, 10]),
        (Rows(steps=((0, 0),)), [6]),
        (Rows(steps=((0, 0), (2, 4))), [6, 8, 9, 10]),
        (Rows(steps=((4, 9),)), [10]),
        (Rows(positions=((0, 0), (4, 5), (-1, -1))), [0, 4, 5, 6]),
        (Rows(positions=((-2, -1),)), [5, 6]),
        (Rows(positions=((-9, 0),)), [0]),
        (Rows(positions=((5, 90),)), [5, 6]),
        (Rows(match=" Paris"), [2, 3, 5]),
        (Rows(ids=(11, 23)), [1, 4, 8, 10]),
        (Rows("prompt", ids=(11,)), [1, 4]),
        (Rows(turn="user"), [0, 1, 2]),
        (Rows(turn="assistant", skip=1), [4, 7, 8, 9, 10]),
        (Rows(turn="assistant", skip=2), [8, 9, 10]),
        (Rows(turn="system"), []),
        (Rows(after="think"), [10]),
        (Rows("sampling", exclude=Rows(steps=((0, 1),))), [8, 9, 10]),
        (Rows(exclude=Rows("prompt", ids=(11,))), [0, 2, 3, 5, 6, 7, 8, 9, 10]),
        (Rows(exclude=Rows(exclude=Rows("generated"))), [7, 8, 9, 10]),
        (Rows("prompt", match=" Paris", positions=((3, 9),)), [3, 5]),
    ],
)
def test_golden(rows: Rows, expected: list[int]) -> None:
    assert select(rows) == expected
    assert Rows.from_json(rows.to_json()) == rows


def test_sampling_reaches_the_first_generated_token_and_generated_does_not() -> None:
    """Row P−1 holds the last prompt token, and what leaves it is sampled as generated token 0."""
    assert P - 1 in select(Rows("sampling"))
    assert P - 1 not in select(Rows("generated"))
    assert select(Rows("sampling"))[0] == select(Rows(steps=((0, 0),)))[0]


def test_the_last_generated_token_has_no_row() -> None:
    assert len(select(Rows("sampling"))) == N
    assert len(select(Rows("generated"))) == N - 1


def test_a_request_must_say_what_its_selectors_ask() -> None:
    with pytest.raises(KeyError):
        compile_rows(Rows(match="gone"), FACTS)
    with pytest.raises(KeyError):
        compile_rows(Rows(after="gone"), FACTS)


def ordered(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda t: (min(t), max(t)))


SPANS = st.one_of(ordered(0, 9), ordered(-9, -1))
LEAF = st.builds(
    Rows,
    word=st.sampled_from(["all", "prompt", "sampling", "generated"]),
    steps=st.none() | st.lists(ordered(0, 8), max_size=3).map(tuple),
    positions=st.none() | st.lists(SPANS, max_size=3).map(tuple),
    match=st.none() | st.just("m"),
    ids=st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple),
    turn=st.none() | st.sampled_from(["user", "assistant"]),
    skip=st.integers(0, 2),
    after=st.none() | st.just("o"),
)
FORMS = st.recursive(
    LEAF, lambda inner: st.builds(lambda a, b: Rows(**{**vars(a), "exclude": b}), LEAF, inner), max_leaves=3
)
FACT_SETS = st.builds(
    Facts,
    prompt=st.integers(1, 9),
    matches=st.fixed_dictionaries({"m": st.lists(ordered(0, 9), max_size=3)}),
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 5), st.integers(6, 20)), max_size=3
    ),
    overrides=st.fixed_dictionaries({"o": st.tuples(st.integers(0, 4), st.integers(1, 3))}),
)


@given(rows=FORMS, facts=FACT_SETS, tokens=st.lists(st.integers(0, 3), min_size=1, max_size=16), cut=st.data())
def test_compiled_equals_the_definition(rows: Rows, facts: Facts, tokens: list[int], cut: st.DataObject) -> None:
    held = np.array(tokens, np.int64)
    expected = [i for i, t in enumerate(tokens) if holds(rows, facts, i, t)]
    compiled = compile_rows(rows, facts)
    assert compiled.select(0, held).tolist() == expected
    middle = cut.draw(st.integers(0, len(tokens)))
    parts = [compiled.select(0, held[:middle]), compiled.select(middle, held[middle:])]
    assert np.concatenate(parts).tolist() == expected


@given(st.sets(st.integers(0, 40)))
def test_ranges_there_and_back(positions: set[int]) -> None:
    array = np.array(sorted(positions), np.int64)
    assert from_ranges(to_ranges(array)).tolist() == array.tolist()

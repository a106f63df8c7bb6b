"""Under what blocks of the KV cache are kept, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.prefix import Prefix, Said, block_key, first_edited, salt
from vtaps.runtime.program import Program
from vtaps.spec.rows import OPEN

BLOCK = 4
SITES = ("a", "b")


def use(edit: str, *sites: str, coefficient: float | None = 1.0, vector: str | None = "v") -> dict[str, Any]:
    return {"edit": edit, "sites": list(sites or SITES), "coefficient": coefficient, "vector": vector}


def program(**more: Any) -> Program:
    lock: dict[str, Any] = {
        "lock": 1,
        "block": {"digest": "sha256:1", "structure": ""},
        "sites": {
            **{s: {"module": s, "output": 0, "width": 4} for s in SITES},
            "logits": {"module": "l", "output": None, "width": 9, "rows": "sampled"},
        },
        "edits": {
            "late": {"verb": "add", "sites": list(SITES), "tokens": {"rows": "sampling"}},
            "every": {"verb": "add", "sites": list(SITES), "tokens": {"rows": "all"}},
            "ids": {"verb": "add", "sites": ["a"], "tokens": {"rows": "all", "ids": [3]}},
            "norm": {"verb": "add", "keep_norm": True, "sites": ["a"], "tokens": {"rows": "sampling"}},
            "out": {"verb": "add", "sites": ["logits"], "tokens": {"rows": "sampling"}},
        },
        "reads": {
            "rows": {"kind": "rows", "sites": ["a"], "tokens": {"rows": "all", "positions": [[5, 6]]}},
            "sampled": {"kind": "rows", "sites": ["logits"], "tokens": {"rows": "all"}},
            "late": {"kind": "norm", "sites": ["a"], "tokens": {"rows": "sampling"}},
        },
        "vectors": {"v": {"random": {"seed": 1, "norm": 1.0}}, "w": {"random": {"seed": 2, "norm": 1.0}}},
        "arms": {
            "plain": {"points": [{}]},
            "late": {"points": [{"edits": [use("late", coefficient=c)]} for c in (1.0, 2.0)]},
            "again": {"points": [{"edits": [use("late")]}]},
            "site": {"points": [{"edits": [use("late", "a")]}]},
            "vector": {"points": [{"edits": [use("late", vector="w")]}]},
            "every": {"points": [{"edits": [use("every")]}]},
            "ids": {"points": [{"edits": [use("ids", "a")]}]},
            "norm": {"points": [{"edits": [use("norm", "a")]}]},
            "both": {"points": [{"edits": [use("every"), use("late")]}]},
            "out": {"points": [{"edits": [use("out", "logits")]}]},
            "reads": {"reads": ["rows"], "points": [{}]},
            "sampled": {"reads": ["sampled", "late"], "points": [{}]},
        },
        **more,
    }
    return parse_program(lock, Path("."))


PROGRAM = program()


def said(arm: str, prompt: int, point: int = 0, tokens: list[int] | None = None, of: Program = PROGRAM) -> Said | None:
    ids = list(range(prompt)) if tokens is None else tokens
    compiled = of.compile(arm, point, prompt, {})
    told = Prefix(of).said(compiled, ids[:prompt], "nonce")
    # It travels as JSON.
    assert told is None or json.loads(json.dumps(told)) == told
    return told


def keys(kv: Said | None, tokens: list[int], child: int = 0) -> list[str | None]:
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [None if kv is None else block_key(kv, a, tokens[a : a + BLOCK], child) for a in starts]


def test_what_changes_no_row_inside_the_model_says_nothing() -> None:
    assert all(said(arm, 9) is None for arm in ("plain", "out", "sampled"))


def test_a_read_says_its_first_row_but_for_the_last_of_the_prompt() -> None:
    assert said("reads", 20) == {"edits": [], "first": 5}
    assert said("reads", 6) is None  # row 5 is the last: always computed
    assert salt(said("reads", 20) or {}) is None


def test_leading_blocks_are_those_of_a_plain_request() -> None:
    told = keys(said("late", 11), list(range(16)))
    assert told[:2] == [None, None] and told[2] is not None and told[3] is not None
    assert first_edited(said("late", 11) or {}) == 10 and first_edited({"edits": [], "first": 0}) == OPEN


@pytest.mark.parametrize(
    ("other", "point"), [("late", 1), ("site", 0), ("vector", 0), ("norm", 0), ("every", 0), ("both", 0), ("plain", 0)]
)
def test_what_is_edited_otherwise_has_other_names(other: str, point: int) -> None:
    tokens = list(range(16))
    one, two = keys(said("late", 9), tokens), keys(said(other, 9, point), tokens)
    assert all(a != b for a, b in zip(one[2:], two[2:], strict=True))
    kv = said(other, 9, point)
    assert kv is None or salt(kv) != salt(said("late", 9) or {})


def test_equal_arms_share_and_other_rows_do_not() -> None:
    tokens = list(range(24))
    assert keys(said("late", 9), tokens) == keys(said("again", 9), tokens)
    # A longer prompt is edited from a later row on.
    one, two = keys(said("late", 9), tokens), keys(said("late", 18), tokens)
    assert one[:2] == two[:2] == [None, None] and one[2] != two[2] and two[3] is None
    assert one[5] == two[5], "rows 20 to 23 are edited alike: what stands before them is in the chain of the names"


def test_selectors_of_ids_look_at_the_tokens() -> None:
    kv = said("ids", 8, tokens=[1, 2, 1, 2, 5, 5, 3, 5])
    assert keys(kv, [1, 2, 1, 2, 5, 5, 3, 5, 3, 0, 0, 0, 1, 1, 1, 1])[0] is None
    with_three, later = keys(kv, [0, 0, 3, 0]), keys(kv, [0, 0, 0, 3])
    assert None not in (*with_three, *later) and with_three != later


def test_a_vector_of_a_read_is_named_by_its_numbers() -> None:
    def of(numbers: list[float]) -> Said | None:
        made = program(vectors={"v": {"read": "x.y"}, "w": {"random": {"seed": 2, "norm": 1.0}}})
        made.known.update({("v", s): np.array(numbers, np.float32) for s in SITES})
        return said("late", 9, of=made)

    assert of([1, 2, 3, 4]) == of([1, 2, 3, 4]) != of([1, 2, 3, 5])


def test_another_block_or_another_site_is_another_edit() -> None:
    """What a statement narrows an edit to, as heads, stands in the block alone."""
    other = program(block={"digest": "sha256:2", "structure": ""})
    assert said("late", 9, of=other) != said("late", 9)


def test_rows_of_another_request_and_python_are_nobody_elses() -> None:
    edit = {"verb": "python", "sites": ["a"], "tokens": {"rows": "all"}, "python": {"file": "f.py", "function": "f"}}
    made = program(
        edits={"late": PROGRAM_EDITS["late"], "f": edit},
        reads={}, arms={"f": {"points": [{"edits": [use("f", "a", coefficient=None, vector=None)]}]}},
    )  # fmt: skip
    kv = said("f", 9, of=made)
    assert kv is not None and kv["own"] == "nonce"
    tokens = list(range(8))
    assert keys(kv, tokens) != keys(kv, tokens, child=1) != keys({**kv, "own": "other"}, tokens)
    assert salt(kv) != salt({**kv, "own": "other"})


PROGRAM_EDITS = {"late": {"verb": "add", "sites": list(SITES), "tokens": {"rows": "sampling"}}}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equal_names_have_equal_edited_rows(data: st.DataObject) -> None:
    """Of two requests whose blocks have equal names up to some place, the rows there were edited by equal values."""
    arms = [("plain", 0), ("late", 0), ("late", 1), ("again", 0), ("site", 0), ("every", 0), ("ids", 0), ("both", 0)]
    # An arm's edits by value: what each does to a row.
    values = {("again", 0): ("late", 0)}
    text = data.draw(st.lists(st.integers(0, 4), min_size=8, max_size=28))
    drawn = []
    for _ in range(2):
        arm, point = data.draw(st.sampled_from(arms))
        prompt = data.draw(st.integers(1, len(text)))
        compiled = PROGRAM.compile(arm, point, prompt, {})
        acting: list[set[Any]] = [set() for _ in text]
        for edit, which in compiled.edits:
            for row in compiled.selections[which].select(0, np.array(text)).tolist():
                acting[row].add((values.get((arm, point), (arm, point)) if arm != "both" else ("both", 0), edit.edit))
        drawn.append((keys(said(arm, prompt, point, text), text), acting))
    (one, rows), (two, others) = drawn
    for number, (a, b) in enumerate(zip(one, two, strict=True)):
        mine, yours = (r[number * BLOCK : (number + 1) * BLOCK] for r in (rows, others))
        assert (a is None) == (not any(mine))
        if a != b:
            break
        # `every` alone and beside `late` is one edit where only it acts.
        assert [{e for _, e in row} for row in mine] == [{e for _, e in row} for row in yours]
        if {v for row in mine for v, _ in row} != {v for row in yours for v, _ in row}:
            assert {v for row in (*mine, *yours) for v, _ in row} == {("both", 0), ("every", 0)}

"""Rows expected against rows fired, on a request with P = 7 and n = 5: rows are positions 0 … 10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.results import make
from vtaps.runtime.records import Completion, ReadRows, Record, Request
from vtaps.runtime.results.expected import expect
from vtaps.runtime.results.findings import Finding, collect, examine
from vtaps.spec.codes import CODES
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.rows import to_ranges

PROMPT = (10, 11, 12, 13, 14, 15, 16)
GENERATED = (12, 21, 22, 23, 12)
TURNS = (("user", 1, 4), ("assistant", 5, 2**62))
MATCHES = {" Paris": ((2, 4), (6, 7))}


def one(tokens: dict[str, Any]) -> tuple[dict[str, Any], Request, Completion]:
    """An arm with one edit on ``tokens`` and an override of steps 1 and 2."""
    locked = make.lock(
        edits={"e": make.edit("add", tokens, make.SITES[0])},
        arms={"a": make.arm(points=[point(make.use("e", 2.0, make.SITES[0]))])},
    )
    request = Request("k", "a", 0, "facts", "france", PROMPT, MATCHES, TURNS)
    return locked, request, Completion(0, GENERATED, "", "length", Record())


def point(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"values": {}, "edits": list(edits), "overrides": [{"override": "think", "start": 1}]}


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        ({"rows": "all"}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"rows": "prompt"}, [0, 1, 2, 3, 4, 5, 6]),
        ({"rows": "sampling"}, [6, 7, 8, 9, 10]),
        ({"rows": "generated"}, [7, 8, 9, 10]),
        ({"rows": "all", "steps": [[0, 0], [3, 9]]}, [6, 9, 10]),
        ({"rows": "all", "positions": [[0, 0], [-2, -1]]}, [0, 5, 6]),
        ({"rows": "all", "match": " Paris"}, [2, 3, 6]),
        ({"rows": "all", "ids": [12, 22]}, [2, 7, 9]),  # the last 12 has no row
        ({"rows": "generated", "ids": [12]}, [7]),
        ({"rows": "all", "turn": "assistant", "skip": 1}, [6, 7, 8, 9, 10]),
        ({"rows": "all", "turn": "user", "skip": 2}, [3]),
        ({"rows": "all", "after": "think"}, [10]),
        ({"rows": "sampling", "except": {"rows": "all", "ids": [22]}}, [6, 7, 8, 10]),
        ({"rows": "prompt", "except": {"rows": "all", "positions": [[0, 3]]}}, [4, 5, 6]),
        ({"rows": "prompt", "steps": [[1, 2]]}, []),
    ],
)
def test_positions_of_each_selector(tokens: dict[str, Any], positions: list[int]) -> None:
    locked, request, completion = one(tokens)
    assert expect(locked, request, completion).edits["e"].tolist() == positions


def test_an_identity_expects_no_rows_and_an_unused_edit_is_absent() -> None:
    locked, request, completion = one({"rows": "all"})
    uses: tuple[list[dict[str, Any]], ...] = (
        [make.use("e", 2.0, make.SITES[0])],
        [make.use("e", 0.0, make.SITES[0])],
        [],
    )
    locked["arms"]["a"]["points"] = [point(*u) for u in uses]
    locked["edits"]["other"] = locked["edits"]["e"]
    found = [expect(locked, replace(request, point=i), completion).edits for i in range(3)]
    assert [len(f["e"]) for f in found] == [11, 0, 0]
    assert all(set(f) == {"e"} for f in found)


def test_sites_of_sampled_rows_have_no_prompt_rows() -> None:
    locked, request, completion = one({"rows": "all"})
    locked["sites"][make.SITES[0]]["rows"] = "sampled"
    assert expect(locked, request, completion).edits["e"].tolist() == [6, 7, 8, 9, 10]


def findings(fired: dict[str, Any], tokens: dict[str, Any] | None = None, **record: Any) -> list[Finding]:
    locked, request, completion = one(tokens or {"rows": "sampling"})
    done = replace(
        completion,
        token_ids=(12, 77, 78, 23, 12),
        record=Record(**({"fired": fired, "overridden": (1, 2)} | record)),
    )
    return examine(locked, request, done, expect(locked, request, done))


def test_the_expected_rows_are_no_finding_and_rows_past_the_stop_do_not_count() -> None:
    assert findings({"e": ((6, 11),)}) == []
    assert findings({"e": ((6, 14),)}) == []


@pytest.mark.parametrize(
    ("fired", "message", "note"),
    [
        ({}, "fired at 0 rows, expected 5", "missing: positions 6..10"),
        ({"e": ((7, 11),)}, "fired at 4 rows, expected 5", "missing: position 6"),
        ({"e": ((5, 10),)}, "fired at 5 rows, expected 5", "missing: position 10; not expected: position 5"),
    ],
)
def test_rows_that_differ(fired: dict[str, Any], message: str, note: str) -> None:
    (found,) = findings(fired)
    assert (found.code, found.message, found.note, found.line) == (
        "VT602",
        f"edit e, arm a, prompt france: {message}",
        note,
        16,
    )


def test_an_edit_that_the_arm_does_not_use_must_not_fire() -> None:
    (found,) = findings({"e": ((6, 11),), "stray": ((0, 2),)})
    assert found.message == "edit stray, arm a, prompt france: fired at 2 rows, expected 0"


def test_an_override_whose_token_is_not_in_the_answer() -> None:
    locked, request, completion = one({"rows": "prompt", "positions": [[0, 0]]})
    done = replace(completion, record=Record(fired={"e": ((0, 1),)}))
    (found,) = examine(locked, request, done, expect(locked, request, done))
    assert "0 of 2 tokens replaced; step 1 holds token 21, expected 77" in found.message
    (found,) = findings({"e": ((6, 11),)}, overridden=(1, 2, 4))
    assert "tokens of steps [4] were replaced" in found.message


def reading(**sites: np.ndarray[Any, Any]) -> list[Finding]:
    """Findings of a read over positions 6..10 that holds these arrays."""
    locked = make.lock(reads={"r": make.read("rows", {"rows": "sampling"})}, arms={"a": make.arm(reads=["r"])})
    request = Request("k", "a", 0, "facts", "france", PROMPT)
    names = dict(zip(("first", "second"), make.SITES, strict=True))
    reads = {}
    for name, values in sites.items():
        dtype = "bfloat16" if values.dtype == np.uint16 else "float32"
        reads["r", names[name]] = ReadRows(np.arange(6, 6 + len(values)), {"rows": values}, dtype)
    done = Completion(0, GENERATED, "", "length", Record(reads=reads))
    return examine(locked, request, done, expect(locked, request, done))


GOOD = np.ones((5, 4), np.float32)


def test_reads_that_are_all_zero_or_not_finite() -> None:
    assert reading(first=GOOD, second=GOOD) == []
    zero, odd = GOOD.copy(), GOOD.copy()
    zero[2:4] = -0.0
    odd[4, 1] = np.inf
    first, second = reading(first=zero, second=odd)
    assert first.code == second.code == "VT604"
    assert "(request k): 2 rows at 1 site all zero, first at resid_post[10], position 8" in first.message
    assert "1 row at 1 site not finite, first at resid_post[11], position 10" in second.message


def test_bfloat16_bits_are_judged_as_numbers() -> None:
    bits = np.full((5, 4), 0x3F80, np.uint16)
    assert reading(first=bits, second=bits) == []
    bad = bits.copy()
    bad[0], bad[1, 0], bad[2, 0] = 0x8000, 0x7FC0, 0xFF80
    messages = [f.message for f in reading(first=bits, second=bad)]
    assert "2 rows at 1 site not finite, first at resid_post[11], position 7" in messages[0]
    assert "1 row at 1 site all zero, first at resid_post[11], position 6" in messages[1]


def test_reads_of_which_rows_or_sites_are_missing() -> None:
    (short,) = reading(first=GOOD[:3], second=GOOD[:3])
    assert (short.code, short.note) == ("VT602", "missing: positions 9..10")
    (uneven,) = reading(first=GOOD, second=GOOD[:3])
    assert "resid_post[10] and resid_post[11] hold different rows" in uneven.message
    (absent,) = reading(first=GOOD)
    assert "nothing came from resid_post[11]" in absent.message
    (none,) = reading()
    assert none.message.endswith("0 rows came, expected 5")


def test_a_zeroed_site_may_read_zero() -> None:
    locked = make.lock(
        reads={"r": make.read("rows", {"rows": "sampling"})},
        edits={"off": make.edit("zero", {"rows": "all"}, make.SITES[1])},
        arms={"a": make.arm(reads=["r"], points=[point(make.use("off", None, make.SITES[1])) | {"overrides": []}])},
    )
    request = Request("k", "a", 0, "facts", "france", PROMPT)
    reads = {
        ("r", s): ReadRows(np.arange(6, 11), {"rows": v}, "float32")
        for s, v in zip(make.SITES, (GOOD, np.zeros((5, 4), np.float32)), strict=True)
    }
    done = Completion(0, GENERATED, "", "length", Record(fired={"off": ((0, 11),)}, reads=reads))
    assert examine(locked, request, done, expect(locked, request, done)) == []


def judged(read: dict[str, Any], edit: dict[str, Any] | None, values: Any, *, layer: int = 11) -> list[str]:
    """What is said of a read at the second site, in an arm with an edit at the first; ``layer``: of the first."""
    locked = make.lock(
        reads={"r": read | {"sites": [make.SITES[1]]}},
        edits={} if edit is None else {"e": edit},
        arms={"a": make.arm(reads=["r"], points=[point(*([make.use("e", 1.0, *edit["sites"])] if edit else []))])},
    )
    locked["sites"][make.SITES[0]]["layer"] = layer
    locked["arms"]["a"]["points"][0]["overrides"] = []
    request = Request("k", "a", 0, "facts", "france", PROMPT)
    rows = ReadRows(np.arange(6, 11), {read["kind"]: values}, "float32")
    asked = Completion(0, GENERATED, "", "length", Record())
    fired = {} if edit is None else {"e": tuple(to_ranges(expect(locked, request, asked).edits["e"]))}
    done = replace(asked, record=Record(fired=fired, reads={("r", make.SITES[1]): rows}))
    found = examine(locked, request, done, expect(locked, request, done))
    assert {f.code for f in found} <= {"VT604"} and CODES["VT604"].severity == "error"
    return [f.message for f in found]


def test_zeros_are_an_error_but_where_the_arm_makes_them_or_the_read_allows_them() -> None:
    rows, zeros = make.read("rows", {"rows": "sampling"}), np.zeros((5, 4), np.float32)
    everywhere = make.edit("zero", {"rows": "all"}, make.SITES[0])
    assert "5 rows at 1 site all zero, first at resid_post[11], position 6" in judged(rows, None, zeros)[0]
    assert judged(rows | {"allow": ["zero"]}, None, zeros) == []
    # Of the layer, as all heads before `attn_out`; of another layer it explains nothing.
    assert judged(rows, everywhere, zeros) == []
    assert len(judged(rows, everywhere, zeros, layer=10)) == 1
    # Some columns, or another verb, make no row zero.
    assert len(judged(rows, everywhere | {"columns": [[0, 2]]}, zeros)) == 1
    assert len(judged(rows, everywhere | {"verb": "clamp"}, zeros)) == 1
    # Rows that the edit does not select.
    first = make.edit("zero", {"rows": "all", "steps": [[0, 0]]}, make.SITES[0])
    assert "4 rows at 1 site all zero, first at resid_post[11], position 7" in judged(rows, first, zeros)[0]
    # A dot is exactly zero after an edit at its own place.
    dots = make.read("project", {"rows": "sampling"})
    assert "all zero" in judged(dots, None, zeros[:, :1])[0]
    assert judged(dots, make.edit("project_out", {"rows": "all"}, make.SITES[1]), zeros[:, :1]) == []
    # What is not finite is never made by `zero`.
    odd = zeros + np.nan
    assert "5 rows at 1 site not finite" in judged(rows | {"allow": ["zero"]}, everywhere, odd)[0]
    assert judged(rows | {"allow": ["zero", "not_finite"]}, None, odd) == []


def test_a_metric_that_is_no_number_is_an_error() -> None:
    done = make.finish(make.requests()[0])
    (completion,) = done.completions
    for value, count in ((np.nan, 1), (-np.inf, 0), (-1.5, 0)):
        metrics = {"paris": (completion.record.metrics["paris"][0], np.array([value], np.float32))}
        record = replace(completion.record, metrics=metrics)
        expected = expect(make.LOCK, done.request, completion)
        found = examine(make.LOCK, done.request, replace(completion, record=record), expected)
        assert [f.code for f in found] == ["VT604"] * count
        if found:
            assert found[0].message == (
                "metric paris, arm base, prompt france: 1 row with a value that is no number, first at position 4"
            )


def test_many_findings_of_one_kind_are_counted() -> None:
    many = [Finding("VT602", "edit e", "a", f"message {i}") for i in range(9)]
    out: list[Diagnostic] = collect([*many, Finding("VT604", "read r", "a", "other")], make.LOCK)
    assert [d.message for d in out] == [*(f"message {i}" for i in range(5)), "other"]
    assert out[4].note == "4 more of this kind in arm a"


@pytest.mark.parametrize("bits", [False, True])
def test_a_ban_makes_minus_infinity_and_nothing_else(bits: bool) -> None:
    where = make.SITES[0]
    never = {**make.use("never", None, where), "coefficient": "-inf"}
    locked = make.lock(
        reads={n: {**make.read("rows", {"rows": "sampling"}), "sites": [where]} for n in ("after", "before", "odd")},
        edits={"never": {**make.edit("set", {"rows": "sampling"}, where), "value": True, "columns": [[1, 2]]}},
        arms={"a": make.arm(reads=["after", "before", "odd"], points=[point(never) | {"overrides": []}])},
    )
    locked["reads"]["before"]["sees"] = "before_edits"
    request = Request("k", "a", 0, "facts", "france", PROMPT)
    banned = np.full((5, 4), 0x3F80, np.uint16) if bits else GOOD.copy()
    banned[:, 1] = 0xFF80 if bits else -np.inf
    odd = banned.copy()
    odd[2, 0], odd[3, 0] = (0x7F80, 0x7FC0) if bits else (np.inf, np.nan)
    held = {"after": banned, "before": banned, "odd": odd}
    dtype = "bfloat16" if bits else "float32"
    reads = {(n, where): ReadRows(np.arange(6, 11), {"rows": v}, dtype) for n, v in held.items()}
    done = Completion(0, GENERATED, "", "length", Record(fired={"never": ((6, 11),)}, reads=reads))
    before, strange = examine(locked, request, done, expect(locked, request, done))
    assert "read before" in before.message and "5 rows at 1 site not finite" in before.message
    assert "read odd" in strange.message and "2 rows at 1 site not finite" in strange.message
    assert before.code == strange.code == "VT604"

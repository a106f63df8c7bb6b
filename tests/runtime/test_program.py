"""The lock as a program: what is refused and how it is said, identities, the vectors that are loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.memory import Limits, predicted
from vtaps.runtime.program import LockError
from vtaps.spec.vectors import file_digest

LOCK: dict[str, Any] = {
    "lock": 1,
    "block": {"file": "b.py", "digest": "sha256:0", "structure": "sha256:1", "lines": {"21": 16}},
    "lens": {"norm": "model.norm"},
    "sites": {
        "a": {"module": "m.a", "output": 0, "residual": 1, "layer": 1, "width": 4},
        "b": {"module": "m.b", "input": "x", "layer": None, "width": 4, "columns": [2, 6]},
    },
    "edits": {
        "push": {"verb": "add", "sites": ["a", "b"], "tokens": {"rows": "sampling"}},
        "gain": {"verb": "scale", "sites": ["a"], "tokens": {"rows": "all"}},
        "none": {"verb": "zero", "sites": ["a"], "tokens": {"rows": "all"}},
    },
    "reads": {"look": {"kind": "lens", "sites": ["a"], "tokens": {"rows": "sampling"}, "top": 3}},
    "overrides": {"say": {"ids": [7, 8]}},
    "metrics": {"m": {"kind": "logit_diff", "ids": [1, 2], "tokens": {"rows": "sampling"}}},
    "vectors": {"v": {"file": "v.npy"}, "w": {"random": {"seed": 3, "norm": 2.0}}},
    "arms": {
        "x": {
            "reads": ["look"],
            "metrics": ["m"],
            "points": [
                {
                    "edits": [
                        {"edit": "push", "sites": ["a"], "coefficient": 0.0, "vector": "v"},
                        {"edit": "gain", "sites": ["a"], "coefficient": 1.0, "vector": None},
                        {"edit": "none", "sites": ["a"], "coefficient": None, "vector": None},
                    ],
                    "overrides": [{"override": "say", "start": 2}],
                },
                {"edits": [{"edit": "push", "sites": ["b"], "coefficient": 2.0, "vector": "w"}], "overrides": []},
            ],
        }
    },
}


def changed(**at: Any) -> dict[str, Any]:
    """The lock with one entry set: ``changed(edits__push__verb="mul")``."""
    lock = copy.deepcopy(LOCK)
    for path, value in at.items():
        *way, last = path.split("__")
        inside: Any = lock
        for name in way:
            inside = inside[int(name)] if isinstance(inside, list) else inside[name]
        inside[last] = value
    return lock


def test_identities_are_dropped(tmp_path: Path) -> None:
    program = parse_program(LOCK, tmp_path)
    assert [e.edit for e in program.point("x", 0).edits] == ["none"]
    assert program.vectors_of == {"push": ("w",), "gain": (), "none": ()}
    assert program.used_at["push"] == {"b": {"w"}}


def test_uses_of_an_edit_are_numbered_over_all_points(tmp_path: Path) -> None:
    """A row of a step says by number which use it is of: equal uses are one, whichever arm they stand in."""

    def push(coefficient: float, vector: str, *sites: str) -> dict[str, Any]:
        return {"edit": "push", "sites": list(sites), "coefficient": coefficient, "vector": vector}

    points = [
        {"edits": [push(1.0, "v", "a")]},
        {"edits": [push(2.0, "v", "a"), push(1.0, "w", "b")]},
        {"edits": [push(1.0, "v", "a"), {"edit": "none", "sites": ["a"]}]},
        {"edits": [push(1.0, "v", "a", "b"), push(0.0, "v", "b")]},
    ]
    program = parse_program(changed(arms={"x": {"points": points[:2]}, "y": {"points": points[2:]}}), tmp_path)
    found = {(u.coefficient, u.vector, u.sites): number for u, number in program.uses_of["push"].items()}
    assert found == {(1, "v", ("a",)): 1, (2, "v", ("a",)): 2, (1, "w", ("b",)): 3, (1, "v", ("a", "b")): 4}
    assert list(program.uses_of["none"].values()) == [1] and program.uses_of["gain"] == {}


@pytest.mark.parametrize(
    ("engine", "modes"),
    [({}, ("eager", "eager")), ({"mode": "eager"}, ("eager",) * 2), ({"mode": "taps"}, ("recorded", "hook"))],
)
def test_how_a_location_is_served_unless_it_says(engine: dict[str, Any], modes: Any, tmp_path: Path) -> None:
    program = parse_program(changed(engine=engine, sites__b__rows="sampled"), tmp_path)
    assert (program.sites["a"].mode, program.sites["b"].mode) == modes
    assert not program.sites["a"].sampled and program.sites["b"].sampled
    assert parse_program(changed(engine=engine, sites__a__mode="hook"), tmp_path).sites["a"].mode == "hook"


def test_what_a_step_asks_of_a_read_s_slots(tmp_path: Path) -> None:
    look = parse_program(changed(reads__look__step_rows=3, reads__look__requests=7), tmp_path).reads["look"]
    assert (look.step_rows, look.requests) == (3, 7)
    look = parse_program(LOCK, tmp_path).reads["look"]
    assert look.step_rows is None and look.requests is None


def test_the_directions_of_an_edit_take_memory(tmp_path: Path) -> None:
    limits = Limits(rows=8, requests=2, step_rows=8)
    edit = {"verb": "project_out", "sites": ["a", "b"], "tokens": {"rows": "all"}}
    used = [{"edits": [{"edit": "push", "sites": ["a", "b"], "coefficient": 1.0, "vector": None}]}]
    one, three = (
        predicted(
            parse_program(changed(edits__push=edit | {"vectors": names}, arms__x__points=used), tmp_path),
            limits,
            "float32",
        )
        for names in (["v"], ["v", "w", "v"])
    )
    assert three - one == 2 * 4 * (4 + 4)


def test_a_request_compiled(tmp_path: Path) -> None:
    compiled = parse_program(LOCK, tmp_path).compile("x", 0, 5, {})
    assert compiled.overrides == ((2, (7, 8)),)
    # `sampling` stands in the read and the metric: one selector.
    assert len(compiled.selections) == 2
    assert not compiled.idle


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"lock": 2}, "lock: version 2"),
        ({"edits__push__verb": "mul"}, "edits.push: verb 'mul' is not one of add, scale, zero, set"),
        ({"edits__push__sites": ["c"]}, "edits.push: sites has no c"),
        ({"reads__look__kind": "max"}, "reads.look: kind 'max'"),
        ({"reads__look__top": None}, "reads.look: a lens has either top or ids"),
        ({"reads__look__vectors": ["z"]}, "reads.look: vectors has no z"),
        ({"lens": None}, "lens: reads.look needs the path of the final norm"),
        ({"metrics__m__ids": [1]}, "metrics.m: logit_diff with 1 token ids"),
        ({"arms__x__reads": ["gone"]}, "arms.x: reads has no gone"),
        ({"arms__x__points__1__edits__0__vector": "gone"}, "arms.x: vectors has no gone"),
        ({"arms__x__points__1__edits__0__vector": None}, r"arms.x: push \(add\) has no vector"),
        ({"arms__x__points__1__edits__0__sites": ["c"]}, "arms.x: edits.push has no c"),
        ({"sites__a": {"module": "m"}}, "sites.a: no 'width'"),
        ({"sites__a__mode": "graph"}, "sites.a: mode 'graph' is not one of recorded, break, hook, eager"),
        ({"engine": {"mode": "fast"}}, "engine: mode 'fast' is not one of taps, eager"),
    ],
)
def test_what_is_wrong_is_named(at: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LockError, match=message):
        parse_program(changed(**at), tmp_path)


def test_a_request_for_what_is_not_there(tmp_path: Path) -> None:
    program = parse_program(changed(edits__none__tokens={"rows": "all", "match": "hi"}), tmp_path)
    with pytest.raises(LockError, match=r"arms\.y: no such arm; there are x"):
        program.compile("y", 0, 5, {})
    with pytest.raises(LockError, match=r"arms\.x: it has 2 sweep points; there is no point 2"):
        program.compile("x", 2, 5, {})
    with pytest.raises(LockError, match=r"edits\.none: the request says nothing of 'hi'"):
        program.compile("x", 0, 5, {})
    assert program.compile("x", 0, 5, {"matches": {"hi": [[1, 2]]}}).selections[0].intervals == ((1, 2),)


def test_vectors_are_held_against_digest_and_width(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.arange(4, dtype=np.float32))
    digest = file_digest(tmp_path / "v.npy")
    program = parse_program(changed(vectors__v__digest=digest), tmp_path)
    np.testing.assert_array_equal(program.load_vector("v", program.sites["a"]), [0, 1, 2, 3])
    assert abs(float(np.linalg.norm(program.load_vector("w", program.sites["b"]))) - 2) < 1e-6

    np.save(tmp_path / "v.npy", np.arange(5, dtype=np.float32))
    with pytest.raises(LockError, match=r"vectors.v: v.npy changed since compile"):
        parse_program(changed(vectors__v__digest=digest), tmp_path).load_vector("v", program.sites["a"])
    with pytest.raises(LockError, match=r"vectors.v: v.npy is 5 wide; 4 is needed here \(used at a\)"):
        parse_program(LOCK, tmp_path).load_vector("v", program.sites["a"])

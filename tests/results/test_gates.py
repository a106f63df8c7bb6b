"""What gates leave of a run: scores, decisions, and rows that were selected but let be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtaps
from tests.results import make
from tests.results.test_folder import opened
from vtaps.runtime.records import Collected, Finished, Kept, Request, Scores
from vtaps.runtime.results.load import RunResult
from vtaps.runtime.transport import pack, record_of, unpack
from vtaps.show import render, summary
from vtaps.spec.rows import to_ranges


def lock() -> dict[str, Any]:
    out = make.lock()
    told = {"site": make.SITES[0], "step_rows": 8, "requests": 8, "line": 9}
    out["gates"] = {
        "near": {**told, "score": "cosine", "tokens": {"rows": "sampling"}, "holds": "row"},
        "asked": {**told, "score": "project", "tokens": {"rows": "prompt"}, "holds": "request", "reduce": "max"},
    }
    out["edits"]["steer"]["when"], out["edits"]["no_h3"]["when"] = "near", "asked"
    out["edits"]["no_h3"]["tokens"] = {"rows": "generated"}
    for point in out["arms"]["steered"]["points"]:
        used = [e["edit"] for e in point["edits"] if e["coefficient"] != 0]
        gates = {"steer": "near", "no_h3": "asked"}
        point["gates"] = [{"gate": gates[e], "vector": "v", "above": 0.5, "below": None} for e in used]
    return out


LOCK = lock()


def scores(request: Request, positions: list[int]) -> np.ndarray[Any, Any]:
    return (np.array(positions, np.float32) % 2 + len(request.key) / 100).astype(np.float32)


def finished(request: Request, **more: Any) -> Finished:
    """Odd positions pass; the requests of one prompt pass."""
    done = make.complete(request, locked=LOCK)
    if request.arm != "steered":
        return Finished(request, (done,))
    prompt, last = len(request.prompt_token_ids), len(request.prompt_token_ids) + 3
    near, asked = list(range(prompt - 1, last)), list(range(prompt))
    passes = request.prompt_id == "japan"
    gates = {
        "near": Scores(np.array(near), scores(request, near), np.array(near) % 2 == 1),
        "asked": Scores(np.array(asked), scores(request, asked), np.full(prompt, passes), 0.75 + passes),
    }
    if "near" not in {g["gate"] for g in LOCK["arms"]["steered"]["points"][request.point]["gates"]}:
        del gates["near"]
    selected = dict(done.record.fired)
    fired = {
        "steer": tuple(to_ranges(np.array([p for p in near if p % 2]))) if "near" in gates else (),
        "no_h3": selected["no_h3"] if passes else (),
    }
    record = replace(done.record, fired={n: r for n, r in fired.items() if r}, selected=selected, gates=gates)
    return Finished(request, (replace(done, record=replace(record, **more)),))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    path = tmp_path_factory.mktemp("runs") / "gated"
    with opened(path, LOCK) as folder:
        for request in make.requests(LOCK):
            assert folder.add(finished(request)) == []
        assert folder.finish({"name": "by hand"}, token_text=str) == []
    return vtaps.load(path)


def test_what_a_gate_saw_and_decided(run: RunResult) -> None:
    near = run.gate("near")
    assert near.column_names == [
        "request", "completion", "prompt", "group", "arm", "steer.add.scale", "position", "step", "score", "passed",
    ]  # fmt: skip
    asked = {r.key: r for r in make.requests(LOCK)}
    rows = near.filter(np.array(near["request"].to_pylist()) == "france/steered/2").to_pylist()
    assert [r["position"] for r in rows] == [4, 5, 6, 7] and [r["step"] for r in rows] == [0, 1, 2, 3]
    assert [r["score"] for r in rows] == scores(asked["france/steered/2"], [4, 5, 6, 7]).tolist()
    assert [r["passed"] for r in rows] == [False, True, False, True]
    # A point whose edit changes nothing asks no gate.
    assert set(near["request"].to_pylist()) == {f"{p}/steered/{i}" for p in make.PROMPTS for i in (1, 2)}
    whole = run.gate("asked")
    assert {(r["prompt"], r["passed"]) for r in whole.to_pylist()} == {("france", False), ("japan", True)}
    assert whole["step"].to_pylist()[:5] == [None, None, None, None, 0]
    with pytest.raises(KeyError, match="no gate named 'nea'; nearest is 'near'"):
        run.gate("nea")


def test_the_columns_of_a_request(run: RunResult) -> None:
    rows = {r["request"]: r for r in run.requests.to_pylist()}
    told = rows["japan/steered/1"]
    assert (told["scored.near"], told["passed.near"], told["scored.asked"]) == (4, 2, 3)
    assert (told["decided.asked"], told["score.asked"]) == (True, 1.75)
    assert rows["france/steered/1"]["decided.asked"] is False and rows["france/steered/0"]["scored.near"] is None
    assert rows["france/base/0"]["scored.asked"] is None
    fired = {(r["prompt"], r["steer.add.scale"]): (r["fired"], r["expected"]) for r in run.fired("no_h3").to_pylist()}
    assert fired["japan", 4.0] == (3, 3) and fired["france", 4.0] == (0, 3)
    assert {(r["fired"], r["expected"]) for r in run.fired("steer").to_pylist()} == {(0, 0), (2, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": {"steer": ((2, 5),), "no_h3": ((3, 6),)}}, "edit steer, .*: fired at 3 rows, expected 4"),
        ({"gates": {}}, "gate near, .*: scored 0 rows, expected 4"),
    ],
)
def test_rows_that_are_missing_are_found(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    request = next(r for r in make.requests(LOCK) if r.key == "japan/steered/1")
    with opened(tmp_path / "run", LOCK) as folder:
        found = folder.add(finished(request, **change))
    assert {d.code for d in found} == {"VT602"}
    assert any(re.search(message, d.message) for d in found), [d.message for d in found]


def test_a_score_that_is_not_a_number_is_found(tmp_path: Path) -> None:
    request = next(r for r in make.requests(LOCK) if r.key == "japan/steered/1")
    gates = finished(request).completions[0].record.gates
    odd = replace(gates["asked"], scores=np.array([0, np.nan, 1], np.float32), value=float("nan"))
    with opened(tmp_path / "run", LOCK, order=[request.key]) as folder:
        [found] = folder.add(finished(request, gates={**gates, "asked": odd}))
        assert (found.code, found.span.line) == ("VT604", 9) and "first at position 1" in found.message
        folder.finish({})
    told = vtaps.load(tmp_path / "run").requests.to_pylist()[0]
    assert np.isnan(told["score.asked"])


def test_what_is_shown(run: RunResult) -> None:
    text = render(summary(run, width=100), 100)
    assert re.search(r"near +steered +16 +8 rows +0\.1[0-9]+ … 1\.1[0-9]+", text)
    assert re.search(r"asked +steered +24 +3 of 6 requests", text)
    assert re.search(r"gates +40 rows +gates\.parquet", text)


def kept(gate: str, rows: list[list[float]]) -> Kept:
    values = {"gate": np.array(rows, np.float32)[:, None]}
    return Kept(f"gates.{gate}", ("a",), np.arange(2, 2 + len(rows)), values, "float32")


def test_what_fired_comes_from_the_decisions_of_the_device() -> None:
    """Whatever the scores say; the last row of a request gate has what it decided."""
    near = kept("near", [[0.25, 1, 0.25], [0.5, 0, 0.5], [0.75, 1, 0.75]])
    asked = kept("asked", [[5, 0, 5], [1, 1, 3.5]])
    gated = {"push": ("gates.near", False), "steer": ("gates.asked", True), "idle": ("gates.none", True)}
    fired = {"push": ((1, 4), (4, 9)), "steer": ((4, 6),), "idle": ((4, 6),), "free": ((0, 2),)}
    worker = Collected(fired, (near, asked), gated=gated)
    [there] = unpack(pack([(("k", 0), worker)])).values()
    for found in (record_of(worker), record_of(there)):
        assert found.fired == {"push": ((2, 3), (4, 5)), "steer": ((4, 6),), "idle": (), "free": ((0, 2),)}
        assert found.selected == {name: fired[name] for name in gated} and not found.reads
        assert found.gates["near"].scores.tolist() == [0.25, 0.5, 0.75] and found.gates["near"].value is None
        assert found.gates["asked"].passed.tolist() == [True, True] and found.gates["asked"].value == 3.5

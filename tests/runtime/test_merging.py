"""What several workers report of a request is one record, or an error: never one rank's part as if it were whole."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vtaps.runtime.errors import EngineError
from vtaps.runtime.faults import Fault
from vtaps.runtime.merging import Merging
from vtaps.runtime.parts import part
from vtaps.runtime.records import ReadRows, Record

KEY = ("k0", 0)
ROWS = np.arange(2 * 16, dtype=np.float32).reshape(2, 16) - 9
POSITIONS = np.array([3, 5])


def site(shared: bool, sampled: bool = False) -> Any:
    return SimpleNamespace(shared=shared, sampled=sampled)


PROGRAM: Any = SimpleNamespace(
    sites={"z": site(True), "k": site(True), "resid": site(False), "logits": site(False, True)},
    reads={
        kind: SimpleNamespace(kind=kind, top=None)
        for kind in ("rows", "mean", "norm", "project", "features")
    } | {"top": SimpleNamespace(kind="lens", top=3), "chosen": SimpleNamespace(kind="lens", top=None)},
)  # fmt: skip
PARTS = {
    # Four heads of four, a rank each; two pairs of keys and values, of which two ranks have the same.
    "z": [part([(16, 4)], None, rank, 4) for rank in range(4)],
    "k": [part([(16, 2)], None, rank, 4) for rank in range(4)],
}


def told(stages: int = 1) -> list[dict[str, Any]]:
    return [
        {"stage": stage, "parts": {n: [p[rank].width, p[rank].pieces] for n, p in PARTS.items()} if not stage else {}}
        for stage in range(stages)
        for rank in range(4)
    ]


def rows(**values: Any) -> ReadRows:
    return ReadRows(POSITIONS, values, "float32")


def merged(reads: list[dict[tuple[str, str], ReadRows]], **more: Any) -> Record:
    answers = [{KEY: Record(reads=read, **more)} for read in reads]
    return Merging(PROGRAM, told()).records(answers)[KEY]


@pytest.mark.parametrize("where", ["z", "k"])
def test_columns_are_put_together(where: str) -> None:
    cut = [p.cut(ROWS) for p in PARTS[where]]
    found = merged(
        [{("rows", where): rows(rows=c), ("mean", where): rows(mean=c, count=np.array([2, 2]))} for c in cut]
    )
    assert np.array_equal(found.reads["rows", where].values["rows"], ROWS)
    assert np.array_equal(found.reads["mean", where].values["mean"], ROWS)
    assert found.reads["mean", where].values["count"].tolist() == [2, 2]


@pytest.mark.parametrize("where", ["z", "k"])
def test_what_is_made_of_a_row_counts_each_column_once(where: str) -> None:
    weight = np.arange(32, dtype=np.float32).reshape(2, 16)
    reads = []
    for p in PARTS[where]:
        mine = p.cut(ROWS)
        reads.append({
            ("norm", where): rows(norm=np.linalg.norm(mine, axis=-1)),
            ("project", where): rows(project=mine @ p.cut(weight).T),
        })  # fmt: skip
    found = merged(reads).reads
    np.testing.assert_allclose(found["norm", where].values["norm"], np.linalg.norm(ROWS, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(found["project", where].values["project"], ROWS @ weight.T, rtol=1e-6)


def test_a_lens_is_of_the_whole_vocabulary() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    reads: list[dict[tuple[str, str], ReadRows]] = []
    for first in range(0, 16, 4):
        mine = logits[:, first : first + 4]
        order = np.argsort(-mine, axis=-1)[:, :3]
        sums = np.log(np.exp(mine).sum(-1))
        wanted = np.array([[2, 9], [2, 9]])
        here = (wanted >= first) & (wanted < first + 4)
        chosen = np.where(here, np.take_along_axis(logits, wanted, -1), -np.inf)
        reads.append({
            ("top", "resid"): rows(ids=order + first, logits=np.take_along_axis(mine, order, -1), logsumexp=sums),
            ("chosen", "resid"): rows(ids=wanted, logits=chosen, logsumexp=sums),
        })  # fmt: skip
    found = merged(reads).reads
    best = np.argsort(-logits, axis=-1)[:, :3]
    assert np.array_equal(found["top", "resid"].values["ids"], best)
    assert np.array_equal(found["top", "resid"].values["logits"], np.take_along_axis(logits, best, -1))
    np.testing.assert_allclose(found["top", "resid"].values["logsumexp"], np.log(np.exp(logits).sum(-1)), rtol=1e-6)
    assert np.array_equal(found["chosen", "resid"].values["logits"], logits[:, [2, 9]])


def test_what_all_ranks_have_is_the_first_one_s() -> None:
    found = merged([{("rows", "resid"): rows(rows=ROWS + rank)} for rank in range(4)])
    assert np.array_equal(found.reads["rows", "resid"].values["rows"], ROWS)


def test_a_rank_that_says_nothing_or_has_other_rows_is_an_error() -> None:
    cut = [{("rows", "z"): rows(rows=p.cut(ROWS))} for p in PARTS["z"]]
    with pytest.raises(EngineError, match="ranks have other rows of rows at z"):
        merged([*cut[:3], {}])
    other = {("rows", "z"): replace(cut[3]["rows", "z"], positions=np.array([3, 6]))}
    with pytest.raises(EngineError, match="ranks have other rows of rows at z"):
        merged([*cut[:3], other])


def test_ranks_that_edited_other_rows_are_an_error() -> None:
    records = [Record(fired={"steer": ((0, 4),)}) for _ in range(3)] + [Record(fired={"steer": ((0, 3),)})]
    with pytest.raises(EngineError, match="rank 3 edited other rows than rank 0"):
        Merging(PROGRAM, told()).records([{KEY: record} for record in records])


def test_a_request_that_failed_on_one_rank_failed() -> None:
    fault = Fault("VT620", "it raised")
    records = [Record(), Record(), Record(fault=fault), Record()]
    assert Merging(PROGRAM, told()).records([{KEY: record} for record in records])[KEY].fault == fault


def test_stages_have_locations_of_their_own() -> None:
    first = [Record(reads={("rows", "z"): rows(rows=p.cut(ROWS))}, fired={"a": ((0, 2),), "both": ((1, 2),)})
             for p in PARTS["z"]]  # fmt: skip
    last = [Record(reads={("rows", "resid"): rows(rows=ROWS)}, fired={"b": ((3, 4),), "both": ((1, 2),)},
                   overridden=(1,), metrics={"m": (POSITIONS, ROWS[:, 0])}) for _ in range(4)]  # fmt: skip
    found = Merging(PROGRAM, told(2)).records([{KEY: record} for record in (*first, *last)])[KEY]
    assert found.reads.keys() == {("rows", "z"), ("rows", "resid")}
    assert np.array_equal(found.reads["rows", "z"].values["rows"], ROWS)
    assert found.fired == {"a": ((0, 2),), "b": ((3, 4),), "both": ((1, 2),)}
    assert found.overridden == (1,) and "m" in found.metrics
    off = [replace(record, fired={"both": ((1, 3),)}) for record in last]
    with pytest.raises(EngineError, match="stages edited other rows by both"):
        Merging(PROGRAM, told(2)).records([{KEY: record} for record in (*first, *off)])


def test_columns_on_no_rank_are_noticed_at_the_hand_shake() -> None:
    said = told()
    said[3]["parts"]["z"] = said[2]["parts"]["z"]
    with pytest.raises(EngineError, match="z: 4 of 16 columns are on no rank"):
        Merging(PROGRAM, said)
    del said[3]["parts"]["z"]
    with pytest.raises(EngineError, match=r"of z, workers \[0, 1, 2\] have parts"):
        Merging(PROGRAM, said)

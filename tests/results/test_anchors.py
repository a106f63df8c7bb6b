"""What a run works out of all of its requests at the end: normalized metrics, means over the run, vectors of reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.results import make
from vtaps.runtime.records import Finished, Request
from vtaps.runtime.results.folder import RunFolder
from vtaps.runtime.results.kept import EarlierRun, kept_rows
from vtaps.runtime.results.load import load
from vtaps.spec.sources import SourceFault


def locked() -> dict[str, Any]:
    lock = make.lock()
    lock["metrics"]["paris"]["normalize"] = {"one": "steered", "zero": "base"}
    lock["metrics"]["other"] = {**lock["metrics"]["paris"], "normalize": None}
    lock["reads"]["average"]["mean_over"] = "run"
    lock["arms"]["steered"]["points"] = lock["arms"]["steered"]["points"][1:2]
    lock["arms"]["third"] = make.arm(
        metrics=["paris", "other"],
        points=[{"values": {"x.on": on}, "edits": [], "overrides": []} for on in (True, False)],
    )
    lock["arms"]["third"]["reads"] = ["average"]
    return lock


VALUES = {"base": 1.0, "steered": 5.0, "third": 2.0, "forced": 0.0}


def finished(request: Request, lock: dict[str, Any]) -> Finished:
    """One whose metrics are the numbers above, the prompts' lengths apart."""
    completion = make.complete(request, locked=lock)
    number = np.float32(VALUES[request.arm] * len(request.prompt_token_ids) + request.point)
    metrics = {name: (at, np.full(len(at), number, np.float32)) for name, (at, _) in completion.record.metrics.items()}
    return Finished(request, (replace(completion, record=replace(completion.record, metrics=metrics)),))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path, lock = tmp_path_factory.mktemp("anchors") / "run", locked()
    requests = make.requests(lock)
    folder, found = RunFolder.open(path, lock, order=[r.key for r in requests])
    assert folder is not None, found
    with folder:
        for request in requests:
            assert folder.add(finished(request, lock)) == []
        keys = [r.key for r in requests if r.arm == "base"]
        assert folder.mean([*keys, "nobody/x/0"], "average") is None
        mean = folder.mean(keys, "average")
        assert mean is not None
        # The arm's prompts have 5 and 3 rows, positions from 0 on.
        rows = [
            make.value(r, make.SITES[0], p) for r in requests if r.arm == "base" for p in range(len(r.prompt_token_ids))
        ]
        np.testing.assert_allclose(mean.mean(make.SITES[0]), np.mean(np.array(rows, np.float64), 0), rtol=1e-6)
        assert mean.count == 8
        vector = {make.SITES[0]: np.arange(4, dtype=np.float32)}
        folder.finish({"name": "by hand"}, vectors={"mu": vector})
    return load(path)


def test_metrics_are_normalized_by_the_prompt_of_the_same_id(run: Any) -> None:
    rows = run.metrics.to_pylist()
    for row in rows:
        if row["metric"] != "paris":
            assert row["normalized"] is None
        else:
            size = len(make.PROMPTS[row["prompt"]])
            assert row["normalized"] == pytest.approx((row["value"] - size) / (4 * size))
    assert {r["normalized"] for r in rows if r["arm"] in ("base", "steered")} == {0.0, 1.0}


def test_a_mean_over_the_run_has_a_row_an_arm_and_point(run: Any) -> None:
    average = run["average"]
    assert average.rows["arm"].to_pylist() == ["base", "third", "third"]
    assert average.rows["x.on"].to_pylist() == [None, True, False]
    assert average.rows["request"].null_count == 3 and average.rows["position"].null_count == 3
    assert average.numpy("count").tolist() == [[8, 8]] * 3
    for row, (arm, point) in enumerate((("base", 0), ("third", 0), ("third", 1))):
        keys = [r for r in make.requests(run.lock) if (r.arm, r.point) == (arm, point)]
        for number, site in enumerate(make.SITES):
            every = [make.value(r, site, p) for r in keys for p in range(len(r.prompt_token_ids))]
            np.testing.assert_allclose(average.numpy()[row, number], np.mean(np.array(every, np.float64), 0), rtol=1e-6)
    assert average.sel(arm="third", **{"x.on": False}).values.shape == (1, 2, make.WIDTH)


def test_vectors_that_were_used_are_kept(run: Any) -> None:
    np.testing.assert_array_equal(load_file(run.path / "vectors/mu.safetensors")[make.SITES[0]], np.arange(4))
    assert "vectors/mu.safetensors" in run.info["files"]


def test_rows_of_a_finished_run_are_taken_from_it(run: Any) -> None:
    kept = kept_rows(run.path, "base", "stream")
    assert (kept.kind, kept.dtype, kept.lengths) == ("rows", "float32", {"france": {"facts": 5}, "japan": {"facts": 3}})
    assert list(kept.positions(("facts", "japan"))) == [2, 3, 4, 5]
    assert kept.widths == dict.fromkeys(make.SITES, make.WIDTH)
    found = EarlierRun(run.path, "base", "stream").rows(("facts", "japan"), make.SITES)
    assert found is not None
    [request] = [r for r in make.requests(run.lock) if (r.arm, r.prompt_id) == ("base", "japan")]
    for site in make.SITES:
        np.testing.assert_array_equal(found[1][site], [make.value(request, site, p) for p in found[0]])
    assert EarlierRun(run.path, "base", "stream").rows(("facts", "italy"), make.SITES) is None


@pytest.mark.parametrize(
    ("arm", "read", "code", "told"),
    [
        ("bas", "stream", "VT327", "has no arm 'bas'; nearest is 'base'"),
        ("base", "streem", "VT327", "has no read 'streem'; nearest is 'stream'"),
        ("forced", "stream", "VT327", "does not list the read"),
        ("third", "average", "VT328", "several completions"),
    ],
)
def test_what_a_finished_run_does_not_have(run: Any, arm: str, read: str, code: str, told: str) -> None:
    with pytest.raises(SourceFault) as caught:
        kept_rows(run.path, arm, read)
    assert caught.value.args[0] == code and told in caught.value.args[1]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SourceFault, match="there is no folder"):
        kept_rows(tmp_path / "nothing", "base", "stream")


def test_rows_of_requests_that_are_done_are_there_after_an_interrupt(tmp_path: Path) -> None:
    lock = locked()
    requests = make.requests(lock)
    order = [r.key for r in requests]
    [source, other] = [r for r in requests if r.arm == "base"]
    folder, _ = RunFolder.open(tmp_path / "run", lock, order=order)
    assert folder is not None
    with folder:
        folder.add(finished(source, lock))
    again, _ = RunFolder.open(tmp_path / "run", lock, order=order)
    assert again is not None
    with again:
        found = again.rows(source.key, "stream")
        assert found is not None and again.rows(other.key, "stream") is None
        assert again.rows(source.key, "average") is None, "a mean is no rows"
        assert found[0] == [4, 5, 6, 7]
        for site in make.SITES:
            np.testing.assert_array_equal(found[1][site], [make.value(source, site, p) for p in found[0]])

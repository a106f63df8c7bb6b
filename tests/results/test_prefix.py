"""Results of a run with vLLM's prefix cache on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pyarrow.parquet as pq

from tests.results import make
from vtaps import schemas
from vtaps.runtime.results.folder import RunFolder
from vtaps.show import render, show


def test_rows_of_the_prefix_cache_are_reported_and_not_expected(tmp_path: Path) -> None:
    locked = make.lock(engine={**make.LOCK["engine"], "vllm": {"enable_prefix_caching": True}})
    opened, found = RunFolder.open(tmp_path / "run", locked, order=[r.key for r in make.requests()], blocks={})
    assert opened is not None, found
    with opened as run:
        for request in make.requests(locked):
            finished = make.finish(request)
            [completion] = finished.completions
            record = completion.record
            if request.arm == "steered":
                held = ((0, 2),) if request.point else ()
                fired = {n: tuple((max(a, 2 if held else a), b) for a, b in r) for n, r in record.fired.items()}
                record = replace(record, cached=held, fired=fired)
            assert run.add(replace(finished, completions=(replace(completion, record=record),))) == []
        assert run.finish({}, token_text=lambda t: str(t)) == []
    table = pq.read_table(tmp_path / "run" / "requests.parquet")
    rows = [r for r in table.to_pylist() if r["arm"] == "steered" and r["prompt"] == "france"]
    assert [r["cached"] for r in rows] == [0, 2, 2]
    assert [(r["fired.no_h3"], r["expected.no_h3"], r["cached.no_h3"]) for r in rows] == [
        (5, 5, 0),
        (3, 3, 2),
        (3, 3, 2),
    ]
    assert [(r["fired.steer"], r["cached.steer"]) for r in rows] == [(0, 0), (4, 0), (4, 0)]
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    jsonschema.validate(info, schemas.load("run-v1.schema.json"))
    assert (info["counts"]["cached_rows"], info["counts"]["prompt_rows"]) == (8, 40)
    assert "prefix cache: 8 of 40 rows" in render(show(tmp_path / "run"), 200).lower()

"""An edit that acted on one row less than its selector names."""

from dataclasses import replace
from pathlib import Path

from tests.golden.cases import Found
from tests.results.make import LOCK, finish, requests
from vtaps.runtime.results.folder import RunFolder


def findings(folder: Path) -> Found:
    done = finish(next(r for r in requests() if r.arm == "steered" and r.point == 1))
    record = done.completions[0].record
    start, stop = record.fired["steer"][0]
    short = replace(record, fired={**record.fired, "steer": ((start + 1, stop),)})
    wrong = replace(done, completions=(replace(done.completions[0], record=short),))
    run, _ = RunFolder.open(folder / "run", LOCK, order=[done.request.key])
    assert run is not None
    with run:
        return run.add(wrong), {}

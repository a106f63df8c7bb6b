"""A read that came back as zeros, and one that is not finite."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.golden.cases import Found
from tests.results.make import LOCK, finish, requests
from vtaps.runtime.results.folder import RunFolder


def findings(folder: Path) -> Found:
    done = finish(next(r for r in requests() if r.arm == "base"))
    record = done.completions[0].record
    reads = dict(record.reads)
    (first, second) = [key for key in reads if key[0] == "stream"]
    rows = reads[first]
    reads[first] = replace(rows, values={"rows": np.zeros_like(rows.values["rows"])})
    bad = reads[second].values["rows"].copy()
    bad[1, 0] = np.nan
    reads[second] = replace(reads[second], values={"rows": bad})
    wrong = replace(done, completions=(replace(done.completions[0], record=replace(record, reads=reads)),))
    run, _ = RunFolder.open(folder / "run", LOCK, order=[done.request.key])
    assert run is not None
    with run:
        return run.add(wrong), {}

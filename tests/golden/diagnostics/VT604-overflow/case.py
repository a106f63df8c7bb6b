"""A number that float16 does not hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.golden.cases import Found
from tests.results.make import finish, lock, read, requests
from vtaps.runtime.results.folder import RunFolder


def findings(folder: Path) -> Found:
    done = finish(next(r for r in requests() if r.arm == "base"))
    record = done.completions[0].record
    reads = dict(record.reads)
    for key in [key for key in reads if key[0] == "stream"]:
        reads[key] = replace(reads[key], values={"rows": reads[key].values["rows"].astype(np.float16)}, dtype="float16")
    reads[key].values["rows"][1, 0] = np.inf
    locked = lock()
    locked["reads"]["stream"] = read("rows", {"rows": "sampling"}, store={"dtype": "float16"})
    wrong = replace(done, completions=(replace(done.completions[0], record=replace(record, reads=reads)),))
    run, _ = RunFolder.open(folder / "run", locked, order=[done.request.key])
    assert run is not None
    with run:
        return run.add(wrong), {}

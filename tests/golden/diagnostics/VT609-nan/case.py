"""A Python read whose function gave NaN alone at one of its locations, and one NaN among numbers at the other."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.golden.cases import Found
from tests.results.make import finish, lock, read, requests
from vtaps.runtime.results.folder import RunFolder


def findings(folder: Path) -> Found:
    said = {"file": "probes.py", "function": "loudness", "digest": "sha256:" + "6" * 64}
    probe = read("python", {"rows": "sampling"}, python=said)
    locked = lock(reads={"probe": probe}, overrides={}, metrics={})
    locked["arms"] = {"base": {**locked["arms"]["base"], "reads": ["probe"], "metrics": []}}
    done = finish(next(r for r in requests(locked) if r.arm == "base"), locked)
    record = done.completions[0].record
    first, second = record.reads
    zero = np.zeros((len(record.reads[first].positions), 2), np.float32)
    some = zero.copy()
    some[2, 1] = np.nan
    reads = {
        first: replace(record.reads[first], values={"python": zero * np.nan}),
        second: replace(record.reads[second], values={"python": some}),
    }
    wrong = replace(done, completions=(replace(done.completions[0], record=replace(record, reads=reads)),))
    run, _ = RunFolder.open(folder / "run", locked, order=[done.request.key])
    assert run is not None
    with run:
        return run.add(wrong), {}

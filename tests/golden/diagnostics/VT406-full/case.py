"""A disk on which a request has no room any more."""

import resource
from pathlib import Path

from tests.golden.cases import Found
from tests.results.make import LOCK, finish, requests
from vtaps.runtime.results.folder import RunFolder, WriteError
from vtaps.spec.diagnostics import Diagnostic, Span


def findings(folder: Path) -> Found:
    run, _ = RunFolder.open("run", LOCK, order=[r.key for r in requests()])
    assert run is not None
    first, second, *_ = requests()
    with run:
        run.add(finish(first))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes of a file
        try:
            run.add(finish(second))
        except WriteError as error:
            return [Diagnostic("VT406", error.message, Span("paris.yaml"), note=error.note)], {}
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raise AssertionError("the request was written")

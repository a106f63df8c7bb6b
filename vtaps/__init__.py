"""vtaps: YAML intervention specs, compiled to reviewable Python that runs inside vLLM's workers.

``vtaps.load(folder)`` opens a run and ``vtaps.plot(folder)`` draws it; ``vtaps.verify(spec)`` holds a spec against an
independent reference; ``vtaps.check_file(spec)`` and ``vtaps.run_checked(result, out)`` are what the command line
calls.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtaps.check import check_file as check_file
    from vtaps.compiling import compile_plan as compile_plan
    from vtaps.pictures import PlotError as PlotError
    from vtaps.pictures import plot as plot
    from vtaps.running import run_checked as run_checked
    from vtaps.runtime.results.load import RunError as RunError
    from vtaps.runtime.results.load import RunResult as RunResult
    from vtaps.runtime.results.load import load as load
    from vtaps.verification import Verification as Verification
    from vtaps.verifying import verify as verify

__version__ = "0.1.0"

_WHERE = {
    "check_file": "vtaps.check",
    "compile_plan": "vtaps.compiling",
    "load": "vtaps.runtime.results.load",
    "plot": "vtaps.pictures",
    "PlotError": "vtaps.pictures",
    "run_checked": "vtaps.running",
    "RunError": "vtaps.runtime.results.load",
    "RunResult": "vtaps.runtime.results.load",
    "Verification": "vtaps.verification",
    "verify": "vtaps.verifying",
}


def __getattr__(name: str) -> Any:
    # Each of these is slow to import in its own way; the worker's plug-in and `vtaps explain` do without them.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

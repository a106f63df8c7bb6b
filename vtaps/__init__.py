"""vtaps: YAML intervention specs, compiled to reviewable Python that runs inside vLLM's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtaps.runtime.results.load import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # pyarrow is slow to import, and the worker plug-in and `vtaps check` do without it.
    if name == "load":
        from vtaps.runtime.results.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

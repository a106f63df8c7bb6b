"""Seconds that one engine spends in vtaps, part by part, told by clocks around the parts themselves.

Two engines side by side differ by what else the machine does; this share is of one engine's own time, so that it
holds on a busy machine too.  It leaves out what a registered hook costs torch before it calls the block.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vtaps.runtime import engine, hooks, session
from vtaps.runtime.compat import vllm_0_32

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "rows": ((vllm_0_32, "_scheduled"), (session.Session, "begin")),
    "locations": ((hooks._Point, "act"),),
    "harvest": ((session.Session, "end"), (session.Session, "replace")),
    "delivery": ((engine.Engine, "_collect"),),
}
"""Part → the functions that are its time; none calls another of them."""


@contextmanager
def accounted() -> Iterator[dict[str, float]]:
    """Part → seconds, growing while the context lasts."""
    spent: dict[str, float] = defaultdict(float)
    before: list[tuple[Any, str, Any]] = []
    for part, functions in PARTS.items():
        for owner, name in functions:
            original = getattr(owner, name)
            before.append((owner, name, original))
            setattr(owner, name, _clocked(original, part, spent))
    try:
        yield spent
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _clocked(original: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def clocked(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - started

    return clocked

"""A read of other rows than the selected ones."""

from pathlib import Path

from tests.golden.cases import Found, verified
from vtaps.runtime.reference.holding import Count, Measured
from vtaps.verification import counted, together


def findings(folder: Path) -> Found:
    measured = [
        Measured("read", "stream", "resid_post[2]", float("inf"), 1, None, "facts/france/base/0"),
        Measured("read", "stream", "resid_post[2]", 1e-6, 16, 4, "facts/japan/base/0"),
    ]
    fired = counted([Count("steer", "facts/france/steered/0", 4, 4, False)], {})
    return verified(folder, comparisons=together(measured, 1e-4), fired=fired)

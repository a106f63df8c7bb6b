"""A coefficient that is off: the read behind the edit, and every read after it."""

from pathlib import Path

from tests.golden.cases import Found, verified
from vtaps.runtime.reference.holding import Measured
from vtaps.verification import together


def findings(folder: Path) -> Found:
    measured = [
        Measured("read", "stream", "resid_post[2]", 2.1e-3, 16, 4, "facts/france/steered/0"),
        Measured("read", "stream", "resid_post[3]", 1.4e-2, 16, 6, "facts/france/steered/0"),
        Measured("edit", "steer", "resid_post[2]", 2.1e-3, 16, 4, "facts/france/steered/0"),
        Measured("tokens", "", "logits", 0.0, 16, 4, "facts/france/steered/0"),
    ]
    return verified(folder, comparisons=together(measured, 1e-4))

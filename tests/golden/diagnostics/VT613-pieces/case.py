"""A prompt in pieces whose rows are not those of the prompt in one step."""

from pathlib import Path

from tests.golden.cases import Found, verified
from vtaps.runtime.reference.holding import Measured
from vtaps.verification import together


def findings(folder: Path) -> Found:
    read = Measured("read", "stream", "resid_post[2]", 1e-6, 16, 4, "facts/japan/base/0")
    pieces = Measured("chunked", "stream", "resid_post[2]", 0.41, 16, 3, "facts/japan/base/0")
    return verified(folder, comparisons=together([read, pieces], 1e-4), chunk=3)

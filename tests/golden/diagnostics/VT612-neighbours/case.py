"""Unedited requests that their neighbours change, to the bit and past the bound."""

from pathlib import Path

from tests.golden.cases import Found, verified
from vtaps.runtime.reference.holding import Measured
from vtaps.verification import Isolation, together


def findings(folder: Path) -> Found:
    read = Measured("read", "stream", "resid_post[2]", 1e-6, 16, 4, "facts/japan/base/0")
    alone = Measured("alone", "stream", "resid_post[3]", 3e-3, 16, 5, "facts/japan/base/0")
    isolation = Isolation(3, (("facts/japan/base/0", "read stream at resid_post[3]"),))
    return verified(folder, comparisons=together([read, alone], 1e-4), isolation=isolation)

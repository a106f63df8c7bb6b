"""A spec whose only arm has a function of the user's for an edit."""

from pathlib import Path

from tests.golden.cases import Found, verified
from vtaps.runtime.reference.holding import Skipped


def findings(folder: Path) -> Found:
    skipped = Skipped("edit", "steer", "a function of your own is its own definition")
    return verified(folder, not_checked=(skipped,))

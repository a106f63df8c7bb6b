"""Which slots of a patch memory hold the rows that a request's edits set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.spec.rows import from_ranges

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Patch:
    """Rows for ``put``: those of the sorted ``positions`` [n] are in the slots ``first …`` of the edit's memory."""

    first: int
    positions: Ints

    @staticmethod
    def of(said: Mapping[str, Any]) -> Patch:
        return Patch(int(said["first"]), from_ranges((int(a), int(b)) for a, b in said["positions"]))

    def slots(self, positions: Ints) -> Ints | None:
        """The 0-based slots of ``positions``; None where one of them has none."""
        at = np.searchsorted(self.positions, positions)
        there = bool(np.isin(positions, self.positions).all())
        return self.first + at if there else None


def patches_of(asked: Mapping[str, Any]) -> dict[str, Patch]:
    """Edit → what a request says of the rows that it sets."""
    return {name: Patch.of(said) for name, said in (asked.get("patches") or {}).items()}

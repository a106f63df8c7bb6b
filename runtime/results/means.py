"""Means over all requests of an arm, out of those of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vtaps.runtime.results.journal import mean_of


@dataclass
class RunMean:
    """``count`` rows so far, and site → their sum ``[width]`` in float64."""

    count: int = 0
    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def add(self, count: int, means: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Take the mean of ``count`` more rows."""
        self.count += count
        for site, mean in means.items():
            sum_of = self.sums.setdefault(site, np.zeros(mean.shape, np.float64))
            sum_of += mean.astype(np.float64) * count

    def mean(self, site: str) -> npt.NDArray[np.float64]:
        """``[width]``; NaN where there are no rows."""
        with np.errstate(invalid="ignore"):
            return self.sums[site] / self.count


def run_mean(files: Iterable[Path], read: str) -> RunMean:
    """The mean of a read over the requests of these journal files."""
    out = RunMean()
    for path in files:
        for count, means in mean_of(path, read):
            out.add(count, means)
    return out

"""The locations of one worker at work, and how often each was launched against how often steps needed it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vtaps.runtime.block import Note
from vtaps.runtime.kernels import Board, LocationProgram

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class At:
    """One location at work."""

    name: str
    board: Board
    program: LocationProgram
    parts: tuple[LocationProgram | Note, ...]
    sampled: bool

    @property
    def python(self) -> bool:
        """Whether a function of the user's runs there."""
        return any(isinstance(part, Note) for part in self.parts)


class Launches:
    """``in_graph``: which locations are in the model's graph, where each forward launches them.  ``proved``: launches
    of each in a pass of the proof.  ``called``: calls of functions so far, which the device does not count."""

    def __init__(self, at: Sequence[At], traced: Collection[str], recorded: Collection[str], seen: Tensor) -> None:
        """``traced``: the locations that a compiler sees; ``recorded``: those of them that are in the graph; ``seen``:
        the launches so far, int32 ``[locations]`` on the device."""
        self._at, self._seen, self._recorded = at, seen, bool(recorded)
        # Launches that each location must have seen: of a recorded one each forward, of another each step of its own.
        self._expected: Counts = np.zeros(len(at), np.int64)
        self.called: Counts = np.zeros(len(at), np.int64)
        self._sampled = np.array([one.sampled for one in at], bool)
        self.in_graph = np.array([one.name in recorded for one in at], bool)
        self._each: Counts = np.array([len(one.parts) for one in at], np.int64)
        self.proved: Counts = np.array([len(one.parts) if one.name in traced else 0 for one in at], np.int64)

    def passed(self) -> None:
        """A forward has been started."""
        if self._recorded:
            self._expected[self.in_graph] += self._each[self.in_graph]

    def need(self, number: int) -> None:
        """A step needs a location that Python reaches."""
        self._expected[number] += self._each[number]

    def done(self) -> Counts:
        """What each location has done so far, launches and calls of functions; waits for the device."""
        seen: Counts = self._seen.cpu().numpy()[: len(self._at)].astype(np.int64)
        return seen + self.called

    def rebase(self) -> None:
        """Count from here on."""
        self._expected = self.done()

    def off(self, seen: Any, *, sampled: bool) -> tuple[At, bool] | None:
        """The first location of an axis whose launches so far, in ``seen``, are not those due, and whether they are
        more; where there is one, all count from here on."""
        found = seen[: len(self._at)] + self.called
        off = (found != self._expected) & (self._sampled == sampled)
        if not off.any():
            return None
        number = int(off.argmax())
        more = bool(found[number] > self._expected[number])
        self.rebase()
        return self._at[number], more

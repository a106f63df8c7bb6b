"""The row table of one axis, tokens or requests, as each step writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtaps.runtime.block import Note
from vtaps.runtime.fills import Fill
from vtaps.runtime.gates import Gates
from vtaps.runtime.kernels import LIVE, Board, LocationProgram
from vtaps.runtime.marks import Upload
from vtaps.runtime.rings import Ring


@dataclass
class Axis:
    """The board of all locations whose tensors have a row a token, or a row a request.

    ``parts``: what a location does, in order, where that is more than its one launch: launches, and what Python does
    in between.  ``upload`` (None: the board's table is ``host``) brings the table to the device.
    """

    board: Board
    host: Any
    columns: dict[tuple[str, str], int]
    rings: dict[str, Ring]
    locations: dict[str, LocationProgram] = field(default_factory=dict)
    parts: dict[str, tuple[LocationProgram | Note, ...]] = field(default_factory=dict)
    upload: Upload | None = None
    gates: Gates = field(default_factory=lambda: Gates({}))
    dirty: int = 0

    def write(self, edits: Sequence[Fill], reads: Sequence[tuple[Fill, int]]) -> None:
        """Make the table that of a step: its edits, and its reads with the first slot of each."""
        host, last = self.host, 0
        host[: self.dirty] = 0
        for fill in edits:
            host[fill.rows, self.gates.written(fill.name)] = fill.points
            if fill.slots is not None:
                host[fill.rows, self.columns["slot", fill.name]] = fill.slots
            host[fill.rows, 0] = LIVE
            last = max(last, int(fill.rows[-1]) + 1)
        for fill, start in reads:
            host[fill.rows, self.columns["read", fill.name]] = np.arange(start + 1, start + 1 + len(fill.rows))
            host[fill.rows, 0] = LIVE
            last = max(last, int(fill.rows[-1]) + 1)
        self.gates.write(host, edits, [fill for fill, _ in reads])
        self._upload(max(last, self.dirty))
        self.dirty = last

    def move(self, reads: Sequence[tuple[Fill, int]]) -> None:
        """The same rows as in the last step, with other slots."""
        for fill, start in reads:
            column = self.columns["read", fill.name]
            if len(fill.rows) == 1:
                self.host[fill.rows[0], column] = start + 1
            else:
                self.host[fill.rows, column] = np.arange(start + 1, start + 1 + len(fill.rows))
        if reads:
            self._upload(self.dirty)

    def clear(self) -> None:
        if self.dirty:
            self.host[: self.dirty] = 0
            self._upload(self.dirty)
            self.dirty = 0

    def _upload(self, count: int) -> None:
        if self.upload is not None and count:
            self.upload.send(count)

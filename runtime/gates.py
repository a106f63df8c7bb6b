"""Gates of one worker: which columns of the row table they and their edits use, and what request gates decided.

A gate is served as a use of an edit that changes nothing (its points are its bounds) and as a read of three numbers a
row.  Its launch says for every row what the edits that it gates do there.  A request gate's scores are folded after
the forward that computed them, into a seat of the request's own, and told to the rows of later steps before their
forwards: on the device, in the order of the stream, so that the host never waits for a decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.block import Note
from vtaps.runtime.fills import Fill
from vtaps.runtime.kernels import GATE, LIVE, Board, Statement
from vtaps.runtime.program import GateEntry, PointEdit, Program
from vtaps.runtime.rings import Ring

Reduce = Literal["max", "mean", "last"]
REDUCE: Final[Mapping[str, int]] = {"max": 0, "mean": 1, "last": 2}
SEATS: Final = 64
Table = npt.NDArray[Any]


@dataclass
class Seats:
    """float64 ``[n, 3]`` of one request gate: what its requests' scores come to so far, how many they were, and whether
    that passes.  It grows."""

    memory: Tensor
    reduce: Reduce

    def hold(self, count: int) -> None:
        have = len(self.memory)
        if count > have:
            more = torch.zeros((max(count, 2 * have) - have, 3), dtype=torch.float64, device=self.memory.device)
            self.memory = torch.cat([self.memory, more])


@dataclass
class GateTables:
    """One gate's share of a board."""

    descriptor: int
    bounds: Tensor
    index: Tensor
    vectors: Tensor
    wiring: Tensor
    seats: Seats | None = None

    def point(self, board: Board, ring: Ring) -> None:
        """Let the launches write into the ring's memory."""
        ((_, memory),) = ring.groups
        board.set_gate(self.descriptor, self.bounds, self.index, self.vectors, self.wiring, memory)


@dataclass
class Gates:
    """The gates of an axis.  ``columns`` are those of its row table: an edit that is gated has ``source``, which the
    host fills, and ``edit``, which its statements look at; a request gate has ``seat`` and ``fold``."""

    columns: Mapping[tuple[str, str], int]
    when: Mapping[str, str] = field(default_factory=dict)
    tables: dict[str, GateTables] = field(default_factory=dict)

    def add(self, name: str, row: int, entry: GateEntry, tables: Sequence[Tensor], board: Board, ring: Ring) -> None:
        """Wire gate ``name``, descriptor ``row``; ``tables``: bounds, index, vectors."""
        bounds, index, vectors = tables
        made = GateTables(row, bounds, index, vectors, self.wiring(name, entry.cosine, bounds.device))
        if entry.reduce is not None:
            seats = torch.zeros((SEATS, 3), dtype=torch.float64, device=bounds.device)
            made.seats = Seats(seats, entry.reduce)
        made.point(board, ring)
        self.tables[name] = made

    @staticmethod
    def more_columns(program: Program, columns: dict[tuple[str, str], int]) -> dict[str, str]:
        """Number the columns that gates need beside those of edits and reads; returns edit → its gate."""
        when = {}
        for kind, name in list(columns):
            entry = program.edits.get(name) if kind == "edit" else None
            if entry is None:
                continue
            if entry.when is not None:
                when[name] = entry.when
                columns["source", name] = len(columns) + 1
            if entry.verb == "gate":
                # Its scores are kept too: no statement of its own does that.
                columns["read", name] = len(columns) + 1
                if program.gates[name].reduce is not None:
                    columns["seat", name] = len(columns) + 1
                    columns["fold", name] = len(columns) + 1
        return when

    def written(self, edit: str) -> int:
        """The column that the host writes for an edit; of one with a gate, its statements look at another."""
        return self.columns["source" if edit in self.when else "edit", edit]

    def wiring(self, name: str, cosine: bool, device: torch.device) -> Tensor:
        """What a row gate's launch is told of the columns; a request gate's writes none."""
        pairs = [] if ("seat", name) in self.columns else self._pairs(name)
        words = [self.columns["read", name], int(cosine), len(pairs), *(c for pair in pairs for c in pair)]
        return torch.tensor(words, dtype=torch.int32, device=device)

    def _pairs(self, name: str) -> list[tuple[int, int]]:
        return [(self.columns["source", e], self.columns["edit", e]) for e, gate in self.when.items() if gate == name]

    def adopt(self, other: Gates) -> None:
        self.columns, self.when, self.tables = other.columns, other.when, other.tables

    # -- before a step's forward

    def write(self, host: Table, edits: Iterable[Fill], reads: Iterable[Fill]) -> None:
        """The seats of the rows that request gates gate, and how many scores each request's last one closes."""
        for fill in edits:
            gate = self.when.get(fill.name, "")
            if (column := self.columns.get(("seat", gate))) is not None:
                seats = [live.seats.get(gate, 0) for live in fill.lives]
                host[fill.rows, column] = np.repeat(np.array(seats, np.int32), np.diff(fill.bounds))
        for fill in reads:
            if (column := self.columns.get(("fold", fill.name))) is None:
                continue
            last = fill.rows[fill.bounds[1:] - 1]
            host[last, column] = 2 * np.diff(fill.bounds) + (fill.before == 0)
            seats = [live.seats[fill.name] for live in fill.lives]
            host[last, self.columns["seat", fill.name]] = seats
            held = self.tables[fill.name].seats
            assert held is not None, "a gate with a column of seats has seats"
            held.hold(max(seats))

    def tell(self, board: Board, count: int, edits: Sequence[Fill]) -> None:
        """Let the edits of the first ``count`` rows act where their requests' gates have decided so."""
        for name in dict.fromkeys(self.when.get(fill.name, "") for fill in edits):
            gate = self.tables.get(name)
            if gate is not None and gate.seats is not None:
                for source, effective in self._pairs(name):
                    columns = (source, effective, self.columns["seat", name])
                    _tell(board.rows[:count], gate.seats.memory, columns)

    # -- after it

    def fold(self, board: Board, count: int, reads: Sequence[Fill], rings: Mapping[str, Ring]) -> None:
        """Add the scores of the step's first ``count`` rows to what their requests have, and decide."""
        for fill in reads:
            gate = self.tables.get(fill.name)
            if gate is not None and gate.seats is not None:
                ((_, memory),) = rings[fill.name].groups
                kinds = ("fold", "seat", "edit", "read")
                columns = tuple(self.columns[kind, fill.name] for kind in kinds)
                _fold(board.rows[:count], gate.seats, memory, gate.bounds, columns)


def _tell(table: Tensor, seats: Tensor, columns: tuple[int, int, int]) -> None:
    """``table``: int32 ``[rows, columns]``; ``columns``: source, effective, seat."""
    if table.is_cuda:
        from vtaps.runtime.gates_triton import tell

        tell(table, seats, columns)
        return
    source, effective, seat = columns
    passed = (table[:, seat] > 0) & (seats[(table[:, seat].long() - 1).clamp(min=0), 2] != 0)
    table[:, effective] = torch.where(table[:, 0] == LIVE, table[:, source] * passed, 0)


def _fold(table: Tensor, seats: Seats, memory: Tensor, bounds: Tensor, columns: tuple[int, ...]) -> None:
    """``columns``: fold, seat, point, slot."""
    if table.is_cuda:
        from vtaps.runtime.gates_triton import fold

        fold(table, seats.memory, memory, bounds, columns, REDUCE[seats.reduce])
        return
    fold_at, seat_at, point_at, slot_at = columns
    for row in table[:, fold_at].nonzero().squeeze(1).tolist():
        count, fresh = divmod(int(table[row, fold_at]), 2)
        last, seat, point = (int(table[row, c]) for c in (slot_at, seat_at, point_at))
        scores = memory[last - count : last, 0, 0].double()
        before, many = (0.0, 0.0) if fresh else seats.memory[seat - 1, :2].tolist()
        if seats.reduce == "mean":
            total = before + float(scores.sum())
            value = np.float32(total / (many + count))
        else:
            total = float(scores[-1])
            if seats.reduce == "max":
                # torch's maximum is NaN where one of them is.
                total = float(scores.max() if fresh else torch.maximum(scores.max(), torch.tensor(before).double()))
            value = np.float32(total)
        low, high = bounds[:, point].tolist()
        passed = float(low < value < high)
        seats.memory[seat - 1] = torch.tensor([total, many + count, passed], dtype=torch.float64)
        memory[last - 1, 0, 1:] = torch.tensor([passed, float(value)])


def bounds_of(uses: Mapping[PointEdit, int]) -> tuple[Table, Table, tuple[str, ...]]:
    """Of a gate's uses: bounds float32 ``[2, uses + 1]``, which vector each has, int32 ``[uses + 1]``, and those."""
    bounds = np.empty((2, len(uses) + 1), np.float32)
    bounds[0], bounds[1] = -np.inf, np.inf
    index = np.full(len(uses) + 1, -1, np.int32)
    used: dict[str, int] = {}
    for use, number in uses.items():
        if use.low is not None:
            bounds[0, number] = use.low
        if use.high is not None:
            bounds[1, number] = use.high
        index[number] = used.setdefault(str(use.vector), len(used))
    return bounds, index, tuple(used)


def gated_in(note: Note, before: Sequence[Statement]) -> bool:
    """Whether a gate stands in the same launch before an edit that looks at one: a launch reads its columns first."""
    return note.when is not None and any(s.code == GATE for s in before)

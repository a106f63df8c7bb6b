"""What the taps look at in every step, in memory that never moves: row tables, vectors, slots.

A location's statements are fixed when the block is put into the model; which rows they act on, with which coefficient
and vector, and where reads are written, are numbers in these tables.  They are filled before a step's forward and are
all zero, which selects nothing, outside of one.  Reads are written into the slots of a ring, from which they leave
while later steps write further on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtaps.runtime.axis import Axis
from vtaps.runtime.block import Block, Location, Note
from vtaps.runtime.fills import StepPlan
from vtaps.runtime.gates import Gates, bounds_of, gated_in
from vtaps.runtime.kernels import (
    ADD,
    ADD_KEEP,
    AFFINE,
    CLAMP,
    FEATURE,
    GATE,
    GATE_WIDTH,
    KEEP,
    KEEP32,
    PROJECT_OUT,
    PROOF,
    PUT,
    SCALE,
    SET,
    WORDS,
    ZERO,
    Board,
    LocationProgram,
    Statement,
    sentinel,
)  # fmt: skip
from vtaps.runtime.live import TableError
from vtaps.runtime.marks import Upload
from vtaps.runtime.memory import Limits, TapMemoryError, ring_key, slots
from vtaps.runtime.patches import memories
from vtaps.runtime.program import USES_VECTOR, LockError, Program, SiteEntry
from vtaps.runtime.rings import Ring
from vtaps.runtime.sae import features_of
from vtaps.runtime.vector_tables import vectors_at
from vtaps.spec.behind import SAMPLES
from vtaps.spec.slots import GATHERED_BYTES, in_model_dtype, slot_count

CODES = {"add": ADD, "scale": SCALE, "zero": ZERO, "set": SET, "project_out": PROJECT_OUT, "clamp": CLAMP,
         "affine": AFFINE, "feature": FEATURE, "put": PUT}  # fmt: skip


class Boards:
    """Everything of one worker: ``tokens`` and ``requests`` are the two axes; ``order`` numbers the locations.

    Raises LockError for a vector that cannot be loaded, a statement that the block lacks, or slots that take more than
    ``engine.tap_memory``.
    """

    def __init__(
        self,
        block: Block,
        program: Program,
        limits: Limits,
        dtype: torch.dtype,
        device: torch.device,
        notes: Callable[[Location], tuple[Note, ...]],
    ) -> None:
        self.program, self.dtype, self.device = program, dtype, device
        self.order = {name: number for number, name in enumerate(block.locations)}
        self.notes = {name: notes(location) for name, location in block.locations.items()}
        for name in block.locations:
            if name not in program.sites:
                raise LockError(f"sites.{name}", "the block has a location that the lock does not know")
        self._check_statements()
        self.seen = torch.zeros(max(len(self.order), 1), dtype=torch.int32, device=device)
        try:
            self._slots = slots(program, limits, str(dtype).removeprefix("torch."))
        except TapMemoryError as error:
            raise LockError("engine.tap_memory", str(error)) from error
        self.patches = memories(program, dtype, device)
        self._vectored: list[tuple[Note, SiteEntry, tuple[str, ...], Tensor]] = []
        self.tokens = self._axis(False, limits.rows)
        self.requests = self._axis(True, limits.requests)

    def _check_statements(self) -> None:
        """Every use of a site that the lock speaks of is a statement of the block."""
        for section, table in (("edits", self.program.edits), ("reads", self.program.reads)):
            for name, entry in table.items():
                for site in entry.sites:
                    if site not in self.notes:
                        raise LockError(f"{section}.{name}", f"the block has no location {site}")
                    if name not in (n.name for n in self.notes[site]):
                        raise LockError(f"{section}.{name}", f"the block says nothing of it at {site}")

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return self.tokens, self.requests

    @property
    def rings(self) -> list[Ring]:
        return [ring for axis in self.axes for ring in axis.rings.values()]

    @property
    def bytes(self) -> int:
        """Device memory of all tables, vectors and slots."""
        tensors = {t.data_ptr(): t for axis in self.axes for t in axis.board.tensors.values()}
        tables = [t for axis in self.axes for t in (axis.board.rows, axis.board.descriptors)]
        return sum(t.numel() * t.element_size() for t in (*tensors.values(), *tables, self.seen))

    def _axis(self, sampled: bool, rows: int) -> Axis:
        program = self.program
        names = [n for n in self.order if program.sites[n].sampled == sampled]
        mine = {name: self.notes[name] for name in names}
        columns: dict[tuple[str, str], int] = {}
        for notes in mine.values():
            for note in notes:
                columns.setdefault(("edit" if note.verb else "read", note.name), len(columns) + 1)
                if note.verb == "put":
                    columns.setdefault(("slot", note.name), len(columns) + 1)
        when = Gates.more_columns(program, columns)
        if not names:
            rows = 0
        host = np.zeros((rows, 1 + len(columns)), np.int32)
        on_cpu = self.device.type == "cpu"
        table = torch.from_numpy(host) if on_cpu else torch.zeros(host.shape, dtype=torch.int32, device=self.device)
        count = sum(len(notes) for notes in mine.values())
        board = Board(table, torch.zeros((max(count, 1), WORDS), dtype=torch.int64, device=self.device), self.seen)
        rings = {
            name: self._ring(name, [s for s in mine if any(n.name == name and n.kept for n in mine[s])], sampled)
            for kind, name in columns
            if kind == "read"
        }
        upload = None if on_cpu else Upload(host, table)
        axis = Axis(board, host, columns, rings, upload=upload, gates=Gates(columns, when))
        row = 0
        for name, notes in mine.items():
            site = program.sites[name]
            statements: list[Statement] = []
            parts: list[list[Statement] | Note] = []
            for note in notes:
                if note.python:
                    parts.append(note)
                    continue
                if note.verb == "gate":
                    statements.append(self._gate(axis, row, site, note))
                elif note.verb:
                    statements.append(self._edit(board, row, site, note, columns["edit", note.name]))
                else:
                    ring = rings[note.name]
                    memory, index = ring.place(name)
                    board.set_read(row, memory, index)
                    code = KEEP if self._as_model(note.name) else KEEP32
                    statements.append(Statement(code, columns["read", note.name], row, False))
                if not parts or isinstance(parts[-1], Note) or gated_in(note, parts[-1]):
                    parts.append([])
                if isinstance(last := parts[-1], list):
                    last.append(statements[-1])
                row += 1
            first = 0 if site.columns is None else site.columns[0]
            number, width = self.order[name], site.width
            axis.locations[name] = LocationProgram(number, first, width, tuple(statements))
            if len(parts) > 1 or any(isinstance(part, Note) for part in parts):
                axis.parts[name] = tuple(
                    part if isinstance(part, Note) else LocationProgram(number, first, width, tuple(part))
                    for part in parts
                )
        return axis

    def _gate(self, axis: Axis, row: int, site: SiteEntry, note: Note) -> Statement:
        bounds, index, used = bounds_of(self.program.uses_of[note.name])
        none = np.zeros((1, site.width), np.float32)
        vectors = self._table(note, site, used) if used else self._put(none)
        tables = [self._put(bounds), self._put(index), vectors]
        axis.gates.add(note.name, row, self.program.gates[note.name], tables, axis.board, axis.rings[note.name])
        return Statement(GATE, axis.columns["edit", note.name], row)

    def _edit(self, board: Board, row: int, site: SiteEntry, note: Note, column: int) -> Statement:
        program, edit = self.program, self.program.edits[note.name]
        uses = program.uses_of[note.name]
        order = program.vectors_of[note.name] if edit.verb in USES_VECTOR or edit.sae is not None else ()
        coefficients = np.zeros(len(uses) + 1, np.float32)
        index = np.full(len(uses) + 1, -1, np.int32)
        bounds = np.zeros((2, len(uses) + 1), np.float32)
        used: dict[str, int] = {}
        for use, number in uses.items():
            coefficients[number] = 1.0 if use.coefficient is None else use.coefficient
            bounds[:, number] = (-np.inf if use.low is None else use.low, np.inf if use.high is None else use.high)
            if site.name in use.sites:
                index[number] = used.setdefault(use.operand, len(used)) if use.operand in order and use.operand else 0
        vectors = up = bias = None
        if edit.value and (index >= 0).any():
            vectors = self._put(np.ones((1, site.width), np.float32))
        elif edit.sae is not None and used:
            found = features_of(program, note.name, edit, site, tuple(used))
            vectors, up = (self._put(table) for table in (found.encoders, found.decoders))
            bounds[:, index >= 0] = found.bounds[:, index[index >= 0]]
            if edit.sae[1] == "by":
                vectors, up = up, None
        elif used or (edit.vectors and (index >= 0).any()):
            vectors = self._table(note, site, tuple(str(name) for name in used))
        mask = None
        if note.columns is not None:
            chosen = np.zeros(site.whole, np.uint8)
            for a, b in note.columns:
                chosen[a:b] = 1
            chosen = site.own(chosen)
            mask = self._put(chosen)
        if edit.verb == "put":
            memory, part = self.patches[note.name].place(site.name)
            board.set_put(row, memory, part, self._put(index), mask)
            return Statement(PUT, column, row, mask is not None)
        code = ADD_KEEP if note.keep_norm else ADD if edit.sae is not None and edit.sae[1] == "by" else CODES[edit.verb]
        limits = self._put(bounds) if code in (CLAMP, FEATURE) else None
        rank = max(1, len(edit.vectors))
        if edit.matrices and (index >= 0).any():
            down, ups, biases = self.program.load_affine(edit.matrices, site)
            rank = len(down)
            if mask is not None:
                down, ups = down * (chosen != 0), ups * (chosen != 0)
            vectors, up, bias = self._put(down), self._put(ups), self._put(biases)
        board.set_edit(row, self._put(coefficients), self._put(index), vectors, mask, limits, up, bias)
        return Statement(code, column, row, mask is not None, rank)

    def _table(self, note: Note, site: SiteEntry, names: tuple[str, ...]) -> Tensor:
        """float32 ``[n, width]``: the vectors that an edit or a gate looks at, which :meth:`renew` knows."""
        table = self._put(vectors_at(self.program, note, site, names))
        self._vectored.append((note, site, names, table))
        return table

    def _put(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _as_model(self, name: str) -> bool:
        read = self.program.reads[name]
        return in_model_dtype(read.kind, read.store.dtype)

    def _ring(self, name: str, sites: Sequence[str], sampled: bool) -> Ring:
        kind, key = self.program.reads[name].kind, ring_key(name, sampled)
        by_width: dict[int, list[str]] = {}
        for site in sites:
            by_width.setdefault(self.program.sites[site].width, []).append(site)
        kept = self.dtype if self._as_model(name) else torch.float32
        if sites == [SAMPLES]:
            kept = torch.int32
        if kind == "gate":
            by_width = {GATE_WIDTH: list(sites)}
        count = self._slots[key]
        if kind == "python":
            # How wide and of what kind its slots are is known once the function has been called: see `keep`.
            return Ring(key, name, kind, count, [])
        groups = [
            (tuple(some), torch.zeros((count, len(some), width), dtype=kept, device=self.device))
            for width, some in by_width.items()
        ]
        return Ring(key, name, kind, count, groups)

    def grow(self, ring: Ring, count: int) -> None:
        """Make ``ring`` another memory that takes ``count`` rows in one step, all of its slots free.

        Raises TableError on the taps engine.
        """
        if self.program.mode != "eager":
            raise TableError(
                f"read {ring.read}: a step selects {count} rows and there are {ring.slots} slots; lower "
                "max_num_batched_tokens or run the requests that the lock was made for"
            )
        # Where nothing is in the slots yet, what a row takes is not known: no more of them than needed.
        ring.slots, ring.head = slot_count(count, ring.row_bytes or GATHERED_BYTES), 0
        ring.groups = [
            (sites, torch.zeros((ring.slots, *memory.shape[1:]), dtype=memory.dtype, device=self.device))
            for sites, memory in ring.groups
        ]
        for axis in self.axes:
            if ring in axis.rings.values() and ring.read in axis.gates.tables:
                axis.gates.tables[ring.read].point(axis.board, ring)
            for number, program in axis.locations.items() if ring in axis.rings.values() else ():
                launched = (note for note in self.notes[number] if not note.python)
                for note, statement in zip(launched, program.statements, strict=True):
                    if note.kind and note.name == ring.read:
                        axis.board.set_read(statement.descriptor, *ring.place(number))

    def keep(self, ring: Ring, site: str, start: int, rows: Tensor) -> None:
        """Write what a function gave for the rows of a step, ``[n, …]``, into the slots ``start …`` of ``site``; the
        first call makes the memory."""
        memory = next((m for sites, m in ring.groups if sites == (site,)), None)
        if memory is None:
            allowed, taken = self.program.tap_memory, ring.slots * (ring.row_bytes + rows[:1].nbytes)
            if self.program.mode != "eager" and allowed is not None and taken > allowed:
                raise TableError(
                    f"read {ring.read}: {ring.slots} slots of what its function gives take {taken} bytes, and "
                    f"engine.tap_memory allows {allowed}; lower max_num_seqs or max_num_batched_tokens"
                )
            memory = torch.zeros((ring.slots, 1, *rows.shape[1:]), dtype=rows.dtype, device=self.device)
            ring.add((site,), memory)
        memory[start : start + len(rows), 0] = rows

    def adopt(self, other: Boards) -> None:
        """Take the tables, vectors and slots of ``other``, behind the addresses of this one: what was compiled and
        captured goes on with them.  Raises LockError where ``other`` is not of the same launches."""
        for mine, its in zip(self.axes, other.axes, strict=True):
            if mine.locations != its.locations or mine.host.shape != its.host.shape:
                raise LockError("block.structure", "its operations are numbered otherwise; start another engine")
        for mine, its in zip(self.axes, other.axes, strict=True):
            mine.board.adopt(its.board)
            mine.columns, mine.rings = its.columns, its.rings
            mine.gates.adopt(its.gates)
        self.program, self.notes, self._slots = other.program, other.notes, other._slots
        self.patches, self._vectored = other.patches, other._vectored

    def renew(self, vector: str) -> None:
        """Put the numbers that ``vector`` has now where edits look for it.  Raises LockError."""
        for note, site, names, table in self._vectored:
            if vector in (names or self.program.edits[note.name].vectors):
                table.copy_(torch.from_numpy(vectors_at(self.program, note, site, names)))

    def clear(self) -> None:
        """Select nothing: dummy runs, and the lens, see a model without a block."""
        for axis in self.axes:
            axis.clear()

    def let(self, edit: str, sampled: bool) -> Tensor:
        """What the row table says of an edit after its gate: int32 ``[rows]``, 0 where it does not act."""
        axis = self.axes[sampled]
        return axis.board.rows[:, axis.columns["edit", edit]]

    def find(self, name: str) -> tuple[Board, LocationProgram, tuple[LocationProgram | Note, ...]]:
        """The location's board, all that is launched there, and its parts in order."""
        for axis in self.axes:
            if name in axis.locations:
                program = axis.locations[name]
                return axis.board, program, axis.parts.get(name, (program,))
        raise KeyError(name)

    def prove(self, count: int) -> None:
        """Select ``count`` rows for the proof: every edit writes its location's sentinel, every read keeps it."""
        axis = self.tokens
        axis.host[:count, 0] = PROOF
        for (kind, name), column in axis.columns.items():
            if kind == "read":
                slots = min(count, axis.rings[name].slots)
                axis.host[:slots, column] = np.arange(1, slots + 1)
        # Of a larger pass before it nothing is selected any more.
        axis.host[count : axis.dirty] = 0
        axis._upload(max(count, axis.dirty))
        axis.dirty = count

    def unproved(self, count: int) -> list[str]:
        """The locations whose reads do not hold their sentinel after a pass over ``count`` proof rows."""
        wrong = []
        for ring in self.tokens.rings.values():
            for sites, memory in ring.groups:
                slots = min(count, ring.slots)
                want = torch.tensor([sentinel(self.order[s]) for s in sites], dtype=memory.dtype, device=self.device)
                right = (memory[:slots] == want[None, :, None]).flatten(2).all(-1).all(0)
                wrong += [site for site, ok in zip(sites, right.tolist(), strict=True) if not ok]
                memory.zero_()
        return wrong

    def active(self, plan: StepPlan) -> Mapping[str, None]:
        """The locations at which a plan has something to do."""
        found: dict[str, None] = {}
        for fill in (*plan.reads, *plan.sampled_reads):
            found.update(dict.fromkeys(fill.sites))
        for fill in (*plan.edits, *plan.sampled_edits):
            uses = {number: use.sites for use, number in self.program.uses_of[fill.name].items()}
            for number in np.unique(fill.points) if fill.points is not None else ():
                found.update(dict.fromkeys(uses[int(number)]))
        return found

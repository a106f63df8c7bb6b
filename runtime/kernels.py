"""What happens at one tapped location inside a captured forward: one launch, all of its edits and reads, in order.

A CUDA graph replays addresses, so whatever varies by request is data at fixed ones: the :class:`Board`.  The host fills
its row table before the step; each location's launch looks there for what to do with each row.  Two implementations
agree to the bit: :func:`launch` (Triton, :mod:`vtaps.runtime.kernels_triton`) and :func:`reference` (torch).

The arithmetic is that of :mod:`vtaps.runtime.block`: in float32, coefficient · vector rounded before the sum, and each
edit rounded to the model's dtype before the next statement sees it.  Rows and columns that no statement selects keep
their bits, and the vectors of idle points are never an operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

import torch
from torch import Tensor

Code = Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
"""What a statement does, with x the row's hidden state, r its residual (absent: 0), c the point's coefficient,
s = x + r in float32, and u orthonormal vectors:

| code | | hidden | residual |
|---|---|---|---|
| KEEP | memory = x + r in the model's dtype | | |
| KEEP32 | memory = x + r in float32 | | |
| ADD | | x + c · vector | |
| SCALE | | (x + r) · c | 0 |
| ZERO | | 0 | 0 |
| SET | | c · vector | 0 |
| ADD_KEEP | | y · ‖s‖ / ‖y‖, y = s + c · vector | 0 |
| PROJECT_OUT | | s − Σ c · (s · u) · u | 0 |
| CLAMP | | s + (clip(s · u, low, high) − s · u) · u; left alone within the bounds | 0 |
| AFFINE | | s + Σ c · (s · a + bias) · b, over the pairs of vectors a and b | 0 |
| FEATURE | | s + (c − f) · b, f = s · a + bias where that is above the threshold, else 0; left alone where f is c | 0 |
| GATE | memory = score, passed, score in float32 | | |
| PUT | | the row of a patch memory, to the bit | 0 |

From ADD_KEEP on all but PUT sum over a row: lengths and products in float32, over the columns of the statement's mask.

A gate's score is s · vector, or that over ‖s‖ (0 where that is 0); a row passes where low < score < high.  For each of
the edits that it gates the launch writes the column that their statements look at, of every row with a state: what the
host wrote to another column where the row passes, else 0.
"""

KEEP: Final[Code] = 0
KEEP32: Final[Code] = 1
ADD: Final[Code] = 2
SCALE: Final[Code] = 3
ZERO: Final[Code] = 4
SET: Final[Code] = 5
ADD_KEEP: Final[Code] = 6
PROJECT_OUT: Final[Code] = 7
CLAMP: Final[Code] = 8
AFFINE: Final[Code] = 9
PUT: Final[Code] = 10
GATE: Final[Code] = 11
FEATURE: Final[Code] = 12

DIRECTIONS: Final = 16
"""PROJECT_OUT takes at most as many vectors; the language's schema says so too."""

GATE_WIDTH: Final = 3
"""float32 numbers that a gate keeps of a row: the score, whether it passed, and what was decided on."""

WORDS: Final = 8
"""int64 words of a descriptor."""

DESCRIPTORS: Final = 1 << 20
"""More descriptors than a board has."""

LIVE: Final = 1
PROOF: Final = 2
"""Column 0 of the row table: 0 for a row with nothing to do at any location, LIVE, or PROOF.  A proof row becomes the
location's :func:`sentinel` instead of being edited, which shows from outside that the launch is in the graph."""

SENTINELS: Final = 128
"""Sentinels are 1 … SENTINELS: exact in bfloat16."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT: Final = 16
"""The kernel promises the compiler aligned tables, so that it loads 16 bytes at a time."""


@dataclass(frozen=True)
class Statement:
    """One edit or read of a location.

    ``column`` (≥ 1) of the row table drives it; ``descriptor`` is its row of :attr:`Board.descriptors`; ``masked``: an
    edit of only those columns where the descriptor's mask is not 0; ``rank``: how many vectors PROJECT_OUT
    takes, or pairs AFFINE.  PUT has the next column too.
    """

    code: Code
    column: int
    descriptor: int
    masked: bool = False
    rank: int = 1

    def __post_init__(self) -> None:
        if self.column < 1 or not 0 <= self.descriptor < DESCRIPTORS or self.rank < 1:
            raise ValueError(f"column {self.column}, descriptor {self.descriptor}, {self.rank} vectors")

    @property
    def word(self) -> int:
        """Column and descriptor as one argument of the kernel.

        Triton compiles anew for integers that are 1 or divisible by 16, in tuples unconditionally: this is neither.
        """
        return (self.column * DESCRIPTORS + self.descriptor) * 2 + 1


@dataclass(frozen=True)
class LocationProgram:
    """All that one location does.

    ``number`` indexes :attr:`Board.seen`; the location is ``[first, first + width)`` of its tensor's last axis.
    """

    number: int
    first: int
    width: int
    statements: tuple[Statement, ...]

    @cached_property
    def edits(self) -> bool:
        """Whether it may write the hidden state."""
        return any(s.code >= ADD and s.code != GATE for s in self.statements)

    @cached_property
    def replaces(self) -> bool:
        """Whether it may write the residual too."""
        return any(s.code > ADD and s.code != GATE for s in self.statements)

    @cached_property
    def words(self) -> tuple[int, ...]:
        return tuple(s.word for s in self.statements)

    @cached_property
    def codes(self) -> tuple[Code, ...]:
        return tuple(s.code for s in self.statements)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(s.rank for s in self.statements)

    @cached_property
    def sums(self) -> bool:
        """Whether a statement looks at a row as a whole."""
        return any(s.code > SET and s.code != PUT for s in self.statements)

    @cached_property
    def started(self) -> dict[tuple[Any, ...], Any]:
        """The compiled kernels that have served it, by what was compiled in of their operands."""
        return {}

    @cached_property
    def masks(self) -> tuple[bool, ...]:
        return tuple(s.masked for s in self.statements)


def sentinel(number: int) -> float:
    """What location ``number`` writes to proof rows: 1 … SENTINELS."""
    return float(number % SENTINELS + 1)


@dataclass
class Board:
    """What the launches of one worker read, all on the model's device.

    ``rows``: int32 ``[max_rows, 1 + columns]``.  Column 0 is the row's state; the others are 0 where their statement
    has nothing to do, else the 1-based point of an edit or the 1-based slot of a read.  The column after that of PUT
    is the 1-based slot that it takes the row from.

    ``descriptors``: int64 ``[n, WORDS]``; addresses are data, so that a table may move without a new graph.

    - an edit: address of the coefficients, float32 ``[points + 1]``; of the vector index, int32 ``[points + 1]`` (-1
      where the point does not edit at this location; entry 0 is never used); of the vectors, float32 ``[n, width]`` (of
      PROJECT_OUT ``[n · rank, width]``), or 0; of the mask, uint8 ``[width]``, or 0; of CLAMP's bounds, or FEATURE's
      biases and thresholds, float32 ``[2, points + 1]``, or 0; how long each of them is; of b of AFFINE and FEATURE
      like the vectors, or 0; of AFFINE's bias, or 0;
    - a read: address of the memory; elements from slot to slot; elements from a slot's start to this location's part;
    - PUT: address of the memory; the vector index, as of an edit (0 where it acts); elements from slot to slot; the
      mask, or 0; elements from a slot's start to this location's part;
    - a gate: address of the bounds, float32 ``[2, points + 1]``; of the vector index and the vectors, as of an edit; of
      the wiring, int32: column of the slots, 1 for a cosine, how many edits it gates, and of each the column that the
      host writes and the one that its statements look at; of the memory, float32 ``[slots, 1, 3]``; points + 1.

    ``seen``: int32 ``[locations]``, the launches so far.

    ``tensors``: address → tensor, for all addresses in ``descriptors``.  It keeps them alive.
    """

    rows: Tensor
    descriptors: Tensor
    seen: Tensor
    tensors: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _named: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(
        cls, max_rows: int, columns: int, descriptors: int, locations: int, device: torch.device | str = "cpu"
    ) -> Board:
        """A board on which nothing is on; ``columns`` is without column 0."""
        return cls(
            rows=torch.zeros((max_rows, 1 + columns), dtype=torch.int32, device=device),
            descriptors=torch.zeros((descriptors, WORDS), dtype=torch.int64, device=device),
            seen=torch.zeros(locations, dtype=torch.int32, device=device),
        )

    def set_edit(
        self,
        row: int,
        coefficients: Tensor,
        vector_index: Tensor,
        vectors: Tensor | None = None,
        mask: Tensor | None = None,
        bounds: Tensor | None = None,
        up: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Point descriptor ``row`` at the tables of an edit; shapes and dtypes as above.

        Indices and points are not compared with the tables' lengths, here or in a launch.  Raises ValueError for a
        tensor that the kernel could not read.
        """
        for name, tensor, dtype, axes in (
            ("coefficients", coefficients, torch.float32, 1),
            ("vector_index", vector_index, torch.int32, 1),
            ("vectors", vectors, torch.float32, 2),
            ("mask", mask, torch.uint8, 1),
            ("bounds", bounds, torch.float32, 2),
            ("up", up, torch.float32, 2),
            ("bias", bias, torch.float32, 1),
        ):
            if tensor is not None:
                self._check(name, tensor, axes)
                if tensor.dtype != dtype:
                    raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
        if coefficients.shape != vector_index.shape:
            raise ValueError(f"{coefficients.shape[0]} coefficients and {vector_index.shape[0]} vector indices")
        if vectors is not None and mask is not None and vectors.shape[1] != mask.shape[0]:
            raise ValueError(f"the mask is {mask.shape[0]} wide and the vectors {vectors.shape[1]}")
        tables = (coefficients, vector_index, vectors, mask, bounds)
        words = [0 if t is None else t.data_ptr() for t in tables] + [0 if bounds is None else bounds.shape[1]]
        words += [0 if t is None else t.data_ptr() for t in (up, bias)]
        self._write(row, words, [t for t in (*tables, up, bias) if t is not None])

    def set_read(self, row: int, memory: Tensor, site: int) -> None:
        """Point descriptor ``row`` at part ``site`` of ``memory``, ``[slots, sites, width]``: in the model's dtype for
        KEEP, float32 for KEEP32.

        Slots are not compared with ``memory`` in a launch.  Raises ValueError for memory that the kernel could not
        write, IndexError for a site that it lacks.
        """
        self._check("memory", memory, 3)
        if not 0 <= site < memory.shape[1]:
            raise IndexError(f"site {site} of memory with {memory.shape[1]}")
        width = memory.shape[2]
        self._write(row, [memory.data_ptr(), memory.shape[1] * width, site * width], [memory])

    def set_gate(
        self, row: int, bounds: Tensor, vector_index: Tensor, vectors: Tensor, wiring: Tensor, memory: Tensor
    ) -> None:
        """Point descriptor ``row`` at the tables of a gate; shapes and dtypes as above.  Raises ValueError for a tensor
        that the kernel could not use."""
        tables = {
            "bounds": (bounds, 2), "vector_index": (vector_index, 1), "vectors": (vectors, 2), "wiring": (wiring, 1),
            "memory": (memory, 3),
        }  # fmt: skip
        for name, (tensor, axes) in tables.items():
            self._check(name, tensor, axes)
            if tensor.dtype != (torch.int32 if name in ("vector_index", "wiring") else torch.float32):
                raise ValueError(f"{name} is {tensor.dtype}")
        if memory.shape[1:] != (1, GATE_WIDTH):
            raise ValueError(f"the memory of a gate has shape {list(memory.shape)}")
        tensors = [bounds, vector_index, vectors, wiring, memory]
        self._write(row, [*(t.data_ptr() for t in tensors), bounds.shape[1]], tensors)

    def set_put(self, row: int, memory: Tensor, site: int, vector_index: Tensor, mask: Tensor | None = None) -> None:
        """Point descriptor ``row`` at part ``site`` of the patch memory ``[slots, sites, width]`` in the model's
        dtype; ``vector_index`` int32 ``[points + 1]`` and ``mask`` uint8 ``[width]`` as of :meth:`set_edit`.

        Slots are not compared with ``memory`` in a launch.  Raises ValueError for a tensor that the kernel could not
        read, IndexError for a site that the memory lacks.
        """
        self._check("memory", memory, 3)
        self._check("vector_index", vector_index, 1)
        if not 0 <= site < memory.shape[1]:
            raise IndexError(f"site {site} of memory with {memory.shape[1]}")
        width = memory.shape[2]
        if mask is not None:
            self._check("mask", mask, 1)
            if mask.shape[0] != width:
                raise ValueError(f"the mask is {mask.shape[0]} wide and the memory {width}")
        words = [memory.data_ptr(), vector_index.data_ptr(), memory.shape[1] * width]
        words += [0 if mask is None else mask.data_ptr(), site * width]
        self._write(row, words, [t for t in (memory, vector_index, mask) if t is not None])

    def adopt(self, other: Board) -> None:
        """Point the descriptors where those of ``other``, of as many, point, and keep alive what they name."""
        self.descriptors.copy_(other.descriptors)
        self.tensors, self._named = other.tensors, other._named

    def _check(self, name: str, tensor: Tensor, axes: int) -> None:
        if tensor.dim() != axes:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: {axes} axes were expected")
        if tensor.device != self.descriptors.device:
            raise ValueError(f"{name} is on {tensor.device} and the board on {self.descriptors.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} does not start at a multiple of {ALIGNMENT} bytes")

    def _write(self, row: int, words: list[int], tensors: list[Tensor]) -> None:
        # A descriptor that a running step still reads changes after it: the copy is on the step's stream.
        self.descriptors[row].copy_(torch.tensor(words + [0] * (WORDS - len(words)), dtype=torch.int64))
        before = self._named.get(row, ())
        self._named[row] = tuple(t.data_ptr() for t in tensors)
        self.tensors.update((t.data_ptr(), t) for t in tensors)
        for address in set(before).difference(*self._named.values()):
            del self.tensors[address]


def run(board: Board, program: LocationProgram, x: Tensor, residual: Tensor | None = None) -> None:
    """Do all of ``program`` to ``x`` and ``residual`` in place and count it in ``board.seen``.

    ``x``, ``residual``: ``[rows, ≥ first + width]``, float32, bfloat16 or float16, last axis contiguous.  A residual
    that *is* ``x`` (at a model's first layer one tensor plays both parts) counts as none.  Without rows nothing
    happens, not even the count.  Raises ValueError for tensors of another form, before anything is written.
    """
    (launch if x.is_cuda else reference)(board, program, x, residual)


def launch(board: Board, program: LocationProgram, x: Tensor, residual: Tensor | None = None) -> None:
    """:func:`run` as one Triton kernel: no allocation, no synchronisation, hence fit for capture in a CUDA graph.

    The first launch of a new shape of program (codes, width, dtype) compiles; do one before capture.
    """
    from vtaps.runtime.kernels_triton import start

    residual = _other(board, program, x, residual)
    if x.shape[0]:
        start(board, program, x, residual)


def reference(board: Board, program: LocationProgram, x: Tensor, residual: Tensor | None = None) -> None:
    """:func:`run` by torch, on any device; on CUDA it synchronises."""
    from vtaps.runtime import kernels_torch

    residual = _other(board, program, x, residual)
    count = x.shape[0]
    if not count:
        return
    board.seen[program.number].add_(1)
    states = board.rows[:count, 0]
    if not states.any():
        return
    cut = slice(program.first, program.first + program.width)
    hidden, rest = x[:, cut], None if residual is None else residual[:, cut]
    for statement in program.statements:
        values = board.rows[:count, statement.column]
        if statement.code == GATE:
            kernels_torch.gate(
                board, statement, hidden, rest, values.where(states == LIVE, 0), states, sentinel(program.number)
            )
        elif statement.code >= ADD:
            kernels_torch.edit(board, statement, hidden, rest, values.where(states == LIVE, 0))
        else:
            kernels_torch.read(
                board, statement, hidden, rest, values.where(states != 0, 0), states, sentinel(program.number)
            )
    proof = (states == PROOF).nonzero().squeeze(1)
    if program.edits:
        hidden.index_fill_(0, proof, sentinel(program.number))
    if program.replaces and rest is not None:
        rest.index_fill_(0, proof, 0.0)


def _other(board: Board, program: LocationProgram, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """The second half of the pair, after a look at both."""
    # Rows that share memory, as those of an expanded tensor: an edit of one would be one of all.
    shared = x.dim() == 2 and x.shape[0] > 1 and x.stride(0) < x.shape[1]
    if x.dim() != 2 or x.stride(1) != 1 or shared or x.dtype not in _DTYPES:
        raise ValueError(f"{x.dtype} {list(x.shape)} with strides {x.stride()}: no hidden state")
    if x.shape[1] < program.first + program.width or x.shape[0] > board.rows.shape[0]:
        raise ValueError(
            f"shape {list(x.shape)}: at most {board.rows.shape[0]} rows and at least "
            f"{program.first + program.width} columns were expected"
        )
    if residual is None or residual.data_ptr() == x.data_ptr():
        return None
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise ValueError(f"the residual, {residual.dtype} {list(residual.shape)}, is not like the hidden state")
    return residual

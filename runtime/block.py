"""The vocabulary of a generated block: where it acts (:class:`Block`) and what it does there (the verbs).

A block holds one short function a location.  Its first argument is the location's :class:`Tap`, the others stand for
the values found there, ``[rows, width]`` in the model's dtype.  A function is called once, when the block is put into
a model: each verb notes what it does, and the notes become one operation that the model calls at that place in every
forward (``vtaps.runtime.kernels``).  So a block is straight-line: there is nothing in it that could depend on a value.

Edits write the selected rows in place and nothing else; reads copy.  A row that is not selected is never an operand:
an idle arm's vector may be NaN, and ``-0.0`` stays ``-0.0``.  An edit with ``when`` acts on those of its rows that its
gate lets through.

A residual stream that a model carries as a pair is ``hidden + residual``, summed in float32.  ``add`` goes to
``hidden``; verbs that replace the stream write it to ``hidden`` and zero the residual of those rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from vtaps.runtime.entries import Verb

__all__ = ["Block", "Location", "Note", "Tap", "Tensor", "add", "affine", "clamp", "feature", "features", "gate",
           "keep", "lens", "mean", "norm", "probe", "project", "project_out", "put", "python", "python_read",
           "reconstruct", "scale", "set_", "zero"]  # fmt: skip

Columns = tuple[tuple[int, int], ...]
"""Half-open ranges of a location's own columns."""

ReadKind = Literal["rows", "mean", "norm", "project", "probe", "lens", "features", "python"]


@dataclass(frozen=True)
class Note:
    """One statement of a block: an edit (``verb``) or a read (``kind``) by its name in the spec, a gate by its
    :func:`gate_key`; ``when``: the name of an edit's gate."""

    name: str
    verb: Verb | None = None
    kind: ReadKind | None = None
    columns: Columns | None = None
    keep_norm: bool = False
    when: str | None = None

    @property
    def kept(self) -> bool:
        """Whether something of each row goes into slots."""
        return self.kind is not None or self.verb == "gate"

    @property
    def python(self) -> bool:
        """Whether Python does it: a function of the user's, or two products with an SAE."""
        return "python" in (self.verb, self.kind) or self.verb == "reconstruct"


class Tap:
    """One location while its function is called: what the function says, in order."""

    __slots__ = ("name", "notes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[Note] = []


@dataclass(frozen=True)
class Location:
    """Where a block function acts; see :meth:`Block.location`."""

    name: str
    module: str
    function: Callable[..., None]
    output: int | None
    input: int | str | None
    residual: int | str | None
    columns: tuple[int, int] | None
    op: str | None = None

    def notes(self) -> tuple[Note, ...]:
        """What the function says; raises whatever the function raises."""
        tap = Tap(self.name)
        values = (None,) if self.residual is None else (None, None)
        self.function(tap, *values)
        return tuple(tap.notes)


@dataclass(frozen=True)
class Block:
    """What a block file says of itself, and its locations in the order of the model."""

    spec: str
    tree: str
    structure: str
    vllm: str
    architecture: str
    locations: dict[str, Location] = field(default_factory=dict)

    def only(self, names: Container[str]) -> Block:
        """The block without the locations of other workers."""
        return replace(self, locations={name: place for name, place in self.locations.items() if name in names})

    def location(
        self,
        name: str,
        *,
        module: str,
        op: str | None = None,
        output: int | None = None,
        input: int | str | None = None,
        residual: int | str | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register the decorated function at ``module``: an element of its output tuple (``output``; None for an
        output that is one tensor), an input by parameter name (``input``), or what an op of its forward computes
        (``op``; ``output`` is an element of that) or takes in (``input``: an argument's number or keyword).  An op
        ``f_0.source.q_0`` is one of the function that ``f_0`` calls.

        ``residual`` is where the pair's other half is, on the same side; ``columns`` a half-open range of the last
        axis.  Raises ValueError for a name given twice or a side given twice.
        """
        if name in self.locations:
            raise ValueError(f"the block has two functions for {name}")
        if input is not None and output is not None:
            raise ValueError(f"{name}: a location is an input or an output")

        def register(function: Callable[..., None]) -> Callable[..., None]:
            self.locations[name] = Location(name, module, function, output, input, residual, columns, op)
            return function

        return register


def add(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    keep_norm: bool = False,
    when: str | None = None,
) -> None:
    """hidden += coefficient · vector, in float32, rounded once.

    ``keep_norm``: stream = y · |stream| / |y| with y = stream + coefficient · vector, the lengths those of ``columns``.
    """
    t.notes.append(Note(name, verb="add", columns=columns, keep_norm=keep_norm, when=when))


def scale(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream *= coefficient."""
    t.notes.append(Note(name, verb="scale", columns=columns, when=when))


def zero(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream = 0."""
    t.notes.append(Note(name, verb="zero", columns=columns, when=when))


def set_(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream = coefficient · vector."""
    t.notes.append(Note(name, verb="set", columns=columns, when=when))


def put(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream = the row of the edit's source at the same position."""
    t.notes.append(Note(name, verb="put", columns=columns, when=when))


def project_out(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream −= coefficient · Σ (stream · u) u, over the orthonormal directions u of the edit's vectors."""
    t.notes.append(Note(name, verb="project_out", columns=columns, when=when))


def clamp(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream += (clip(p, min, max) − p) u, with p = stream · u and u the direction of the vector; a row within the
    bounds is left alone."""
    t.notes.append(Note(name, verb="clamp", columns=columns, when=when))


def affine(
    t: Tap,
    name: str,
    hidden: Tensor,
    residual: Tensor | None = None,
    *,
    columns: Columns | None = None,
    when: str | None = None,
) -> None:
    """stream += coefficient · (stream Aᵀ + b) B, over the rows of A and B, both ``[rank, width]``."""
    t.notes.append(Note(name, verb="affine", columns=columns, when=when))


def feature(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, when: str | None = None) -> None:
    """stream += (to − a) d, with d the decoder row of the point's feature and a its activation of the stream; a row
    that has it already is left alone.  With ``by``, hidden += by · d, in float32, rounded once."""
    t.notes.append(Note(name, verb="feature", when=when))


def reconstruct(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, when: str | None = None) -> None:
    """stream = a W_dec + b_dec, with a the activations that the SAE finds in it, that of the point's feature set ``to``
    a value or moved ``by`` one: :class:`vtaps.runtime.sae.Autoencoder`."""
    t.notes.append(Note(name, verb="reconstruct", when=when))


def python(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None, *, when: str | None = None) -> None:
    """stream = what the edit's own function makes of it: :mod:`vtaps.runtime.functions`."""
    t.notes.append(Note(name, verb="python", when=when))


def gate_key(name: str) -> str:
    """How a gate is called where edits and reads are: no name of theirs has a dot."""
    return f"gates.{name}"


def gate(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """score = stream · vector, or that over the stream's length; the edits that name the gate (``when``) act only where
    it is within the gate's bounds."""
    t.notes.append(Note(gate_key(name), verb="gate"))


def keep(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """The rows themselves, ``[n, width]`` in the model's dtype (a pair's sum rounded once)."""
    t.notes.append(Note(name, kind="rows"))


def lens(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """The rows for the logit lens: final norm and unembedding follow after the step, many rows in one product."""
    t.notes.append(Note(name, kind="lens"))


def norm(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """L2 norm of each row, float32 ``[n]``."""
    t.notes.append(Note(name, kind="norm"))


def project(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """Dot product of each row with each of the read's vectors, float32 ``[n, vectors]``."""
    t.notes.append(Note(name, kind="project"))


def probe(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """Weight · row + bias of each of the read's classes, float32 ``[n, classes]``."""
    t.notes.append(Note(name, kind="probe"))


def features(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """The rows for a sparse autoencoder: its encoder follows after the step, many rows in one product."""
    t.notes.append(Note(name, kind="features"))


def mean(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """Mean over the rows of a request, float32 ``[1, width]``."""
    t.notes.append(Note(name, kind="mean"))


def python_read(t: Tap, name: str, hidden: Tensor, residual: Tensor | None = None) -> None:
    """What the read's own function gives for each row, ``[n, …]``: :mod:`vtaps.runtime.functions`."""
    t.notes.append(Note(name, kind="python"))

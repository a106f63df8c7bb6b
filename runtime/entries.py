"""The entries of a lock, and what is said of one that cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vtaps.spec.rows import Interval, Rows
from vtaps.spec.store import Store

Verb = Literal[
    "add", "scale", "zero", "set", "put", "project_out", "clamp", "affine", "feature", "reconstruct", "python", "gate"
]
VERBS: tuple[Verb, ...] = tuple(v for v in get_args(Verb) if v != "gate")
"""Of the lock's edits; ``gate`` is not one of them."""
WITHOUT_COEFFICIENT = ("zero", "put", "clamp", "python", "gate")
USES_VECTOR = ("add", "set", "clamp", "gate")
Kind = Literal["rows", "mean", "norm", "project", "probe", "lens", "features", "python", "gate"]
KINDS: tuple[Kind, ...] = ("rows", "mean", "norm", "project", "probe", "lens", "features", "python")
MetricKind = Literal["logprob", "logit_diff", "rank"]
METRICS: tuple[MetricKind, ...] = ("logprob", "logit_diff", "rank")


class LockError(Exception):
    """The lock cannot be served; the message starts with the entry that is wrong."""

    def __init__(self, entry: str, message: str) -> None:
        super().__init__(f"{entry}: {message}")
        self.entry = entry


@dataclass(frozen=True)
class Part:
    """What a rank has of a location that is ``width`` columns wide on one rank alone: ``pieces`` of those columns, in
    the order of its own, which are ``columns`` of its tensor (None: all of it)."""

    width: int
    pieces: tuple[Interval, ...]
    columns: Interval | None = None
    first: bool = True
    """Whether it is of the first rank."""

    @property
    def size(self) -> int:
        return sum(b - a for a, b in self.pieces)

    def cut(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[…, width]`` → ``[…, size]``."""
        return np.concatenate([array[..., a:b] for a, b in self.pieces], axis=-1)


@dataclass(frozen=True)
class SiteEntry:
    """Where a location is.  ``sampled``: its tensor has one row a request (logits), not one a token; ``mode``: how it
    is served, see docs/serving.md; ``op``: it is what this op of ``forward`` (in :attr:`Program.forwards`) computes.
    ``heads`` divide its columns.  ``shared``: ranks of a tensor-parallel group have some of its columns each; where
    this is one rank's entry, ``part`` says which, and ``width`` and ``columns`` are of its own."""

    name: str
    module: str
    output: int | None
    input: int | str | None
    residual: int | str | None
    columns: Interval | None
    layer: int | None
    width: int
    sampled: bool = False
    mode: str = "eager"
    op: str | None = None
    forward: str | None = None
    inside: str | None = None
    heads: int | None = None
    shared: bool = False
    part: Part | None = None

    @property
    def whole(self) -> int:
        """Columns of it on one rank alone."""
        return self.width if self.part is None else self.part.width

    def own(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[…, whole]`` → ``[…, width]``."""
        return array if self.part is None else self.part.cut(array)

    @property
    def functions(self) -> tuple[str, ...]:
        """Those that get taps for it."""
        return tuple(name for name in (self.forward, self.inside) if name is not None)


@dataclass(frozen=True)
class ForwardEntry:
    """A function of vLLM's that gets taps: its file, the sha256 of its text, and its ops then, a line each."""

    file: str
    digest: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class EditEntry:
    """``vectors``: the directions of ``project_out``; ``matrices``: down, up and bias of ``affine``; ``python``: the
    file, the function in it, the file's sha256; ``sae``: the folder of the SAE of ``feature`` or ``reconstruct`` and
    what is done, ``to`` or ``by``; ``value``: its points' coefficients stand in place of a vector; ``when``: the key of
    its gate in :attr:`Program.gates`; ``slots``: how many rows the memory of ``put`` holds."""

    verb: Verb
    sites: tuple[str, ...]
    tokens: Rows
    vectors: tuple[str, ...] = ()
    keep_norm: bool = False
    matrices: tuple[str, ...] = ()
    python: tuple[str, str, str | None] | None = None
    sae: tuple[str, str] | None = None
    value: bool = False
    when: str | None = None
    slots: int = 0


@dataclass(frozen=True)
class GateEntry:
    """``cosine``: the score is over the row's length; ``reduce``: how a request's scores become one, None where each
    row decides for itself."""

    cosine: bool
    reduce: Literal["max", "mean", "last"] | None


@dataclass(frozen=True)
class ReadEntry:
    """``step_rows``: the most rows that one request selects in one step; ``requests``: how many of the run take them.
    None where that was not worked out.  ``vectors``: of ``project``, or weight and bias of ``probe``; ``python`` as in
    :class:`EditEntry`; ``sae``: the folder of ``features``, whose features ``ids`` and ``top`` count."""

    kind: Kind
    sites: tuple[str, ...]
    tokens: Rows
    vectors: tuple[str, ...] = ()
    top: int | None = None
    ids: tuple[int, ...] | None = None
    step_rows: int | None = None
    requests: int | None = None
    python: tuple[str, str, str | None] | None = None
    sae: str | None = None
    store: Store = field(default_factory=Store)


@dataclass(frozen=True)
class PatternEntry:
    """Attention probabilities: site → (attention module, site of its queries, site of its keys)."""

    sites: Mapping[str, tuple[str, str, str]]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class OverrideEntry:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MetricEntry:
    kind: MetricKind
    ids: tuple[int, ...]
    tokens: Rows


@dataclass(frozen=True)
class PointEdit:
    """``position``: the only one of its rows that the point edits, None for all of them."""

    edit: str
    sites: tuple[str, ...]
    coefficient: float | None
    vector: str | None
    low: float | None = None
    high: float | None = None
    feature: int | None = None
    # Which row it is stands in the row table: uses that differ in it alone are one.
    position: int | None = field(default=None, compare=False)

    @property
    def operand(self) -> str | None:
        """What it takes out of a file: a vector's name, or a feature's number."""
        return self.vector if self.feature is None else str(self.feature)


@dataclass(frozen=True)
class Point:
    """``overrides``: name → first generated step that it replaces."""

    edits: tuple[PointEdit, ...]
    overrides: Mapping[str, int]


@dataclass(frozen=True)
class ArmEntry:
    reads: tuple[str, ...]
    metrics: tuple[str, ...]
    points: tuple[Point, ...]
    sampling: Mapping[str, Any]

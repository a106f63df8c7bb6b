"""A spec as written, typed: every name still a name, every location still a text.

``where`` fields are paths into the document, so that later stages can point at the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vtaps.spec.document import NodePath
from vtaps.spec.rows import Interval, Rows

Verb = Literal["add", "scale", "zero", "set", "project_out", "clamp", "affine", "python"]
Sees = Literal["before_edits", "after_edits"]
ReadKind = Literal["rows", "mean", "norm", "project", "lens", "python"]
MetricKind = Literal["logprob", "logit_diff", "rank"]
PromptKind = Literal["text", "chat", "ids"]


@dataclass(frozen=True)
class ModelRef:
    path: str
    dtype: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None


TAP_MEMORY = 4 * 2**30
"""Bytes: 8192 rows a step of every layer of an 8B model (32 × 4096 × 2 bytes a row), held for two steps."""


@dataclass(frozen=True)
class EngineRef:
    """``tap_memory``: the most bytes that the reads of the taps engine may take on the device."""

    mode: str = "auto"
    vllm: Mapping[str, Any] = field(default_factory=dict)
    tap_memory: int = TAP_MEMORY


@dataclass(frozen=True)
class RowsOf:
    """What a read keeps in an arm of this run, or of a finished one in the folder ``run``."""

    arm: str
    read: str
    run: str | None = None


@dataclass(frozen=True)
class Vector:
    """A vector by file, by a seeded draw, or from the mean that a read keeps, ``minus`` another one; ``norm``: what it
    is scaled to.  See ``vtaps.spec.vectors``."""

    name: str
    where: NodePath
    file: str | None = None
    tensor: str | None = None
    row: int | None = None
    seed: int | None = None
    norm: float | None = None
    read: RowsOf | None = None
    minus: RowsOf | None = None

    @property
    def random(self) -> bool:
        return self.seed is not None

    @property
    def means(self) -> tuple[tuple[str, RowsOf], ...]:
        """The means that it is made of, by key."""
        both = (("read", self.read), ("minus", self.minus))
        return tuple((key, of) for key, of in both if of is not None)


@dataclass(frozen=True)
class At:
    """Locations as written, each with the place it stands at."""

    texts: tuple[str, ...]
    wheres: tuple[NodePath, ...]


MATRICES = ("down", "up", "bias")
"""The fields of ``affine`` that name tensors, in the order of :attr:`Edit.matrices`."""


@dataclass(frozen=True)
class Edit:
    """``coefficient`` is ``scale`` of ``add``, ``set``, ``project_out`` and ``affine`` and ``by`` of ``scale``; None
    elsewhere.  ``vectors`` are the directions of ``project_out``; ``low`` and ``high`` the bounds of ``clamp``;
    ``matrices`` the names of ``affine``: down, up and bias, if it has one; ``keep_norm`` is of ``add``.  ``heads`` and
    ``dims`` are inclusive ranges, None for all.  ``python``: (file, function).  ``rows``: what ``set`` takes in place
    of a vector."""

    name: str
    where: NodePath
    at: At
    tokens: Rows
    verb: Verb
    coefficient: float | None = None
    vector: str | None = None
    heads: tuple[Interval, ...] | None = None
    dims: tuple[Interval, ...] | None = None
    vectors: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    keep_norm: bool = False
    matrices: tuple[str, ...] = ()
    python: tuple[str, str] | None = None
    rows: RowsOf | None = None

    @property
    def operation(self) -> str:
        """What a block does for it: the verb, or ``put`` where ``set`` takes rows."""
        return self.verb if self.rows is None else "put"


@dataclass(frozen=True)
class Read:
    """``python``: (file, function); ``over``: what a mean is of, the rows of a request or those of a run's arm."""

    name: str
    where: NodePath
    at: At
    tokens: Rows
    kind: ReadKind = "rows"
    sees: Sees | None = None
    vectors: tuple[str, ...] = ()
    top: int | None = None
    ids: tuple[int | str, ...] | None = None
    python: tuple[str, str] | None = None
    over: Literal["request", "run"] = "request"


@dataclass(frozen=True)
class Override:
    name: str
    where: NodePath
    start: int
    text: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Metric:
    """``normalize``: the arms whose values become 1 and 0."""

    name: str
    where: NodePath
    kind: MetricKind
    of: tuple[int | str, ...]
    tokens: Rows
    normalize: tuple[str, str] | None = None


@dataclass(frozen=True)
class Prompt:
    """``content``: the text, the list of ``{role, content}`` messages, or the token ids."""

    id: str
    kind: PromptKind
    content: Any
    where: NodePath
    columns: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None


@dataclass(frozen=True)
class PromptFile:
    file: str
    kind: PromptKind
    column: str
    id_column: str | None = None


@dataclass(frozen=True)
class PromptGroup:
    name: str
    where: NodePath
    items: tuple[Prompt, ...] = ()
    file: PromptFile | None = None


@dataclass(frozen=True)
class Axis:
    """One sweep path and its values; None values: ``each``."""

    path: str
    values: tuple[Any, ...] | None
    where: NodePath


@dataclass(frozen=True)
class Arm:
    """``sweep`` is a product of factors; the axes of one factor run in step."""

    name: str
    where: NodePath
    prompts: tuple[str, ...] | None = None
    reads: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    sweep: tuple[tuple[Axis, ...], ...] = ()


@dataclass(frozen=True)
class Spec:
    """``broken`` are the paths of definitions that did not pass the schema: names there are known, not checked."""

    file: str
    model: ModelRef
    engine: EngineRef
    vectors: Mapping[str, Vector]
    taps: Mapping[str, At]
    reads: Mapping[str, Read]
    edits: Mapping[str, Edit]
    overrides: Mapping[str, Override]
    metrics: Mapping[str, Metric]
    prompts: Mapping[str, PromptGroup]
    arms: Mapping[str, Arm]
    sampling: Mapping[str, Any]
    broken: frozenset[NodePath] = frozenset()

    def selecting(self) -> Iterator[Read | Edit | Metric]:
        """Everything that selects rows."""
        yield from self.edits.values()
        yield from self.reads.values()
        yield from self.metrics.values()

    def ats(self) -> Iterator[At]:
        """The locations of everything that has some."""
        yield from (acting.at for acting in self.acting())

    def acting(self) -> Iterator[Edit | Read]:
        """Everything that has locations."""
        yield from self.edits.values()
        yield from self.reads.values()

    def texts(self, at: At) -> tuple[str, ...]:
        """Its locations, with those of a tap in place of the tap's name."""
        return tuple(t for text in at.texts for t in (self.taps[text].texts if text in self.taps else (text,)))

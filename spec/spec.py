"""A spec as written, typed: every name still a name, every location still a text.

``where`` fields are paths into the document, so that later stages can point at the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vtaps.spec.document import NodePath
from vtaps.spec.rows import Interval, Rows
from vtaps.spec.store import Store

Verb = Literal["add", "scale", "zero", "set", "project_out", "clamp", "affine", "feature", "python"]
Sees = Literal["before_edits", "after_edits"]
ReadKind = Literal["rows", "mean", "norm", "project", "probe", "lens", "features", "python", "pattern"]
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
    """A vector by file, by a seeded draw, a decoder row of an SAE, or from the mean that a read keeps, ``minus``
    another one; ``norm``: what it is scaled to.  See ``vtaps.spec.vectors``."""

    name: str
    where: NodePath
    file: str | None = None
    tensor: str | None = None
    row: int | None = None
    seed: int | None = None
    norm: float | None = None
    sae: str | None = None
    feature: int | None = None
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
class Sae:
    """A sparse autoencoder by the folder of its files, or its one file; ``path`` may name the ``{layer}``.  See
    ``vtaps.spec.saes``."""

    name: str
    where: NodePath
    path: str


@dataclass(frozen=True)
class FeatureUse:
    """Feature ``index`` of ``sae`` is set ``to`` a value, or moved ``by`` one; ``error``: what the SAE does not explain
    of the row is kept, or dropped."""

    sae: str
    index: int
    does: Literal["to", "by"]
    error: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True)
class At:
    """Locations as written, each with the place it stands at."""

    texts: tuple[str, ...]
    wheres: tuple[NodePath, ...]


BAN = "-inf"
"""How a spec and a lock write the number that bans a token."""

MATRICES = ("down", "up", "bias")
"""The fields of ``affine`` that name tensors, in the order of :attr:`Edit.matrices`."""

PROBE = ("weight", "bias")
"""The fields of ``probe``, in the order of :attr:`Read.vectors`."""


@dataclass(frozen=True)
class Edit:
    """``coefficient`` is ``scale`` of ``add``, ``set``, ``project_out`` and ``affine``, ``by`` of ``scale``, ``to`` or
    ``by`` of ``feature``, ``value`` of an ``add`` or ``set`` without a vector; None elsewhere.  ``vectors`` are the
    directions of ``project_out``; ``low`` and ``high`` the bounds of ``clamp``; ``matrices`` the names of ``affine``:
    down, up and bias, if any; ``keep_norm`` is of ``add``.  ``heads`` and ``dims`` are inclusive ranges, ``ids`` tokens
    as written, None for all.  ``python``: (file, function); ``when``: the name of its gate; ``rows``: what ``set``
    takes in place of a vector."""

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
    feature: FeatureUse | None = None
    ids: tuple[int | str, ...] | None = None
    when: str | None = None
    rows: RowsOf | None = None

    @property
    def operation(self) -> str:
        """What a block does for it: the verb, ``put`` where ``set`` takes rows, or ``reconstruct`` where ``feature``
        drops what its SAE does not explain."""
        if self.feature is not None and self.feature.error == "drop":
            return "reconstruct"
        return self.verb if self.rows is None else "put"

    @property
    def breaks(self) -> bool:
        """Whether Python does it, on the taps engine at a break."""
        return self.operation in ("python", "reconstruct")

    @property
    def by_value(self) -> bool:
        """Whether a number stands in place of the vector."""
        return self.verb in ("add", "set") and self.vector is None and self.rows is None

    @property
    def coefficient_key(self) -> str | None:
        """The field of the verb that :attr:`coefficient` is."""
        if self.coefficient is None:
            return None
        if self.feature is not None:
            return self.feature.does
        return "by" if self.verb == "scale" else "value" if self.by_value else "scale"


GATE_KINDS = ("project", "cosine")
BOUNDS = ("above", "below")


@dataclass(frozen=True)
class Gate:
    """``kind``: the score is the row's product with ``vector``, or that over both lengths; a row, or what ``reduce``
    makes of a request's rows, passes where ``above`` < score < ``below``."""

    name: str
    where: NodePath
    at: At
    tokens: Rows
    kind: Literal["project", "cosine"]
    vector: str
    holds: Literal["row", "request"]
    reduce: Literal["max", "mean", "last"] | None = None
    above: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Read:
    """``vectors`` are those of ``project``, or weight and bias of ``probe``; ``top`` and ``ids`` are tokens of
    ``lens``, features of ``features``; ``python``: (file, function); ``heads``: inclusive ranges of a pattern's heads,
    None for all; ``over``: what a mean is of, the rows of a request or those of a run's arm; ``allow``: rows that are
    no fault, ``zero`` or ``not_finite``."""

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
    sae: str | None = None
    store: Store | None = None
    budget: int | None = None
    heads: tuple[Interval, ...] | None = None
    over: Literal["request", "run"] = "request"
    allow: tuple[str, ...] = ()


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
    saes: Mapping[str, Sae] = field(default_factory=dict)
    gates: Mapping[str, Gate] = field(default_factory=dict)

    def selecting(self) -> Iterator[Read | Edit | Metric | Gate]:
        """Everything that selects rows."""
        yield from self.gates.values()
        yield from self.edits.values()
        yield from self.reads.values()
        yield from self.metrics.values()

    def ats(self) -> Iterator[At]:
        """The locations of everything that has some."""
        yield from (acting.at for acting in self.acting())

    def acting(self) -> Iterator[Edit | Read | Gate]:
        """Everything that has locations."""
        yield from self.gates.values()
        yield from self.edits.values()
        yield from self.reads.values()

    def texts(self, at: At) -> tuple[str, ...]:
        """Its locations, with those of a tap in place of the tap's name."""
        return tuple(t for text in at.texts for t in (self.taps[text].texts if text in self.taps else (text,)))

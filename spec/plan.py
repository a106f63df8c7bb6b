"""A spec resolved against a model: every name a definition, every location a site, every text its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vtaps.spec.everywhere import Everywhere
from vtaps.spec.prompts import ReadyPrompt
from vtaps.spec.rows import Interval
from vtaps.spec.source import Forward
from vtaps.spec.spec import Arm, Edit, Gate, Metric, Override, Read, Spec
from vtaps.spec.tree import Dimensions, Site

EngineMode = Literal["taps", "eager"]
SiteMode = Literal["recorded", "break", "hook", "eager", "computed"]


PromptKey = tuple[str, str]
"""Group and id of a prompt."""


@dataclass(frozen=True)
class RowsSource:
    """Where the rows come from that an edit sets.

    ``pairs``: a prompt under the edit → the one whose rows it gets.  ``blocks``: each of those → the first slot of its
    rows in the edit's memory, and their positions in order.
    """

    pairs: Mapping[PromptKey, PromptKey]
    blocks: Mapping[PromptKey, tuple[int, tuple[int, ...]]]

    @property
    def slots(self) -> int:
        return sum(len(positions) for _, positions in self.blocks.values())


@dataclass(frozen=True)
class MeanSource:
    """The read whose means a vector is made of.  ``sites``: a location where the vector is used → the one of the read
    that it is taken from."""

    arm: str
    read: str
    sites: Mapping[str, str]


@dataclass(frozen=True)
class EditPlan:
    """``columns`` are half-open ranges of each site's own columns, None for all of them; every site of an edit has
    the same shape, but of one that sets whole rows of ``source``."""

    edit: Edit
    sites: tuple[Site, ...]
    columns: tuple[Interval, ...] | None
    source: RowsSource | None = None


@dataclass(frozen=True)
class Attention:
    """One layer's attention: its module, and the sites of the queries and keys that it multiplies."""

    module: str
    query: Site
    key: Site


@dataclass(frozen=True)
class ReadPlan:
    """``ids`` are the token ids of a lens that asks for chosen ones, or the features of ``features``; ``step_rows`` is
    the most rows that one request selects in one step, ``requests`` how many of the run take the read (0 where no arm
    lists it); ``classes``: the numbers that ``probe`` gives of a row; ``heads`` and, for each site, ``attention`` are a
    pattern's."""

    read: Read
    sites: tuple[Site, ...]
    ids: tuple[int, ...] | None = None
    step_rows: int = 0
    requests: int = 0
    classes: int = 1
    heads: tuple[int, ...] = ()
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class GatePlan:
    """``step_rows`` and ``requests`` as in :class:`ReadPlan`."""

    gate: Gate
    site: Site
    step_rows: int = 0
    requests: int = 0


@dataclass(frozen=True)
class OverridePlan:
    override: Override
    ids: tuple[int, ...]


@dataclass(frozen=True)
class MetricPlan:
    metric: Metric
    ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class PointEdit:
    """One edit at one sweep point; ``position``: the only one of its rows that the point edits.  Identities (``add`` 0,
    ``scale`` 1) are not here: they store nothing."""

    edit: str
    sites: tuple[str, ...]
    coefficient: float | None
    vector: str | None
    low: float | None = None
    high: float | None = None
    feature: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class PointGate:
    """One gate at one sweep point: those that an edit of the point acts by."""

    gate: str
    vector: str
    above: float | None
    below: float | None


@dataclass(frozen=True)
class Point:
    """``values``: sweep path → value, the typed columns of the result; ``overrides``: (name, first step)."""

    values: Mapping[str, Any]
    edits: tuple[PointEdit, ...]
    overrides: tuple[tuple[str, int], ...]
    gates: tuple[PointGate, ...] = ()


@dataclass(frozen=True)
class ArmPlan:
    arm: Arm
    prompts: tuple[str, ...]
    sampling: Mapping[str, Any]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Statement:
    kind: Literal["edit", "read", "gate"]
    name: str


@dataclass(frozen=True)
class LocationPlan:
    """What the block does at one site, in the order it does it, and how the site is served: ``recorded`` inside the
    compiled model, at a ``break`` of it, by a ``hook`` after it, or by the ``eager`` engine."""

    site: Site
    statements: tuple[Statement, ...]
    mode: SiteMode = "eager"


@dataclass(frozen=True)
class TreeFacts:
    digest: str
    architecture: str
    vllm: str
    dtype: str
    dimensions: Dimensions
    final_norm: str | None


@dataclass(frozen=True)
class SaePlan:
    """An SAE that is used, in its ``folder`` or file (relative to the spec); ``bytes``: what reads, and edits that put
    its reconstruction in a row's place, hold of it on the device."""

    name: str
    folder: str
    architecture: str
    d_in: int
    d_sae: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """``locations`` stand in execution order.  ``outside`` maps every file that the spec leans on to its digest,
    ``forwards`` the functions in which a location is (:attr:`Site.forward`) to their ops; ``everywhere`` is what ``**``
    became, where a read or an edit says it.  ``stages``: the arms in the order in which they can be served; those of
    one stage need only what earlier ones kept.  ``means``: vector → ``read`` and ``minus`` → where its
    numbers come from.  ``parted``: the sites of which each rank of a tensor-parallel group has some columns."""

    spec: Spec
    tree: TreeFacts
    mode: EngineMode
    reason: str
    locations: tuple[LocationPlan, ...]
    edits: Mapping[str, EditPlan]
    reads: Mapping[str, ReadPlan]
    overrides: Mapping[str, OverridePlan]
    metrics: Mapping[str, MetricPlan]
    arms: Mapping[str, ArmPlan]
    prompts: Mapping[str, tuple[ReadyPrompt, ...]]
    outside: Mapping[str, str] = field(default_factory=dict)
    forwards: Mapping[str, Forward] = field(default_factory=dict)
    everywhere: Everywhere | None = None
    saes: tuple[SaePlan, ...] = ()
    gates: Mapping[str, GatePlan] = field(default_factory=dict)
    stages: tuple[tuple[str, ...], ...] = ()
    means: Mapping[str, Mapping[str, MeanSource]] = field(default_factory=dict)
    parted: frozenset[str] = frozenset()

"""What travels between the driver, the worker and the results folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.faults import Fault
from vtaps.spec.rows import Interval


@dataclass(frozen=True)
class Request:
    """One prompt × arm × sweep point.  ``key`` is unique in a run; ``matches`` and ``turns`` are what the prompt's
    text decides for selectors (see ``vtaps.spec.rows.Facts``).  ``patches``: edit that sets rows → (first slot,
    half-open ranges of the positions whose rows are there, in order)."""

    key: str
    arm: str
    point: int
    group: str
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    matches: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    turns: tuple[tuple[str, int, int], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    prompt_text: str | None = None
    patches: Mapping[str, tuple[int, tuple[Interval, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadRows:
    """One read at one site for one request.  ``positions`` [rows] int64, sorted; ``values`` maps a field to an
    array whose first axis is rows: ``rows`` [rows, width]; ``norm`` [rows]; ``project`` [rows, vectors]; ``probe``
    [rows, classes]; ``ids``, ``logits`` [rows, k] and ``logsumexp`` [rows]; ``ids``, ``activations`` [rows, k];
    ``mean`` [1, width] with ``count`` [1] (positions then lists the rows that went into it).  bfloat16 arrays travel as
    ml_dtypes-free uint16 bits with ``dtype`` saying so."""

    positions: npt.NDArray[np.int64]
    values: Mapping[str, npt.NDArray[Any]]
    dtype: str


@dataclass(frozen=True)
class Filed:
    """Rows that lie in a file of their own instead of memory: an array of ``shape`` and ``dtype`` (numpy's name), from
    its first byte on.  Whoever opens it also removes it."""

    path: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """One read of one request at ``sites``, as a worker holds it: like :class:`ReadRows`, but the arrays are
    ``[rows, sites, …]``."""

    read: str
    sites: tuple[str, ...]
    positions: npt.NDArray[np.int64]
    values: Mapping[str, npt.NDArray[Any] | Filed]
    dtype: str


@dataclass(frozen=True)
class Collected:
    """What a worker hands over of one child request; :class:`Record` says what the fields are.  ``fired`` is before
    gates; ``gated``: edit → the read of its gate's scores, and whether the gate decides for the whole request."""

    fired: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    metrics: Mapping[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = field(default_factory=dict)
    overridden: tuple[int, ...] = ()
    gated: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    cached: tuple[Interval, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True)
class Scores:
    """What one gate saw and decided of one request: ``positions`` int64 ``[rows]``, sorted, their ``scores`` float32
    ``[rows]`` and which of them ``passed``.  A request gate decides on ``value``, what the scores of all rows come to:
    all pass or none does.  ``value`` is None where each row decides for itself."""

    positions: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    passed: npt.NDArray[np.bool_]
    value: float | None = None


@dataclass(frozen=True)
class Record:
    """What the worker saw of one child request.  ``fired``: edit → half-open ranges of absolute positions at which
    it acted, one list for all its sites; ``selected``: edit with a gate → the same of the rows that it acted on if its
    gate let them through; ``gates``: name → its scores; ``overridden``: generated steps whose token was replaced;
    ``metrics``: name → (positions, float32 values); ``cached``: half-open ranges of the positions that were not
    computed, since vLLM's prefix cache had them as the same edits had made them; ``fault``: why the request failed,
    beside which there is nothing else."""

    fired: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    reads: Mapping[tuple[str, str], ReadRows] = field(default_factory=dict)
    metrics: Mapping[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = field(default_factory=dict)
    overridden: tuple[int, ...] = ()
    selected: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    gates: Mapping[str, Scores] = field(default_factory=dict)
    cached: tuple[Interval, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled continuation; ``logprobs`` [generated] of the tokens that stand in the text, where asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    record: Record
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Failure:
    """Why a request of ``arm`` has no result, under which diagnostic, and the line of the spec that it points at."""

    reason: str
    code: str = "VT603"
    arm: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Finished:
    request: Request
    completions: tuple[Completion, ...]

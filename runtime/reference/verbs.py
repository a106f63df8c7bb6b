"""What each verb makes of rows: the formula, in float64, on one location's rows as a whole.

A verb of the language stands in :data:`VERBS` with its formula, or with the reason why it has none here; a test fails
for one that does neither.  ``x`` is float64 ``[n, width]``, the stream where the location is a residual pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import EditEntry, PointEdit, Program, SiteEntry
from vtaps.runtime.reference.saes import decode, encode
from vtaps.spec.rows import Interval

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NotChecked:
    """Why there is no reference."""

    reason: str


@dataclass(frozen=True)
class Use:
    """One edit of a point at one site; ``columns``: half-open ranges of the site's columns, None for all of them."""

    program: Program
    edit: EditEntry
    point: PointEdit
    site: SiteEntry
    columns: tuple[Interval, ...] | None

    @property
    def here(self) -> npt.NDArray[np.bool_]:
        """bool ``[width]``: the columns that the edit is of."""
        here = np.full(self.site.width, self.columns is None)
        for start, end in self.columns or ():
            here[start:end] = True
        return here

    @property
    def coefficient(self) -> float:
        assert self.point.coefficient is not None
        # The engines keep it in float32.
        return float(np.float32(self.point.coefficient))

    @property
    def operand(self) -> Floats | float:
        """What the coefficient multiplies: the vector, or 1 where it is a number for every column."""
        return 1.0 if self.edit.value else self.vector()

    def vector(self, name: str | None = None) -> Floats:
        """float64 ``[width]``.  Raises LockError."""
        wanted = name or self.point.vector
        assert wanted is not None
        return self.program.load_vector(wanted, self.site).astype(np.float64)


def _add(x: Floats, use: Use) -> Floats:
    moved = x + use.coefficient * use.operand
    if not use.edit.keep_norm:
        return moved
    before, now = (np.linalg.norm(np.where(use.here, rows, 0.0), axis=1, keepdims=True) for rows in (x, moved))
    kept: Floats = moved * np.divide(before, now, out=np.ones_like(now), where=now > 0)
    return kept


def _scale(x: Floats, use: Use) -> Floats:
    return x * use.coefficient


def _zero(x: Floats, use: Use) -> Floats:
    return np.zeros_like(x)


def _set(x: Floats, use: Use) -> Floats:
    return np.broadcast_to(use.coefficient * use.operand, x.shape)


def _project_out(x: Floats, use: Use) -> Floats:
    own = np.where(use.here, x, 0.0)
    spanning = np.stack([np.where(use.here, use.vector(name), 0.0) for name in use.edit.vectors], axis=1)
    basis, _ = np.linalg.qr(spanning)
    left: Floats = x - use.coefficient * (own @ basis) @ basis.T
    return left


def _clamp(x: Floats, use: Use) -> Floats:
    direction = np.where(use.here, use.vector(), 0.0)
    direction /= np.linalg.norm(direction)
    before = np.where(use.here, x, 0.0) @ direction
    low, high = use.point.low, use.point.high
    after = np.clip(before, -np.inf if low is None else low, np.inf if high is None else high)
    return x + np.outer(after - before, direction)


def _affine(x: Floats, use: Use) -> Floats:
    down, up, bias = (t.astype(np.float64) for t in use.program.load_affine(use.edit.matrices, use.site))
    down, up = np.where(use.here, down, 0.0), np.where(use.here, up, 0.0)
    return x + use.coefficient * (np.where(use.here, x, 0.0) @ down.T + bias) @ up


def _feature(x: Floats, use: Use) -> Floats:
    assert use.edit.sae is not None and use.point.feature is not None
    folder, does = use.edit.sae
    feature = use.program.load_sae("verify", folder, use.site).feature(use.point.feature)
    decoder = feature.decoder.astype(np.float64)
    if does == "by":
        return x + use.coefficient * decoder
    before = x @ feature.encoder.astype(np.float64) + feature.bias
    activation = np.where(before > feature.threshold, before, 0.0)
    return x + np.outer(use.coefficient - activation, decoder)


def _reconstruct(x: Floats, use: Use) -> Floats:
    assert use.edit.sae is not None and use.point.feature is not None
    path, does = use.edit.sae
    sae = use.program.load_sae("verify", path, use.site)
    activations = encode(sae, x).activations
    before = activations[:, use.point.feature] if does == "by" else 0.0
    activations[:, use.point.feature] = before + use.coefficient
    return decode(sae, activations)


Formula = Callable[[Floats, Use], Floats]

VERBS: Mapping[str, Formula | NotChecked] = {
    "add": _add,
    "scale": _scale,
    "zero": _zero,
    "set": _set,
    "project_out": _project_out,
    "clamp": _clamp,
    "affine": _affine,
    "feature": _feature,
    "reconstruct": _reconstruct,
    "put": NotChecked("rows of another request are not in the forward of this one"),
    "python": NotChecked("a function of your own is its own definition"),
}
"""Every verb of the language (``vtaps.runtime.program.VERBS``): a new one is registered here."""

REPLACES = ("zero", "set", "reconstruct")
"""Verbs after which nothing is left of what the row held."""


def change(use: Use) -> Callable[[npt.NDArray[Any]], Floats]:
    """What stands in place of rows float ``[n, width]``, float64; columns that the edit is not of are as they were.

    Raises KeyError for a verb without a formula, LockError for a vector that cannot be read.
    """
    formula = VERBS[use.edit.verb]
    if isinstance(formula, NotChecked):
        raise KeyError(use.edit.verb)
    return partial(_changed, formula, use)


def _changed(formula: Formula, use: Use, rows: npt.NDArray[Any]) -> Floats:
    x = rows.astype(np.float64)
    return np.where(use.here, formula(x, use), x)

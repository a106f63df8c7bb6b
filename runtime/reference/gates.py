"""A gate of one request by its definition, in float64: its scores, and whether what it decided follows from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vtaps.runtime.program import GateEntry, PointEdit
from vtaps.runtime.records import Scores
from vtaps.runtime.reference.kinds import Errors, apart

Floats = npt.NDArray[np.float64]


def off(gate: GateEntry, use: PointEdit, told: Scores, x: Floats, vector: Floats, growth: Errors) -> Errors:
    """How far the scores of the rows ``x`` ``[n ≥ 1, width]`` are from what was ``told``, as a share of the lengths'
    product (of 1 for a cosine), ``[n]``; of a request gate also the value that they come to, ``[n + 1]``.  Infinite
    where the decisions do not follow from the told numbers by float32 comparisons with the bounds."""
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(vector)
    scores, size = x @ vector, lengths * growth
    if gate.cosine:
        scores, size = np.divide(scores, lengths, out=np.zeros(len(x)), where=lengths > 0), growth
    errors = apart(told.scores[:, None], scores[:, None], size)
    low = np.float32(-np.inf if use.low is None else use.low)
    high = np.float32(np.inf if use.high is None else use.high)
    if gate.reduce is None:
        decided = (told.scores > low) & (told.scores < high)
    else:
        want = scores.max() if gate.reduce == "max" else scores.mean() if gate.reduce == "mean" else scores[-1]
        value = np.float32(np.nan if told.value is None else told.value)
        errors = np.append(errors, apart(np.array([[value]]), np.array([[want]]), size.max(keepdims=True)))
        decided = np.full(len(x), low < value < high)
    return errors if np.array_equal(decided, told.passed) else np.full(len(errors), np.inf)

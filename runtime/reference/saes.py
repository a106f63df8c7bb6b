"""Sparse autoencoders by their published formulas, in float64, from the tensors as the file has them.

``standard`` and ``jumprelu``: Rajamanoharan et al., arXiv:2407.14435; ``topk``: Gao et al., arXiv:2406.04093;
``gated``: Rajamanoharan et al., arXiv:2404.16014, with the two encoders' weights tied by exp(r_mag).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtaps.spec.saes import Sae

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Encoded:
    """Of rows ``[n, d_in]``, all ``[n, d_sae]``: the ``activations``; what each would be on the ``other`` side of what
    decides whether it is active; and how far ``off`` that it is, in activations.  ``size`` ``[n]``: the largest that
    the terms of one can be."""

    activations: Floats
    other: Floats
    off: Floats
    size: Floats

    def apart(self, got: npt.NDArray[np.generic], ids: npt.NDArray[np.int64]) -> Floats:
        """How far ``got`` ``[n, m]`` is from the activations of the features ``ids`` ``[n, m]``.  One that is all but
        on the edge of being active may stand on either side of it."""
        own, other, off = (np.take_along_axis(t, ids, axis=1) for t in (self.activations, self.other, self.off))
        values = got.astype(np.float64)
        found: Floats = np.minimum(np.abs(values - own), np.maximum(np.abs(values - other), off))
        return found


def encode(sae: Sae, x: Floats) -> Encoded:
    """``x`` float64 ``[n, d_in]``."""
    weight = _tensor(sae, "W_enc")
    q = (x - (_tensor(sae, "b_dec") if sae.centred else 0.0)) @ weight
    reach = np.linalg.norm(weight, axis=0)
    if sae.architecture == "gated":
        gate, gain = q + _tensor(sae, "b_gate"), np.exp(_tensor(sae, "r_mag"))
        bias = _tensor(sae, "b_mag")
        value = np.maximum(gain * q + bias, 0.0)
        active, off, reach = gate > 0, np.abs(gate) * gain, reach * gain
    else:
        bias = _tensor(sae, "b_enc")
        p = q + bias
        value, active, off = np.maximum(p, 0.0), np.ones(p.shape, bool), np.full(p.shape, np.inf)
        if sae.architecture == "jumprelu":
            threshold = _tensor(sae, "threshold")
            active, off = p > threshold, np.abs(p - threshold)
        elif sae.k is not None:
            ordered = np.sort(p, axis=1)
            least = ordered[:, -sae.k][:, None]
            next_one = ordered[:, -sae.k - 1][:, None] if sae.k < p.shape[1] else np.full((len(p), 1), -np.inf)
            active = p >= least
            off = np.where(active, p - next_one, least - p)
    size = np.linalg.norm(x, axis=1) * reach.max() + np.abs(bias).max()
    return Encoded(np.where(active, value, 0.0), np.where(active, 0.0, value), off, size)


def decode(sae: Sae, activations: Floats) -> Floats:
    """``activations`` float64 ``[n, d_sae]`` → ``[n, d_in]``."""
    return activations @ _tensor(sae, "W_dec") + _tensor(sae, "b_dec")


def _tensor(sae: Sae, name: str) -> Floats:
    return sae.tensors[name].read(()).astype(np.float64)

"""Linear probes on a worker: what ``project`` and ``probe`` reads multiply rows by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vtaps.runtime.program import Program


@dataclass(frozen=True)
class Probe:
    """``weight`` float32 ``[n, width]``, ``bias`` ``[n]`` (None: 0)."""

    weight: Tensor
    bias: Tensor | None = None


def probes(program: Program, device: torch.device) -> dict[str, dict[str, Probe]]:
    """Read → site → what its rows are multiplied by.  Raises LockError."""
    found: dict[str, dict[str, Probe]] = {}
    for name, read in program.reads.items():
        for site in read.sites if read.kind in ("project", "probe") else ():
            entry, bias = program.sites[site], None
            if read.kind == "probe":
                weight, shift = program.load_probe(read.vectors, entry)
                if entry.part is not None and not entry.part.first:
                    shift = np.zeros_like(shift)  # the sum over ranks has it once
                bias = torch.from_numpy(shift).to(device)
            else:
                weight = np.stack([program.load_vector(v, entry) for v in read.vectors])
            found.setdefault(name, {})[site] = Probe(torch.from_numpy(weight).to(device), bias)
    return found


def applied(rows: Tensor, probes: Sequence[Probe]) -> Tensor:
    """``rows`` float32 ``[n, sites, width]``, a probe a site → weight · row + bias, ``[n, sites, vectors]``."""
    weight = torch.stack([probe.weight for probe in probes])
    # A matrix product would let a row's rounding depend on how many rows there are.
    dots = torch.stack([torch.sum(rows * weight[:, v], dim=-1) for v in range(weight.shape[1])], dim=-1)
    bias = [probe.bias for probe in probes if probe.bias is not None]
    return dots + torch.stack(bias) if bias else dots

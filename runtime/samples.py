"""What a step does with the tokens that were sampled: overrides replace them, reads at ``samples`` keep them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from vtaps.runtime.fills import Fill, Replacement


def override(found: Sequence[Replacement], sampled: Tensor) -> None:
    """Write the tokens into ``sampled`` ``[requests]``, in place."""
    if not found:
        return
    rows = torch.tensor([r.row for r in found]).to(sampled.device, non_blocking=True)
    tokens = torch.tensor([r.token for r in found], dtype=sampled.dtype).to(sampled.device, non_blocking=True)
    sampled.index_copy_(0, rows, tokens)
    for replacement in found:
        replacement.live.overridden.add(replacement.step)


class Samples:
    """Copies what was sampled to the slots of a read."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[weakref.ref[Fill], Tensor]] = {}

    def keep(self, fill: Fill, memory: Tensor, start: int, sampled: Tensor) -> None:
        """``memory`` ``[slots, 1, 1]``, from the slot ``start`` on; ``sampled`` ``[requests]``."""
        known = self._rows.get(fill.name)
        if known is None or known[0]() is not fill:
            rows = torch.from_numpy(fill.rows)
            if sampled.is_cuda:
                # From other memory the copy would wait for the device.
                rows = rows.pin_memory().to(sampled.device, non_blocking=True)
            known = self._rows[fill.name] = weakref.ref(fill), rows
        rows = known[1]
        memory[start : start + len(rows), 0, 0] = sampled.index_select(0, rows).to(memory.dtype)

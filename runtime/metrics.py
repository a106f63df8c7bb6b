"""Metrics of sampled rows, on the device from their step until they leave together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vtaps.runtime.fills import MetricFill
from vtaps.runtime.program import Program


class Measured(NamedTuple):
    """One metric of ``step``: ``value`` float32 ``[rows]``, of positions that lie ``shift`` behind those of the
    fill."""

    step: int
    fill: MetricFill
    shift: int
    value: Tensor


class Metrics:
    """What has been measured and has not left yet, in order of the steps."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program = program
        # On the device once: an index from the host would wait for the device in every step.
        self._ids = {name: torch.tensor(metric.ids, device=device) for name, metric in program.metrics.items()}
        self._waiting: list[Measured] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def measure(self, fills: Sequence[MetricFill], shift: int, logits: Tensor, step: int) -> None:
        """Of ``logits`` ``[requests, vocab]`` as the model gave them; there is at least one fill."""
        rows = np.unique(np.concatenate([f.rows for f in fills]))
        picked = logits.index_select(0, torch.from_numpy(rows).to(logits.device, non_blocking=True)).float()
        total: Tensor | None = None
        for fill in fills:
            entry = self.program.metrics[fill.name]
            mine = torch.from_numpy(np.searchsorted(rows, fill.rows)).to(logits.device, non_blocking=True)
            chosen = picked[mine].index_select(1, self._ids[fill.name])
            if entry.kind == "logprob":
                if total is None:
                    total = torch.logsumexp(picked, dim=-1)
                value = chosen[:, 0] - total[mine]
            elif entry.kind == "logit_diff":
                value = chosen[:, 0] - chosen[:, 1]
            else:
                value = (picked[mine] > chosen).sum(-1).float()
            self._waiting.append(Measured(step, fill, shift, value))

    def take(self, step: int | None) -> list[Measured]:
        """Those of the steps up to ``step``, None: all; they are forgotten here."""
        taken = [m for m in self._waiting if step is None or m.step <= step]
        del self._waiting[: len(taken)]
        return taken


def deliverer(metrics: Sequence[Measured]) -> Callable[[Sequence[npt.NDArray[Any]]], None]:
    """What gives the values of ``metrics``, which come as one array, to their requests."""

    def deliver(arrays: Sequence[npt.NDArray[Any]]) -> None:
        numbers = iter(arrays[0].tolist())
        for _, fill, shift, _ in metrics:
            for live, position in zip(fill.lives, fill.positions, strict=True):
                live.metrics.setdefault(fill.name, []).append((position + shift, next(numbers)))

    return deliver

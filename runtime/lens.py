"""The logit lens: the model's own final norm and unembedding on rows of the stream, wherever they were read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vtaps.runtime.program import LockError, Program

LOGITS_MEMORY = 64 << 20
"""Bytes that float32 logits may take at once."""


@dataclass
class Lens:
    """``norm`` is called by its class's ``forward``, so that neither hooks on the module nor taps see the lens; None
    where all that is read are logits.  ``compute_logits`` may give a part of the vocabulary, from token ``first`` on:
    what is read is then of that part."""

    norm: nn.Module | None
    compute_logits: Callable[[Tensor], Tensor | None]
    rows_at_once: int = 0
    chosen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    first: Callable[[], int] = lambda: 0

    @staticmethod
    def of(
        program: Program,
        modules: Mapping[str, nn.Module],
        compute_logits: Callable[[Tensor], Tensor | None],
        first: Callable[[], int],
    ) -> Lens:
        """Raises LockError where the model has no such norm."""
        found = None if program.lens_norm is None else modules.get(program.lens_norm)
        if found is None and program.lens_norm is not None:
            raise LockError("lens", f"the model has no module {program.lens_norm}")
        return Lens(found, compute_logits, first=first)

    def read(
        self, rows: Tensor, *, top: int | None, ids: tuple[int, ...] | None, unembedded: bool = False
    ) -> dict[str, Tensor]:
        """``rows`` ``[n, width]`` in the model's dtype → ``ids`` int32 and ``logits`` float32 ``[n, k]``, most
        likely first (or in the order of ``ids``, −∞ for one of another part), and ``logsumexp`` float32 ``[n]`` over
        all of it.  ``unembedded``: the rows are logits already.

        Raises RuntimeError where this worker gets no logits.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        start = 0
        while start < rows.shape[0]:
            # One row first: the width of the logits is known only from the model's answer.
            stop = start + (self.rows_at_once or 1)
            found.append(self._some(rows[start:stop], top, ids, unembedded))
            start = stop
        chosen, logits, total = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"ids": chosen, "logits": logits, "logsumexp": total}

    def _some(
        self, rows: Tensor, top: int | None, ids: tuple[int, ...] | None, unembedded: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw: Tensor | None = rows
        if not unembedded:
            assert self.norm is not None, "a program with a lens on the stream has its norm"
            normed = type(self.norm).forward(self.norm, rows)
            raw = self.compute_logits(normed[0] if isinstance(normed, tuple) else normed)
        if raw is None:
            raise RuntimeError("the lens needs logits, and this worker computes none")
        logits = raw.float()
        if not self.rows_at_once:
            self.rows_at_once = max(1, LOGITS_MEMORY // (4 * logits.shape[-1]))
        first, count = 0 if unembedded else self.first(), logits.shape[-1]
        if ids is None:
            values, chosen = torch.topk(logits, min(top or 1, count), dim=-1)
            chosen = chosen + first
        else:
            if ids not in self.chosen:
                self.chosen[ids] = torch.tensor(ids, device=logits.device)
            chosen = self.chosen[ids].expand(logits.shape[0], len(ids))
            here = (chosen >= first) & (chosen < first + count)
            values = logits.gather(-1, (chosen - first).clamp(0, count - 1)).where(here, -torch.inf)
        return chosen.to(torch.int32), values, torch.logsumexp(logits, dim=-1)

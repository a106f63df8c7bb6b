"""The logit lens: the model's own final norm and unembedding on rows of the stream, wherever they were read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

LOGITS_MEMORY = 64 << 20
"""Bytes that float32 logits may take at once."""


@dataclass
class Lens:
    """``norm`` is called by its class's ``forward``, so that neither hooks on the module nor taps see the lens; None
    where all that is read are logits."""

    norm: nn.Module | None
    compute_logits: Callable[[Tensor], Tensor | None]
    rows_at_once: int = 0
    chosen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def read(
        self, rows: Tensor, *, top: int | None, ids: tuple[int, ...] | None, unembedded: bool = False
    ) -> dict[str, Tensor]:
        """``rows`` ``[n, width]`` in the model's dtype → ``ids`` int32 and ``logits`` float32 ``[n, k]``, most
        likely first (or in the order of ``ids``), and ``logsumexp`` float32 ``[n]`` over the whole vocabulary.
        ``unembedded``: the rows are logits already.

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
        if ids is None:
            values, chosen = torch.topk(logits, min(top or 1, logits.shape[-1]), dim=-1)
        else:
            if ids not in self.chosen:
                self.chosen[ids] = torch.tensor(ids, device=logits.device)
            chosen = self.chosen[ids].expand(logits.shape[0], len(ids))
            values = logits.gather(-1, chosen)
        return chosen.to(torch.int32), values, torch.logsumexp(logits, dim=-1)

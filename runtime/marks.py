"""Marks on the model's stream: what passed there, and pinned memory that is used again once it did."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KEPT = 8
"""Steps that are told apart: more than an engine runs ahead."""
STAGED = 4


class Marks:
    """Events after the last steps, the oldest recorded again: a new one every step costs more than the mark."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Any]] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, step: int) -> None:
        """What is on the current stream now is of the steps up to ``step``."""
        old = self._events.popleft()[1] if len(self._events) == KEPT else None
        self._events.append((step, torch.cuda.current_stream().record_event(old)))

    def after(self, step: int | None) -> Any:
        """The event of the last mark up to ``step`` (None: of the last one); None where there is none."""
        if not self._events:
            return None
        if step is None:
            return self._events[-1][1]
        # Where that one is gone, a later one says as much.
        found = self._events[0][1]
        for number, event in self._events:
            if number > step:
                break
            found = event
        return found


class Upload:
    """Copies the first rows of ``host`` int32 ``[rows, columns]`` to ``table`` of the same shape, without waiting."""

    def __init__(self, host: npt.NDArray[np.int32], table: Tensor, *, pinned: bool = True) -> None:
        self.host, self.table, self._pinned = host, table, pinned
        self._staged: deque[_Staged] = deque()

    def send(self, count: int) -> None:
        """``host`` may be written again at once: each copy leaves from memory that no other copy on its way uses."""
        if len(self._staged) < STAGED:
            memory = torch.empty(self.table.shape, dtype=self.table.dtype, pin_memory=self._pinned)
            staged = _Staged(memory, self.table)
        else:
            staged = self._staged.popleft()
            staged.event.synchronize()
        staged.cut(count)
        staged.rows[:] = self.host[:count]
        staged.to.copy_(staged.from_, non_blocking=True)
        staged.event = torch.cuda.current_stream().record_event(staged.event)
        self._staged.append(staged)


class _Staged:
    """One piece of pinned memory, with views of as many rows as it sent last."""

    def __init__(self, memory: Tensor, table: Tensor) -> None:
        self._memory, self._table, self._count = memory, table, -1
        self.event: Any = None

    def cut(self, count: int) -> None:
        if count != self._count:
            self._count = count
            self.from_, self.to = self._memory[:count], self._table[:count]
            self.rows = self.from_.numpy()

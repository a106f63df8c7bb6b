"""Stand-ins for vLLM's groups: rank 0 of one or several, no ``torch.distributed`` behind them.

What a collective gives has the right shape and no content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import parallel_state


class FakeProcessGroup:
    """Enough of a process group for layers that ask for ``size()`` and ``rank()``."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0


class FakeGroup(parallel_state.GroupCoordinator):
    """A group of ``ranks``; ``reduced`` hears of each tensor whose sum over the ranks is taken."""

    def __init__(self, name: str, ranks: int, reduced: Callable[[Any], None]) -> None:
        self.__dict__.update(
            unique_name=f"{name}:meta",
            rank=0,
            local_rank=0,
            ranks=list(range(ranks)),
            world_size=ranks,
            rank_in_group=0,
            device_index=0,
            device=torch.device("cpu"),
            device_group=FakeProcessGroup(ranks),
            cpu_group=FakeProcessGroup(ranks),
            use_device_communicator=False,
            device_communicator=None,
            mq_broadcaster=None,
            use_custom_op_call=False,
            use_cpu_custom_send_recv=False,
            reduced=reduced,
        )

    def all_reduce(self, input_: Any) -> Any:
        if self.world_size == 1:
            return input_
        self.reduced(input_)
        return torch.empty_like(input_)

    def all_gather(self, input_: Any, dim: int = -1) -> Any:
        return self._resized(input_, dim, lambda n: n * self.world_size)

    def reduce_scatter(self, input_: Any, dim: int = -1) -> Any:
        if self.world_size == 1:
            return input_
        self.reduced(input_)
        return self._resized(input_, dim, lambda n: n // self.world_size)

    def gather(self, input_: Any, dst: int = 0, dim: int = -1) -> Any:
        return self.all_gather(input_, dim)

    def broadcast(self, input_: Any, src: int = 0) -> Any:
        return input_

    def _resized(self, tensor: Any, dim: int, size: Callable[[int], int]) -> Any:
        if self.world_size == 1:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = size(shape[dim])
        return tensor.new_empty(shape)


def fake_groups(ranks: int = 1, reduced: Callable[[Any], None] = lambda _: None) -> None:
    """Every group of vLLM's is a fake: the tensor-parallel one, and those over the same ranks, of ``ranks``, the others
    of one."""
    for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP", "_EPLB", "_ETP"):
        if hasattr(parallel_state, name):
            size = ranks if name in ("_WORLD", "_TP", "_EP", "_ETP") else 1
            setattr(parallel_state, name, FakeGroup(name[1:].lower(), size, reduced))


@contextmanager
def first_layers(count: int | None) -> Iterator[None]:
    """Models are built with the first ``count`` layers of each stack, as a stage of a pipeline has some; None: all."""
    from vllm.distributed import utils

    old = utils.get_pp_indices
    if count is not None:
        utils.get_pp_indices = lambda layers, rank, size: (0, min(count, layers))
    try:
        yield
    finally:
        utils.get_pp_indices = old


def not_built(model: Any) -> set[str]:
    """The paths of layers that :func:`first_layers` left out."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return {path for path, module in model.named_modules() if isinstance(module, PPMissingLayer)}


@contextmanager
def shortened(model: Any, count: int | None) -> Iterator[None]:
    """A forward of ``model`` runs the first ``count`` layers of each stack, where it minds its stage of a pipeline."""
    held: list[tuple[Any, int]] = []
    for module in model.modules() if count is not None else ():
        end = module.__dict__.get("end_layer")
        if isinstance(end, int) and isinstance(module.__dict__.get("start_layer"), int):
            held.append((module, end))
            module.end_layer = min(count or 0, end)
    try:
        yield
    finally:
        for module, end in held:
            module.end_layer = end

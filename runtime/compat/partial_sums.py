"""Which tensors of a pass on several ranks are partial sums: each rank has a term, and the value is their sum.

A partial sum looks like any tensor.  It comes from a layer that splits what it sums over and does not reduce, goes
through operations that are linear in it, and is whole after a collective.  A tensor that a collective reduces was one,
wherever it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TOGETHER = {"add", "add_", "sub", "sub_", "cat", "stack"}
"""Partial where every operand is."""

_FIRST = {
    "_to_copy", "clone", "copy_", "div", "gather", "index", "index_select", "masked_fill", "masked_fill_", "mean",
    "mul", "neg", "sum",
}  # fmt: skip
"""Partial where one operand is, and no other."""

_LEFT = {"div", "gather", "index", "index_select", "masked_fill", "masked_fill_"}
"""Of those, the ones in which it must be the first."""


class PartialSums(TorchDispatchMode):
    """Follows partial sums through the operations of one pass; a tensor counts with all its views.

    Storages are held until the pass is over, so that none takes the identity of another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._partial: set[int] = set()
        self._reduced: set[int] = set()
        self._held: dict[int, Any] = {}

    def begins(self, value: Any) -> Any:
        """Say that the tensors of ``value`` are partial sums; returns ``value``."""
        self._partial.update(self._storage(tensor) for tensor in _tensors(value))
        return value

    def reduced(self, tensor: Any) -> None:
        """Say that the ranks' ``tensor`` are summed now."""
        self._reduced.add(self._storage(tensor))

    def seen(self, tensor: Any) -> str:
        """What :meth:`is_partial` takes once the pass is over."""
        key = self._storage(tensor)
        return f"{key}!" if key in self._partial else str(key)

    def is_partial(self, seen: str) -> bool:
        return seen.endswith("!") or int(seen) in self._reduced

    def _storage(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        self._held.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Asked before the call: an operation in place puts out what it was given.
        linear = bool(self._partial) and self._is_linear(func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        return self.begins(output) if linear else output

    def _is_linear(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket.__name__
        if name not in _TOGETHER and name not in _FIRST:
            return False
        partial = [self._storage(tensor) in self._partial for tensor in _tensors((args, kwargs))]
        if name in _TOGETHER:
            numbers = name not in ("cat", "stack") and len(partial) < 2
            return all(partial) and bool(partial) and not numbers
        if name in _LEFT and partial[:1] != [True]:
            return False
        return sum(partial) == 1


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def begin_in(sums: PartialSums, model: Any) -> None:
    """Let ``sums`` know what the layers of ``model``, its kernels already stubs, compute of their part alone."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.model_executor.layers.linear import RowParallelLinear

    def beginning(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: sums.begins(function(*args, **kwargs))

    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.tp_size > 1:
            module.quant_method.apply = beginning(module.quant_method.apply)
            if module.bias is not None and not module.skip_bias_add:
                sums.begins(module.bias)  # added on rank 0 alone
        elif isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding) and module.tp_size > 1:
            # Rows of the vocabulary that are another rank's are zeroed after the look-up.
            module.use_fused_embedding = False
            module.quant_method.embedding = beginning(module.quant_method.embedding)
        elif hasattr(module, "_forward_entry") and not module._fused_output_is_reduced:
            module._forward_entry = beginning(module._forward_entry)

"""Which columns of a location a worker of vLLM has, and the unembedding of its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vtaps.runtime.entries import LockError, Part, SiteEntry
from vtaps.runtime.parts import Block, Ranks, part
from vtaps.runtime.program import Program


def ranks_of(model: nn.Module) -> Ranks | None:
    """This worker among the others; None where it is alone."""
    from vllm.distributed import parallel_state

    group, line = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    count, stages = int(group.world_size), int(line.world_size)
    if count == stages == 1:
        return None
    unembed = Unembedding(model)
    return Ranks(
        int(group.rank_in_group),
        count,
        lambda program: _parts(program, model, count),
        unembed if count > 1 else model.compute_logits,
        (lambda: unembed.first) if count > 1 else (lambda: 0),
        int(line.rank_in_group),
        stages,
        _present(model, int(line.rank_in_group), stages),
    )


def _present(model: nn.Module, stage: int, stages: int) -> Callable[[SiteEntry], bool]:
    """Whether a stage of a pipeline runs a location's module."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.models.utils import PPMissingLayer

    modules = dict(model.named_modules())

    def present(site: SiteEntry) -> bool:
        if site.sampled:
            return stage == stages - 1
        module = modules.get(site.module)
        if module is None or isinstance(module, PPMissingLayer):
            return False
        # Where the unembedding is tied to it, the last stage has one too, and does not call it.
        return stage == 0 or not isinstance(module, VocabParallelEmbedding)

    return present


def _parts(program: Program, model: nn.Module, count: int) -> Mapping[str, Sequence[Part]]:
    """Site → what each rank has.  Raises LockError."""
    modules = dict(model.named_modules())
    found = {}
    for name, site in program.sites.items():
        if not site.shared:
            continue
        module = modules.get(site.module)
        if module is None:
            raise LockError(f"sites.{name}", f"the model has no module {site.module}")
        try:
            blocks = _blocks(module, site)
            found[name] = [part(blocks, site.columns, rank, count) for rank in range(count)]
        except ValueError as error:
            raise LockError(f"sites.{name}", f"{type(module).__name__}: {error}") from error
    return found


def _blocks(module: nn.Module, site: SiteEntry) -> list[Block]:
    """How the columns of the whole tensor are divided.  Raises ValueError where that is not known."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.attention import Attention

    known: Any = module
    whole = [(site.width, site.width)]
    if isinstance(module, linear.RowParallelLinear) and site.input is not None:
        return whole
    if site.input is None and isinstance(module, linear.QKVParallelLinear):
        q, kv = known.total_num_heads, known.total_num_kv_heads
        return [(q * known.head_size, q), (kv * known.head_size, kv), (kv * known.v_head_size, kv)]
    if site.input is None and isinstance(module, linear.MergedColumnParallelLinear):
        return [(size, size) for size in known.output_sizes]
    if site.input is None and isinstance(module, linear.ColumnParallelLinear):
        return whole
    if isinstance(module, Attention):
        size = known.head_size if site.input in ("query", "key") else known.head_size_v
        return [(site.width, site.width // size)]
    if isinstance(module, linear.LinearBase):
        raise ValueError("which columns a rank has there is not known")
    if site.heads is not None:
        return [(site.width, site.heads)]
    return whole


class Unembedding:
    """``compute_logits`` of the model without its collective: a rank's own part of the vocabulary, whatever the model
    does to its logits done to it."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.first = 0
        """The token of the first column of what came last."""
        self._model: Any = model
        self._processors: list[Any] = [m for m in model.modules() if isinstance(m, LogitsProcessor)]

    def __call__(self, rows: Tensor) -> Tensor:
        """``[n, width]`` → ``[n, tokens of this rank]``.  Raises RuntimeError where the model unembeds otherwise."""
        self.first = -1
        for processor in self._processors:
            processor._get_logits = self._own(processor._get_logits)
        try:
            logits: Tensor | None = self._model.compute_logits(rows)
        finally:
            for processor in self._processors:
                del processor._get_logits
        if self.first < 0 or logits is None:
            raise RuntimeError("a lens on several ranks needs vLLM's own unembedding, and the model has another")
        return logits

    def _own(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_logits(hidden_states: Tensor, lm_head: Any, bias: Any, skip_gather: bool = False) -> Any:
            found = lm_head.shard_indices
            self.first = int(found.org_vocab_start_index)
            return original(hidden_states, lm_head, bias, True)[..., : found.num_org_elements]

        return get_logits

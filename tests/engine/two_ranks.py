"""One rank of a model of vLLM's layers on real tensors: what every module takes and gives and every op computes.

    python -m tests.engine.two_ranks CHECKPOINT OUT RANK RANKS

The groups reduce and gather by gloo.  Weights are loaded by vLLM, so that it cuts them itself; the kernels behind
linear layers, embeddings, attention and experts, which want an engine around them, are plain torch, each on its rank's
part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 6
IDS = [7 + (i * 37) % 250 for i in range(ROWS)]


def tensors(value: Any, where: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if hasattr(value, "untyped_storage") and not isinstance(value, type):
        yield where, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors(item, (*where, i))


def groups(rank: int, ranks: int) -> None:
    import torch
    from vllm.distributed import parallel_state

    from vtaps.runtime.compat import ranks as fakes

    class Group(fakes.FakeGroup):
        def all_reduce(self, input_: Any) -> Any:
            if self.world_size == 1:
                return input_
            output = input_.clone()
            torch.distributed.all_reduce(output)
            return output

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            if self.world_size == 1:
                return input_
            parts = [torch.empty_like(input_) for _ in range(self.world_size)]
            torch.distributed.all_gather(parts, input_.contiguous())
            return torch.cat(parts, dim)

    fakes.FakeGroup = Group  # type: ignore[misc]
    fakes.fake_groups(ranks)
    for name in ("_WORLD", "_TP", "_EP"):
        group = getattr(parallel_state, name)
        group.__dict__.update(rank=rank, local_rank=rank, rank_in_group=rank)
        group.device_group.rank = group.cpu_group.rank = lambda: rank


def load(checkpoint: Path, ranks: int) -> tuple[Any, Any]:
    """The configuration, and the model on the CPU with this rank's part of the weights."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    arguments = EngineArgs(model=str(checkpoint), load_format="dummy", enforce_eager=True, dtype="float32")
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config):
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_weights(iter(load_file(checkpoint / "model.safetensors").items()))
    return config, model


def plain_kernels(model: Any) -> None:
    from torch.nn import functional
    from vllm.model_executor.layers.attention import Attention

    from vtaps.runtime.compat.abstract_pass import _like

    def attend(_: Any, layer: Any, query: Any, key: Any, value: Any, *__: Any, output: Any, **___: Any) -> Any:
        repeats, width = layer.num_heads // layer.num_kv_heads, layer.head_size
        q = query.view(-1, layer.num_heads, width)
        k, v = (x.view(-1, layer.num_kv_heads, width).repeat_interleave(repeats, 1) for x in (key, value))
        heads = functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
        output.view(-1, layer.num_heads, width).copy_(heads.transpose(0, 1))
        return output

    def experts(module: Any) -> Any:
        first, second = module.routed_experts.w13_weight, module.routed_experts.w2_weight

        def forward(hidden: Any, logits: Any, *_: Any) -> Any:
            logits = logits if module.gate is None else module.gate(hidden)[0]
            weights, chosen = logits.softmax(-1).topk(module.moe_config.experts_per_token)
            output = hidden.new_zeros(hidden.shape)
            for row, x in enumerate(hidden):
                for weight, expert in zip(weights[row], chosen[row], strict=True):
                    gate, up = (first[expert] @ x).chunk(2)
                    output[row] += weight * (second[expert] @ (functional.silu(gate) * up))
            return output

        return forward

    def linear(_: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return functional.linear(x, layer.weight, bias)

    def embedding(_: Any, layer: Any, ids: Any) -> Any:
        return functional.embedding(ids, layer.weight)

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(module, "output_size") and hasattr(module, "input_size"):
            module.quant_method = _like(method, apply=linear)
        elif method is not None and hasattr(module, "num_embeddings_per_partition"):
            module.quant_method = _like(method, embedding=embedding)
            module.use_fused_embedding = False
        if isinstance(module, Attention):
            module.impl = _like(module.impl, forward=attend)
        if hasattr(module, "_forward_entry"):
            module._forward_entry = experts(module)


def run(config: Any, model: Any) -> dict[tuple[str, str, str, tuple[int, ...]], Any]:
    """``(path, "input" | "op" | "output", name, place in a tuple) → tensor``, of the first call."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    from vtaps.runtime.compat.abstract_pass import parameter_binder
    from vtaps.runtime.compat.forwards import tap_ops

    found: dict[tuple[str, str, str, tuple[int, ...]], Any] = {}

    def keep(path: str, kind: str, name: str, value: Any) -> None:
        for where, tensor in tensors(value):
            if (path, kind, name, where) not in found:
                found[path, kind, name, where] = tensor.detach().clone()

    def hook(path: str, module: Any) -> None:
        bind = parameter_binder(module)

        def before(_: Any, args: Any, kwargs: Any) -> None:
            for name, value in bind(args, kwargs).items():
                keep(path, "input", name, value)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _, __, output: keep(path, "output", "", output))

    for path, module in model.named_modules():
        hook(path, module)
    tap_ops(model, lambda path, name, value: keep(path, "op", name, value))
    with (
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=ROWS),
        torch.inference_mode(),
    ):
        model(torch.tensor(IDS), torch.arange(ROWS))
    return found


def main(checkpoint: str, out: str, rank: str, ranks: str) -> None:
    from vtaps.runtime.compat.lean_imports import import_vllm_lean

    import_vllm_lean()
    import torch

    torch.set_num_threads(1)
    if int(ranks) > 1:
        store = f"file://{Path(out).parent / 'store'}"
        torch.distributed.init_process_group("gloo", store, rank=int(rank), world_size=int(ranks))
    groups(int(rank), int(ranks))
    config, model = load(Path(checkpoint), int(ranks))
    plain_kernels(model)
    torch.save(run(config, model), out)


if __name__ == "__main__":
    main(*sys.argv[1:])

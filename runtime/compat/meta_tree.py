"""vLLM's own module tree of a bare ``config.json``: no weights, no tokenizer, no GPU, no process group.

    python -m vtaps.runtime.compat.meta_tree CONFIG_DIR OUT.json [--dtype D]

runs in a process of its own, because the groups that vLLM's layers ask for are replaced by fakes here.
The model is built on the meta device; one abstract pass (:mod:`vtaps.runtime.compat.abstract_pass`) then says
what every module takes and gives.  Built again as one rank of two, with one layer of each kind, it says what a rank
holds of that (:mod:`vtaps.spec.shards`).
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtaps.runtime.compat.lean_imports import import_vllm_lean
from vtaps.runtime.trees import REASON, vllm_version
from vtaps.spec.op_scope import lean
from vtaps.spec.shards import RANKS, label
from vtaps.spec.snapshot import write_tree
from vtaps.spec.source import Forward
from vtaps.spec.tree import Dimensions, ModelTree, Module

if TYPE_CHECKING:
    from vtaps.runtime.compat.abstract_pass import Call, Recorded


def warm() -> None:
    """Import what every build needs, for a process that forks one for each."""
    from vtaps.runtime.compat.stand_ins import import_without_kernels

    import_without_kernels()
    for name in (
        "vllm.engine.arg_utils",
        "vllm.forward_context",
        "vllm.model_executor.model_loader.utils",
        "vtaps.runtime.compat.abstract_pass",
    ):
        import_module(name)


def _engine_config(arguments: Any, config_dir: Path, dtype: str) -> Any:
    return arguments(
        model=str(config_dir),
        tokenizer=str(config_dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=False,  # its checks are about kernels
        dtype=dtype,
    ).create_engine_config()


def meta_model(
    config_dir: Path,
    dtype: str,
    ranks: int = 1,
    layers: int | None = None,
    reduced: Callable[[Any], None] = lambda _: None,
) -> tuple[Any, Any]:
    """vLLM's engine configuration and the model of ``config_dir`` on the meta device, rank 0 of ``ranks``.

    ``layers``: the first of each stack, None for all; ``reduced`` hears of what a forward sums over the ranks.
    """
    import torch

    from vtaps.runtime.compat.stand_ins import (
        WithoutData,
        build_without_kernels,
        import_without_kernels,
        second_runner,
    )

    import_without_kernels()
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    from vtaps.runtime.compat.ranks import fake_groups, first_layers

    faults: list[Exception] = []

    def inspected(inspect: Callable[[], Any]) -> Any:
        """vLLM looks at a model class in a process of its own, which imports everything once more.  This one is that;
        what is raised there goes to vLLM's log alone."""
        try:
            return inspect()
        except Exception as fault:
            faults.append(fault)
            raise

    registry._run_in_subprocess = inspected
    try:
        config = _engine_config(EngineArgs, config_dir, dtype)
    except Exception:
        if faults:
            raise faults[-1] from None
        raise
    if ranks > 1:
        # Set here: a configuration that asks for more devices than there are is refused.
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
        config.model_config.verify_with_parallel_config(config.parallel_config)
    fake_groups(ranks, reduced)
    build_without_kernels()
    with (
        first_layers(layers),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
        WithoutData(),
        second_runner(),
    ):
        model = initialize_model(config)
    # Some layers name the CPU for a buffer; the abstract pass wants one device.
    return config, model.to("meta")


def dimensions(config: Any) -> Dimensions:
    """Sizes of the text tower, as vLLM reads them from the configuration."""
    model, text = config.model_config, config.model_config.hf_text_config
    intermediate = next(
        (
            int(value)
            for key in ("intermediate_size", "n_inner", "ffn_dim")
            if isinstance(value := getattr(text, key, None), int)
        ),
        None,
    )
    hidden = int(model.get_hidden_size())
    if intermediate is None and text.model_type == "gpt2":
        intermediate = 4 * hidden
    heads = int(getattr(text, "num_attention_heads", 0))  # a state space model has none
    return Dimensions(
        hidden=hidden,
        layers=int(text.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(model.get_head_size()),
        intermediate=intermediate,
        vocab=int(model.get_vocab_size()),
    )


def build(config_dir: Path, dtype: str = "auto") -> ModelTree:
    """The tree of the model that ``config_dir/config.json`` describes; raises whatever vLLM raises."""
    from vtaps.runtime.compat.abstract_pass import record
    from vtaps.runtime.compat.forwards import merged, read_forwards

    config, model = meta_model(config_dir, dtype)
    recorded = record(model, config)
    calls, unvalued = recorded.calls, recorded.unvalued
    unsharded = None
    if unvalued is None:
        calls, unsharded = labelled(config_dir, dtype, recorded)
    first: dict[int, str] = {}
    modules: dict[str, Module] = {}
    by_class: dict[type, str | None] = {}
    forwards: dict[str, Forward] = {}
    own: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), path)
        parameters = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
        if known != path:
            modules[path] = Module(path, type(module).__name__, parameters, same_as=known)
            continue
        call = calls.get(path)
        if type(module) not in by_class:
            read = read_forwards(module)
            by_class[type(module)] = read[0].where if read else None
            for forward in read:
                # A module's own reading of a function says more than that of one that calls it.
                if forward is read[0] and forward.where in own:
                    forwards[forward.where] = merged(forwards[forward.where], forward)
                elif forward is read[0] or forward.where not in forwards:
                    forwards[forward.where] = forward
            own.update(forward.where for forward in read[:1])
        modules[path] = Module(
            path,
            type(module).__name__,
            parameters,
            inputs=call.inputs if call else (),
            output=call.output if call else None,
            enter=call.enter if call else None,
            leave=call.leave if call else None,
            calls=call.calls if call else 0,
            forward=by_class[type(module)],
            ops=tuple(call.ops.items()) if call else (),
        )
    made = ModelTree(
        architecture=type(model).__name__,
        model_type=str(config.model_config.hf_config.model_type),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        vllm=vllm_version() or "unknown",
        dimensions=dimensions(config),
        modules=modules,
        digest="",
        unvalued=unvalued,
        forwards=forwards,
        unsharded=unsharded,
    )
    return lean(made)


def labelled(config_dir: Path, dtype: str, recorded: Recorded) -> tuple[dict[str, Call], str | None]:
    """The calls with what a rank of several holds of each value, or as they are and why the model does not run so."""
    from vtaps.runtime.compat.abstract_pass import record_ranks
    from vtaps.runtime.compat.partial_sums import PartialSums

    fault: Exception | None = None
    for layers in dict.fromkeys((recorded.kinds.count, None)):  # a model may not run with some of its layers
        sums = PartialSums()
        try:
            config, model = meta_model(config_dir, dtype, RANKS, layers, sums.reduced)
            twins = record_ranks(model, config, sums, ops=recorded.ops)
            break
        except Exception as error:  # anything vLLM raises about a model becomes one line of the tree
            fault = error
    else:
        assert fault is not None
        return recorded.calls, reason(fault)[:200]
    made: dict[str, Call] = {}
    for path, call in recorded.calls.items():
        twin = twins.get(recorded.kinds.of(path))
        inputs = dict(twin.inputs) if twin else {}
        made[path] = replace(
            call,
            inputs=tuple((name, value and label(value, inputs.get(name))) for name, value in call.inputs),
            output=call.output and label(call.output, twin.output if twin else None),
            ops={name: label(value, twin.ops.get(name) if twin else None) for name, value in call.ops.items()},
        )
    return made, None


def reason(fault: BaseException) -> str:
    """One line for a person: the text of a validation error without its frame."""
    errors = getattr(fault, "errors", None)
    text = ""
    if callable(errors):
        try:
            text = str(errors()[0]["msg"])
        except (IndexError, KeyError, TypeError):
            text = ""
    lines = [line.strip() for line in (text or str(fault)).splitlines() if line.strip()]
    if lines:
        return lines[0]
    # A bare assertion says what it asserts.
    frames = traceback.extract_tb(fault.__traceback__)
    return f"{type(fault).__name__}: {frames[-1].line}" if frames else type(fault).__name__


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vtaps.runtime.compat.meta_tree")
    parser.add_argument("config_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args(argv)
    import_vllm_lean()
    try:
        write_tree(build(arguments.config_dir, arguments.dtype), arguments.out)
    except Exception as fault:  # anything vLLM raises about a model becomes one line for the caller
        print(REASON + reason(fault), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

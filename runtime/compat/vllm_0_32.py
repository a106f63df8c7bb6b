"""Every vLLM internal that a worker with a block touches, each with a probe, and the wraps around loading.

The wraps on classes pass through for an engine that carries no block; the others are on the worker's own
runner and sampler: :mod:`.runner_v1` for vLLM's V1 model runner, :mod:`.runner_v2` for V2.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtaps.runtime.compat import breaks, prefix_cache
from vtaps.runtime.compat.parallel import ranks_of
from vtaps.runtime.hooks import InstallError
from vtaps.runtime.manifest import MANIFEST, Manifest
from vtaps.runtime.memory import Limits
from vtaps.runtime.session import Session

ADDITIONAL_CONFIG = "vtaps"
"""Key in vLLM's ``additional_config``: marks an engine with a block and salts its compile caches."""


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _load_model() -> bool:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    if "load_model" not in vars(Worker):
        return False
    if not current_platform.is_cpu():
        # Importing the CPU's worker there would put stand-ins for CUDA's events and memory into torch.
        return True
    from vllm.v1.worker.cpu_worker import CPUWorker

    # CPUWorker must inherit it, or the CPU would load without the block.
    return "load_model" not in vars(CPUWorker)


def _prepare_inputs() -> bool:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return _parameters(GPUModelRunner._prepare_inputs)[1:] == ["scheduler_output", "num_scheduled_tokens"]


def _execute_model() -> bool:
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    names = _parameters(GPUModelRunner.execute_model)[1:]
    return names == ["scheduler_output", "intermediate_tensors"] and "logits" in ExecuteModelState._fields


def _sampler() -> bool:
    from vllm.v1.sample.sampler import Sampler

    return _parameters(Sampler.sample)[1:3] == ["logits", "sampling_metadata"]


def _scheduler_output() -> bool:
    from vllm.v1.core.sched.output import SchedulerOutput

    return {"finished_req_ids", "num_scheduled_tokens"} <= set(inspect.signature(SchedulerOutput).parameters)


def _request_state() -> bool:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    fields = set(inspect.signature(CachedRequestState).parameters)
    return {"prompt_token_ids", "sampling_params", "output_token_ids"} <= fields


def _dummy_run() -> bool:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return {"num_tokens", "cudagraph_runtime_mode", "uniform_decode"} <= set(_parameters(GPUModelRunner._dummy_run))


def _compiled_root() -> bool:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

    bound_again = _parameters(Wrapper.__init__)[1:] == ["compile_prefix", "is_encoder"]
    return bound_again and {"cleanup", "original_code_object"} <= vars(Wrapper).keys()


def _v2() -> bool:
    """The V2 runner needs Triton: where there is none, it is not used either."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return True
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    fields = {"req_ids", "num_reqs", "query_start_loc_np", "num_computed_tokens_np", "prefill_len_np", "input_ids"}
    return (
        fields <= set(inspect.signature(InputBatch).parameters)
        and "dummy_run" in _parameters(GPUModelRunner.execute_model)
        and callable(getattr(GPUModelRunner, "prepare_inputs", None))
        and "cudagraph_manager" in inspect.getsource(GPUModelRunner.capture_model)
        and _parameters(Sampler.sample)[1] == "logits"
    )


def _children() -> bool:
    from vllm.v1.engine.parallel_sampling import ParentRequest

    return _parameters(ParentRequest.get_child_info) == ["self", "index"]


def _inputs() -> bool:
    from vllm.inputs.engine import tokens_input

    return "prompt_token_ids" in _parameters(tokens_input)


def _engine() -> bool:
    from vllm.v1.engine.llm_engine import LLMEngine

    wanted = ["request_id", "prompt", "params"]
    return _parameters(LLMEngine.add_request)[1:4] == wanted and callable(getattr(LLMEngine, "step", None))


SEAMS: dict[str, Callable[[], bool]] = {
    "Worker.load_model": _load_model,
    "GPUModelRunner._prepare_inputs": _prepare_inputs,
    "GPUModelRunner.execute_model and ExecuteModelState.logits": _execute_model,
    "Sampler.sample": _sampler,
    "GPUModelRunner._dummy_run": _dummy_run,
    "TorchCompileWithNoGuardsWrapper": _compiled_root,
    "the V2 model runner": _v2,
    "CompilationConfig.set_splitting_ops_for_v1 and capture_model": breaks.probe,
    "SchedulerOutput.finished_req_ids": _scheduler_output,
    "CachedRequestState": _request_state,
    "ParentRequest.get_child_info": _children,
    "vllm.inputs.engine.tokens_input": _inputs,
    "LLMEngine.add_request and step": _engine,
    "generate_block_hash_extra_keys, get_computed_blocks and finish_requests": prefix_cache.probe,
}


def probe() -> list[str]:
    """The seams that this vLLM does not have, with what went wrong; empty where all is well."""
    failing = []
    for name, test in SEAMS.items():
        try:
            if not test():
                failing.append(f"{name}: not as in vLLM 0.32")
        except (ImportError, AttributeError, TypeError) as error:
            failing.append(f"{name}: {error}")
    return failing


def install() -> None:
    """Wrap the classes, once a process.  Raises RuntimeError on a vLLM whose seams differ."""
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.load_model, "vtaps", False):
        return
    failing = probe()
    if failing:
        raise RuntimeError("this vLLM is not known: " + "; ".join(failing))
    Worker.load_model = _wrap_load_model(Worker.load_model)
    ParentRequest.get_child_info = _wrap_child_info(ParentRequest.get_child_info)
    prefix_cache.install()


def _wrap_load_model(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        expected = (self.vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG)
        if expected is None:
            original(self, *args, **kwargs)
            return
        path = Path(os.environ[MANIFEST])
        with Faults(path):
            session = Session(Manifest.read(path))
            if session.program.structure != expected:
                raise RuntimeError("the manifest belongs to another engine")
        original(self, *args, **kwargs)
        with Faults(path):
            self.vtaps_runner = attach(session, self.model_runner, path)
        self.vtaps_session = session

    load_model.vtaps = True  # type: ignore[attr-defined]
    return load_model


def _wrap_child_info(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_child_info(self: Any, index: int) -> Any:
        request_id, params = original(self, index)
        asked = (params.extra_args or {}).get("vtaps")
        if asked is not None:
            # Children share one extra_args; a worker could tell them apart only by vLLM's spelling of their ids.
            from copy import copy

            params = copy(params)
            params.extra_args = {**params.extra_args, "vtaps": {**asked, "child": index}}
        return request_id, params

    return get_child_info


def compiled() -> dict[str, int]:
    """What this process has traced, compiled, loaded from vLLM's compile cache, and captured so far.

    A model that is traced may still be compiled nowhere: vLLM keeps the whole of it and each of its parts.
    """
    from vllm.compilation.counter import compilation_counter as counter

    return {
        "traced": counter.num_aot_compiles + counter.num_backend_compilations,
        "compiled": counter.num_inductor_compiles,
        "loaded": counter.num_aot_artifacts_loaded + counter.num_compiled_artifacts_loaded,
        "captured": counter.num_cudagraph_captured,
    }


class Faults:
    """Leaves the message of a fault beside the manifest: an engine in another process reports only that it died."""

    def __init__(self, manifest: Path) -> None:
        self.path = manifest.with_suffix(f".fault-{os.getpid()}")

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and not self.path.exists():
            self.path.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def faults(manifest: Path) -> list[str]:
    """What the workers of this manifest left, and forget it."""
    found = []
    for path in sorted(manifest.parent.glob(f"{manifest.stem}.fault-*")):
        found.append(path.read_text(encoding="utf-8"))
        path.unlink()
    return found


def attach(session: Session, runner: Any, manifest: Path) -> Any:
    """Put a session to work on a runner whose model is loaded; returns what drives it there."""
    from vtaps.runtime.compat.runner_v1 import RunnerV1
    from vtaps.runtime.compat.runner_v2 import RunnerV2

    kind = RunnerV2 if hasattr(runner, "cudagraph_manager") else RunnerV1
    config, model = runner.vllm_config, runner.get_model()
    if kind is RunnerV1 and not (hasattr(runner, "_prepare_inputs") and hasattr(runner, "input_batch")):
        raise RuntimeError(f"{type(runner).__name__} is neither vLLM's V1 nor its V2 model runner")
    tokens = config.scheduler_config.max_num_batched_tokens
    limits = Limits(
        rows=max(tokens, config.compilation_config.max_cudagraph_capture_size or 0),
        requests=config.scheduler_config.max_num_seqs,
        step_rows=tokens,
    )
    inside = None if session.program.mode == "eager" else _recorded(session, model)
    session.attach(model, model.compute_logits, limits, config.model_config.dtype, inside, ranks_of(model))
    if session.breaks:
        breaks.segment(runner)
    if hasattr(runner, "model_memory_usage"):
        # What is taken between the model and the profile run would otherwise be given to the KV cache a second time.
        runner.model_memory_usage += session.device_bytes
    return kind(session, runner, manifest)


def _recorded(session: Session, model: Any) -> Callable[[str], bool]:
    """Which modules the block's operations go into: what the lock says, held against what vLLM compiles.

    Raises InstallError for a location that is not traced.
    """
    from vtaps.runtime.compat.compiled_forwards import is_compiled

    roots = [name for name, module in model.named_modules() if is_compiled(module)]
    recorded = [site for site in session.program.sites.values() if site.mode in ("recorded", "break")]
    for site in sorted(recorded, key=lambda site: site.module):
        module = site.module
        # Of a compiled module itself the forward is traced, not what is called with its input and output.
        traced = any(module.startswith(f"{root}.") if root else module for root in roots) or (
            site.op is not None and module in roots
        )
        if roots and not traced:
            raise InstallError(
                f"{module or 'the model itself'} is not inside what vLLM compiles ({', '.join(roots)}): no tap there"
            )
    modules = {site.module for site in recorded}
    return lambda module: module in modules

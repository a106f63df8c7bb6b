"""Every vLLM internal that the eager engine touches, each with a probe, and the wraps around them.

Held against vLLM 0.32's V1 model runner.  The wraps are on the worker's own runner and sampler objects, except for
two on classes, which pass through for an engine that carries no block.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.rowtable import Scheduled
from vtaps.runtime.session import MANIFEST, Manifest, Session

ADDITIONAL_CONFIG = "vtaps"
"""Key in vLLM's ``additional_config``: marks an engine with a block and salts its compile caches."""


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _load_model() -> bool:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    # CPUWorker must inherit it, or the CPU would load without the block.
    return "load_model" in vars(Worker) and "load_model" not in vars(CPUWorker)


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
    "SchedulerOutput.finished_req_ids": _scheduler_output,
    "CachedRequestState": _request_state,
    "ParentRequest.get_child_info": _children,
    "vllm.inputs.engine.tokens_input": _inputs,
    "LLMEngine.add_request and step": _engine,
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
    """Wrap the two classes, once a process.  Raises RuntimeError on a vLLM whose seams differ."""
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.load_model, "vtaps", False):
        return
    failing = probe()
    if failing:
        raise RuntimeError("this vLLM is not known: " + "; ".join(failing))
    Worker.load_model = _wrap_load_model(Worker.load_model)
    ParentRequest.get_child_info = _wrap_child_info(ParentRequest.get_child_info)


def _wrap_load_model(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        expected = (self.vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG)
        if expected is None:
            original(self, *args, **kwargs)
            return
        path = Path(os.environ[MANIFEST])
        with _Faults(path):
            session = Session(Manifest.read(path))
            if session.program.structure != expected:
                raise RuntimeError("the manifest belongs to another engine")
        original(self, *args, **kwargs)
        with _Faults(path):
            attach(session, self.model_runner, path)
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


class _Faults:
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


def attach(session: Session, runner: Any, manifest: Path) -> None:
    """Put a session to work on a V1 runner whose model is loaded."""
    if not hasattr(runner, "_prepare_inputs") or not hasattr(runner, "input_batch"):
        raise RuntimeError("the eager engine serves vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    model = runner.get_model()
    session.attach(model, model.compute_logits)
    runner._prepare_inputs = _wrap_prepare_inputs(session, runner)
    runner.execute_model = _wrap_execute_model(session, runner, manifest)
    runner.sampler.sample = _wrap_sample(session, runner.sampler.sample)


def _wrap_prepare_inputs(session: Session, runner: Any) -> Callable[..., Any]:
    original: Callable[..., Any] = runner._prepare_inputs

    @functools.wraps(original)
    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = original(scheduler_output, num_scheduled_tokens)
        session.begin(_scheduled(session, runner))
        return result

    return prepare_inputs


def _scheduled(session: Session, runner: Any) -> list[Scheduled]:
    """The step's rows in the order of the batch, new requests admitted on the way."""
    batch = runner.input_batch
    count = batch.num_reqs
    starts = batch.num_computed_tokens_cpu
    offsets = runner.query_start_loc.np
    discarded = runner.discard_request_mask.np
    shares: list[Scheduled] = []
    for number in range(count):
        request_id = batch.req_ids[number]
        if request_id not in session.table.live:
            state = runner.requests[request_id]
            params = state.sampling_params
            asked = None if params is None else (params.extra_args or {}).get("vtaps")
            session.table.admit(request_id, asked, int(batch.num_prompt_tokens[number]))
        offset, stop = int(offsets[number]), int(offsets[number + 1])
        start = int(starts[number])
        if session.table.live[request_id] is None:
            tokens = np.empty(stop - offset, np.int64)
        else:
            tokens = _tokens(runner, number, start, stop - offset)
        shares.append(Scheduled(request_id, start, tokens, offset, not discarded[number]))
    return shares


def _tokens(runner: Any, number: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Token ids of one request's rows.

    Under async scheduling the host does not know yet what the last step sampled (it holds a placeholder).
    """
    tokens: npt.NDArray[np.int64] = runner.input_batch.token_ids_cpu[number, start : start + count].astype(np.int64)
    if runner.use_async_scheduling and len(tokens) and tokens.min() < 0:
        offset = int(runner.query_start_loc.np[number])
        tokens = runner.input_ids.gpu[offset : offset + count].cpu().numpy().astype(np.int64)
    return tokens


def _wrap_execute_model(session: Session, runner: Any, manifest: Path) -> Callable[..., Any]:
    import torch

    original: Callable[..., Any] = runner.execute_model

    @functools.wraps(original)
    @torch.inference_mode()
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            session.table.finish(request_id)
        with _Faults(manifest):
            try:
                result = original(scheduler_output, *args, **kwargs)
                state = runner.execute_model_state
                session.end(None if state is None else state.logits)
            except BaseException:
                session.clear()
                raise
        return result

    return execute_model


def _wrap_sample(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        # Between sampling and the gathering of logprobs: scheduler, KV cache, text and logprobs see one token.
        sampled, processed = original(*args, **kwargs)
        session.replace(sampled)
        return sampled, processed

    return sample

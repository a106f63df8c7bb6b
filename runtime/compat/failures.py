"""Requests that failed in a worker's step, ended by the scheduler of that step: none of its tokens count.

A worker hands the faults over with what it sampled.  The scheduler ends the requests as vLLM ends one whose KV cache
could not be loaded, before it looks at the step's tokens; the driver gets the fault as the reason why it stopped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vtaps.runtime.faults import SHARED, Fault
from vtaps.runtime.session import Session

FAILED = "vtaps_failed"
Failed = Mapping[str, tuple[Fault, "int | None"]]
"""Request id → why, and the first position whose rows were not edited as they should have been."""


def probe() -> bool:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    names = ["self", "scheduler_output", "model_runner_output"]
    skipped = "if request is None or request.is_finished():"
    update: Any = Scheduler.update_from_output
    return (
        list(inspect.signature(update).parameters) == names
        and skipped in inspect.getsource(inspect.unwrap(update))
        and {"request_id", "new_token_ids", "finish_reason", "stop_reason"} <= set(EngineCoreOutput.__struct_fields__)
        and "outputs" in EngineCoreOutputs.__struct_fields__
        and not hasattr(ModelRunnerOutput, "__slots__")
        and hasattr(FinishReason, "ERROR")
        and hasattr(RequestStatus, "FINISHED_ERROR")
        and callable(getattr(KVCacheManager, "get_block_ids", None))
    )


def install() -> None:
    """Wrap the scheduler, once a process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.update_from_output, "vtaps"):
        Scheduler.update_from_output = _wrap_update(Scheduler.update_from_output)


def attach(session: Session, runner: Any) -> None:
    """Let the runner hand over what failed, with what it sampled."""
    from vllm.distributed.parallel_state import get_pp_group

    original = runner.sample_tokens
    # Of an earlier stage of a pipeline the scheduler hears nothing.
    tells = get_pp_group().is_last_rank

    @functools.wraps(original)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Under async scheduling it is inside what waits for the copy.
        output = getattr(result, "_model_runner_output", getattr(result, "model_runner_output", result))
        # An output without requests is one that all steps share.
        if (getattr(output, "req_ids", None) or not tells) and (failing := session.failing()):
            if not tells:
                fault, _ = next(iter(failing.values()))
                raise RuntimeError(f"on a stage of the pipeline that puts out no tokens: {fault}")
            setattr(output, FAILED, failing)
        return result

    runner.sample_tokens = sample_tokens


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed: Failed = getattr(model_runner_output, FAILED, {})
        if not failed:
            return original(self, scheduler_output, model_runner_output)
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        told = {**_sharing(self, failed), **{name: fault for name, (fault, _) in failed.items()}}
        ended = self.finish_requests(list(told), RequestStatus.FINISHED_ERROR)
        outputs = original(self, scheduler_output, model_runner_output)
        for request in ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=told[request.request_id].to_json(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    update_from_output.vtaps = True  # type: ignore[attr-defined]
    return update_from_output


def _sharing(scheduler: Any, failed: Failed) -> dict[str, Fault]:
    """Requests that took rows out of the prefix cache that one of ``failed`` was to edit, and had not: vLLM names a
    block when it is scheduled, before it is computed."""
    bad: dict[tuple[int, int], str] = {}
    for name, (_, since) in failed.items():
        if since is not None and name in scheduler.requests:
            bad.update(dict.fromkeys(_blocks(scheduler, name, since), name))
    found = {}
    for name in scheduler.requests if bad else ():
        taken = next((bad[block] for block in _blocks(scheduler, name, 0) if block in bad), None)
        if name not in failed and taken is not None:
            told = f"rows that it took from the prefix cache were not edited: {failed[taken][0].message}"
            found[name] = Fault(SHARED, told, failed[taken][0].definition)
    return found


def _blocks(scheduler: Any, name: str, since: int) -> list[tuple[int, int]]:
    """(group, number) of the blocks that hold a request's rows from ``since`` on."""
    manager = scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    groups = zip(scheduler.kv_cache_config.kv_cache_groups, manager.get_block_ids(name), strict=True)
    return [
        (number, block)
        for number, (group, ids) in enumerate(groups)
        for block in ids[since // group.kv_cache_spec.block_size :]
        if block != null
    ]

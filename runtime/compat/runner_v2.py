"""vLLM's V2 model runner with a block: the default on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vtaps.runtime import failing
from vtaps.runtime.compat import failures
from vtaps.runtime.compat.proof import Pass, beyond
from vtaps.runtime.live import Batch
from vtaps.runtime.session import Session


class RunnerV2:
    """Wraps a runner's methods around a session; :meth:`passes` is for the proof."""

    def __init__(self, session: Session, runner: Any, manifest: Path) -> None:
        self.session, self.runner, self.manifest = session, runner, manifest
        self.proving = False
        self._prompts: dict[str, Any] = {}
        self._began = False
        self._execute_model: Callable[..., Any] = runner.execute_model
        runner.prepare_inputs = self._wrap_prepare_inputs(runner.prepare_inputs)
        runner.execute_model = self._wrap_execute_model(runner.execute_model)
        if runner.sampler is not None:
            runner.sampler.sample = self._wrap_sample(runner.sampler.sample)
        failures.attach(session, runner)

    def _wrap_prepare_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            count = batch.num_reqs
            offsets = batch.query_start_loc_np[: count + 1].astype(np.int64)
            starts, counts = batch.num_computed_tokens_np[:count].astype(np.int64), np.diff(offsets)
            # After a preemption the prefill holds generated tokens too: what counts here is where it ends.
            sampled = starts + counts >= batch.prefill_len_np[:count]

            def tokens(number: int) -> Any:
                edges = int(offsets[number]), int(offsets[number + 1])
                return self._tokens(batch, batch.req_ids[number], int(starts[number]), *edges)

            # V2 sorts its batches.
            session.step(Batch(list(batch.req_ids), starts, counts, offsets[:-1], sampled, tokens))
            self._began = True
            return batch

        return prepare_inputs

    def _tokens(self, batch: Any, request_id: str, start: int, offset: int, stop: int) -> Any:
        """Token ids of one request's rows: the prompt's are known here, generated ones only on the device, and
        asking there waits for the step before."""
        prompt = self._prompts.get(request_id, ())
        count = stop - offset
        if start + count <= len(prompt):
            return np.asarray(prompt[start : start + count], np.int64)
        return batch.input_ids[offset:stop].cpu().numpy().astype(np.int64)

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        from vtaps.runtime.compat.vllm_0_32 import Faults

        session, faults = self.session, Faults(self.manifest)

        @functools.wraps(original)
        @torch.inference_mode()
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            session.serve()
            if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
                if not self.proving:
                    session.neutral()
                    session.passed()
                return original(scheduler_output, *args, **kwargs)
            self._began = False
            with faults:
                try:
                    self._requests(scheduler_output)
                    result = original(scheduler_output, *args, **kwargs)
                    if self._began:
                        session.end()
                except BaseException:
                    session.neutral()
                    raise
            return result

        return execute_model

    def _requests(self, scheduler_output: Any) -> None:
        """Hear of the requests that are done and of new ones.  V2 forgets a request's own data once it has it."""
        for request_id in scheduler_output.finished_req_ids:
            self.session.table.finish(request_id)
            self._prompts.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            asked = None if params is None else (params.extra_args or {}).get("vtaps")
            most = getattr(params, "max_tokens", None)
            end = {} if most is None else {"end": new.prompt_len + most - 1}
            failing.admit(self.session.table, new.req_id, asked, int(new.prompt_len), **end)
            if self.session.table.needs_tokens(new.req_id):
                self._prompts[new.req_id] = list(new.prefill_token_ids)[: new.prompt_len]

    def _wrap_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        @functools.wraps(original)
        def sample(logits: Any, *args: Any, **kwargs: Any) -> Any:
            # The logits are the model's own here; the tokens come before logprobs are gathered, so that scheduler, KV
            # cache, text and logprobs see one token.
            session.measure(logits)
            sampled, processed = original(logits, *args, **kwargs)
            session.replace(sampled)
            return sampled, processed

        return sample

    def passes(self) -> Iterator[Pass]:
        """Every shape and mode that this runner will serve: the captured ones, and beyond the largest of them."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        runner = self.runner
        manager = runner.cudagraph_manager
        most = runner.max_num_tokens
        captured = 0
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            for described in reversed(manager._capture_descs.get(mode, []) if manager is not None else []):
                captured = max(captured, described.num_tokens)
                yield Pass(mode.name, described.num_tokens, functools.partial(self._pass, described))
        for size in beyond(runner.compilation_config, captured, most):
            described = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=size, num_reqs=None)
            yield Pass("NONE", size, functools.partial(self._pass, described))

    def _pass(self, described: Any) -> None:
        """One dummy forward in the shape and mode of ``described``, whatever vLLM would choose for its size."""
        from vllm.v1.core.sched.output import SchedulerOutput

        runner = self.runner
        count = described.num_reqs or min(described.num_tokens, runner.max_num_reqs)
        each, more = divmod(described.num_tokens, count)
        batch = SchedulerOutput.make_empty()
        batch.total_num_scheduled_tokens = described.num_tokens
        batch.num_scheduled_tokens = {f"_dummy_req_{i}": each + (i < more) for i in range(count)}
        manager = runner.cudagraph_manager
        runner.kv_connector.set_disabled(True)
        manager.dispatch = lambda *args, **kwargs: described
        try:
            self._execute_model(batch, dummy_run=True)
        finally:
            del manager.dispatch
            runner.kv_connector.set_disabled(False)
            runner.execute_model_state = None

"""vLLM's V1 model runner with a block: the CPU's only one, on CUDA where the user asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vtaps.runtime.compat.proof import Pass, beyond
from vtaps.runtime.live import Batch
from vtaps.runtime.session import Session


class RunnerV1:
    """Wraps a runner's methods around a session; :meth:`passes` is for the proof."""

    def __init__(self, session: Session, runner: Any, manifest: Path) -> None:
        self.session, self.runner, self.manifest = session, runner, manifest
        self.proving = False
        self._began = False
        self._dummy_run: Callable[..., Any] = runner._dummy_run
        runner._prepare_inputs = self._wrap_prepare_inputs(runner._prepare_inputs)
        runner.execute_model = self._wrap_execute_model(runner.execute_model)
        runner._dummy_run = self._wrap_dummy_run(runner._dummy_run)
        runner.sampler.sample = wrap_sample(session, runner.sampler.sample)
        _receives(runner)

    def _wrap_prepare_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, runner = self.session, self.runner

        @functools.wraps(original)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = original(scheduler_output, num_scheduled_tokens)
            batch = runner.input_batch
            count = batch.num_reqs
            ids = list(batch.req_ids[:count])
            for number, request_id in enumerate(ids):
                if request_id not in session.table.live:
                    self._admit(request_id, int(batch.num_prompt_tokens[number]))
            starts = np.asarray(batch.num_computed_tokens_cpu[:count], np.int64)
            offsets = np.asarray(runner.query_start_loc.np[: count + 1], np.int64)
            counts = np.diff(offsets)
            kept = ~runner.discard_request_mask.np[:count]
            session.step(
                Batch(
                    ids, starts, counts, offsets[:-1], kept, lambda n: self._tokens(n, int(starts[n]), int(counts[n]))
                )
            )
            self._began = True
            return result

        return prepare_inputs

    def _admit(self, request_id: str, prompt: int) -> None:
        params = self.runner.requests[request_id].sampling_params
        asked = None if params is None else (params.extra_args or {}).get("vtaps")
        most = getattr(params, "max_tokens", None)
        end = {} if most is None else {"end": prompt + most - 1}
        self.session.table.admit(request_id, asked, prompt, **end)

    def _tokens(self, number: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Token ids of one request's rows.

        Under async scheduling the host does not know yet what the last step sampled (it holds a placeholder).
        """
        runner = self.runner
        tokens: npt.NDArray[np.int64] = runner.input_batch.token_ids_cpu[number, start : start + count].astype(np.int64)
        if runner.use_async_scheduling and len(tokens) and tokens.min() < 0:
            offset = int(runner.query_start_loc.np[number])
            tokens = runner.input_ids.gpu[offset : offset + count].cpu().numpy().astype(np.int64)
        return tokens

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        from vtaps.runtime.compat.vllm_0_32 import Faults

        session, runner, faults = self.session, self.runner, Faults(self.manifest)

        @functools.wraps(original)
        @torch.inference_mode()
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            session.serve()
            for request_id in scheduler_output.finished_req_ids:
                session.table.finish(request_id)
            self._began = False
            with faults:
                try:
                    result = original(scheduler_output, *args, **kwargs)
                    if self._began:
                        session.end()
                        state = runner.execute_model_state
                        if state is not None and state.logits is not None:
                            session.measure(state.logits)
                except BaseException:
                    session.neutral()
                    raise
            return result

        return execute_model

    def _wrap_dummy_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dummy_run(*args: Any, **kwargs: Any) -> Any:
            if not self.proving:
                self.session.serve()
                self.session.neutral()
                self.session.passed()
            return original(*args, **kwargs)

        return dummy_run

    def passes(self) -> Iterator[Pass]:
        """Every shape and mode that this runner will serve: the captured ones, and beyond the largest of them."""
        from vllm.config import CUDAGraphMode

        runner = self.runner
        most = runner.scheduler_config.max_num_batched_tokens
        captured = 0
        keys = getattr(runner.cudagraph_dispatcher, "cudagraph_keys", {}) if runner.device.type == "cuda" else {}
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            uniform = mode == CUDAGraphMode.FULL and runner.compilation_config.cudagraph_mode.separate_routine()
            for size in sorted({key.num_tokens for key in keys.get(mode, ())}):
                captured = max(captured, size)
                yield Pass(
                    mode.name,
                    size,
                    functools.partial(
                        self._dummy_run, size, cudagraph_runtime_mode=mode, uniform_decode=uniform, skip_eplb=True
                    ),
                )
        for size in beyond(runner.compilation_config, captured, most):
            run = functools.partial(self._dummy_run, size, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
            yield Pass("NONE", size, run)


def _receives(runner: Any) -> None:
    """Give a later stage of a pipeline its buffers: vLLM makes them in a dummy run, of which there is none on a CPU
    without compilation."""
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def wrap_sample(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        # Between sampling and the gathering of logprobs: scheduler, KV cache, text and logprobs see one token.
        sampled, processed = original(*args, **kwargs)
        session.replace(sampled)
        return sampled, processed

    return sample

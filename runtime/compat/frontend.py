"""vLLM's offline engine as the driver uses it: build, add, step, call the workers, close."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vtaps.runtime.compat.prefix_cache import cache_salt
from vtaps.spec.parts import ranks
from vtaps.spec.pipeline import stages

CPU_KV_CACHE = 512 << 20
"""Bytes of KV cache on a CPU where nothing says otherwise: vLLM's own default takes most of the memory."""


@dataclass(frozen=True)
class Output:
    """One finished child: ``logprobs`` of the tokens that stand in the text, where asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...] | None


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """Set variables, and put back what was there."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


CHATTER = (
    "libtcmalloc is not found in LD_PRELOAD",
    "libiomp is not found in LD_PRELOAD",
    "CPU backend doesn't allow to use `torch.set_num_threads`",
    "Enforce eager set",
    "Inductor compilation was disabled",
    "Kernel vllm.",  # … is already registered: the second engine of a process
    "The global random seed is set",
    "Triton is not installed",
    "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",  # vLLM's own
)
"""Warnings that every eager start on a CPU makes and nobody can act on."""


class _NoChatter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(CHATTER)


def quiet() -> None:
    """Let vLLM print warnings only, to stderr: its own default is a page of INFO lines on stdout.

    Whoever sets ``VLLM_LOGGING_LEVEL`` gets everything of that level.
    """
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        import vllm.logger  # noqa: F401 (sets the handlers up)

        for handler in logging.getLogger("vllm").handlers:
            handler.addFilter(_NoChatter())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())


def cores_of(count: int) -> str:
    """This process's cores, shared out among ``count`` ranks as vLLM writes it; by itself vLLM wants a memory node for
    each."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // count)
    return "|".join(",".join(str(cores[(i * each + k) % len(cores)]) for k in range(each)) for i in range(count))


class Frontend:
    """A vLLM engine of this process (``in_process``) or of a child, stepped by hand.

    Raises whatever vLLM raises.
    """

    def __init__(self, args: Mapping[str, Any], *, in_process: bool) -> None:
        self.in_process = in_process
        wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
        if is_cpu() and "VLLM_USE_AOT_COMPILE" not in os.environ:
            # On a CPU vLLM 0.32 saves a compiled model in a form that it cannot load: every start would compile anew.
            wanted["VLLM_USE_AOT_COMPILE"] = "0"
        if not in_process and not is_cpu() and "VLLM_WORKER_MULTIPROCESSING_METHOD" not in os.environ:
            # A forked process cannot use a GPU that this one has asked about, which vLLM does not always see.
            wanted["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
        workers = ranks(args) * stages(args)
        if is_cpu() and workers > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(workers)
        with environment(**wanted):
            from vllm import LLM

            self.llm = LLM(**args)
            self.engine = self.llm.llm_engine
            self.engine.get_supported_tasks()

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        asked: Mapping[str, Any] | None,
    ) -> str:
        """``asked``: what the block's worker is to know of it, with what its blocks of the KV cache are kept under
        (``kv``, see :mod:`vtaps.runtime.prefix`); None for a plain request.  Returns vLLM's own id, for :meth:`abort`.
        Raises ValueError for what vLLM refuses."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        kv = None if asked is None else asked.get("kv")
        inputs = tokens_input(list(token_ids), cache_salt=None if kv is None else cache_salt(kv))
        try:
            params = SamplingParams(
                **sampling,
                extra_args=None if asked is None else {"vtaps": dict(asked)},
                skip_reading_prefix_cache=True if kv is not None and kv["first"] is not None else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
                # vLLM copies its parameters deeply, unless nobody else has them.
                skip_clone=all(isinstance(value, _FLAT) for value in sampling.values()),
            )
            internal: str = self.engine.add_request(request_id, inputs, params)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        return internal

    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> list[tuple[str, tuple[Output, ...]]]:
        """One step; the requests that finished in it, by the id they were added under."""
        return [
            (output.request_id, tuple(_output(o) for o in sorted(output.outputs, key=lambda o: o.index)))
            for output in self.engine.step()
            if output.finished
        ]

    def abort(self, internal_ids: Sequence[str]) -> None:
        self.engine.abort_request(list(internal_ids), internal=True)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker by name."""
        return list(self.llm.collective_rpc(method, args=args))

    def report(self) -> dict[str, Any]:
        """What vLLM made of the arguments."""
        config = self.engine.vllm_config
        return {
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
            "kv_cache_blocks": config.cache_config.num_gpu_blocks,
            "kv_cache_block_size": config.cache_config.block_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "in_process": self.in_process,
            "compilation": config.compilation_config.mode.name,
            "cudagraphs": "NONE" if is_cpu() else config.compilation_config.cudagraph_mode.name,
        }

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        if self.in_process:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            del self.llm, self.engine
            cleanup_dist_env_and_memory()


_FLAT = (int, float, str, type(None))


def _output(output: Any) -> Output:
    ids = tuple(map(int, output.token_ids))
    logprobs = None
    if output.logprobs is not None:
        logprobs = tuple(float(at[t].logprob) for at, t in zip(output.logprobs, ids, strict=True))
    return Output(int(output.index), ids, output.text, output.finish_reason or "abort", logprobs)

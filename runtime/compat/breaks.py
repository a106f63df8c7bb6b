"""Breaks: Python between the parts of a captured forward.

A CUDA graph that meets a break while it is captured ends there and goes on as another one, on the same pool, stream
and error mode; replay runs graphs and calls in turn, so that attention stays inside.  In a compiled model the break is
one of vLLM's splitting operations: pieces that are captured alone never hold one.  See docs/decisions/0005-breaks.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from vtaps.runtime import ops


class SegmentedGraph:
    """Stands in for ``torch.cuda.CUDAGraph`` while a model is captured; without a break it is one graph."""

    real: Any = torch.cuda.CUDAGraph

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made = args, kwargs
        self._open: Any = None
        self._graphs: list[Any] = []
        self._steps: list[Callable[[], Any]] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's and torch's arguments hold for every part."""
        self._begun = args, kwargs
        self._begin()
        ops.cutting(self._cut)

    def capture_end(self) -> None:
        ops.cutting(None)
        if self._open is not None:  # None: a cut failed, and its error is on the way
            self._end()

    def replay(self) -> None:
        for step in self._steps:
            step()

    def __getattr__(self, name: str) -> Any:
        """What else a graph has, as its pool, is that of the first part."""
        graphs = self.__dict__.get("_graphs")
        if not graphs:
            raise AttributeError(name)
        return getattr(graphs[0], name)

    def _begin(self) -> None:
        graph = SegmentedGraph.real(*self._made[0], **self._made[1])
        args, kwargs = self._begun
        graph.capture_begin(*args, **kwargs)
        self._open = graph

    def _end(self) -> None:
        graph, self._open = self._open, None
        graph.capture_end()
        self._graphs.append(graph)
        self._steps.append(graph.replay)

    def _cut(self, location: int, x: Tensor, residual: Tensor | None) -> None:
        from vllm.utils.torch_utils import weak_ref_tensor

        try:
            self._end()
        except RuntimeError as error:
            raise RuntimeError(
                f"the CUDA graph cannot be cut at location {location}, where vLLM runs several streams: {error}"
            ) from error
        # A strong reference would keep a part of the pool for every size and location.
        kept = [None if t is None else weak_ref_tensor(t) for t in (x, residual)]
        self._steps.append(functools.partial(ops.at_break, location, *kept))
        self._begin()


def segment(runner: Any) -> None:
    """Let the graphs that ``runner`` captures be cut at breaks.  Raises RuntimeError where others could hold one."""
    from vllm.config import CompilationMode

    config = runner.vllm_config.compilation_config
    if config.mode == CompilationMode.VLLM_COMPILE and config.splitting_ops and ops.BREAK not in config.splitting_ops:
        raise RuntimeError("vLLM's splitting_ops lack the break: this engine was configured without vtaps")
    for name in ("capture_model", "profile_cudagraph_memory"):
        if hasattr(runner, name):
            setattr(runner, name, _segmented(getattr(runner, name)))


def _segmented(capture: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(capture)
    def segmented(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.cuda, "CUDAGraph", SegmentedGraph):
            return capture(*args, **kwargs)

    return segmented


@contextmanager
def splitting(broken: bool) -> Iterator[None]:
    """While an engine is configured: breaks are among its splitting operations, where it has any."""
    if not broken:
        yield
        return
    from vllm.config import CompilationConfig

    original = CompilationConfig.set_splitting_ops_for_v1

    def with_breaks(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.splitting_ops and ops.BREAK not in self.splitting_ops:
            self.splitting_ops.append(ops.BREAK)
        return result

    with patch.object(CompilationConfig, "set_splitting_ops_for_v1", with_breaks):
        yield


def probe() -> bool:
    """Whether this vLLM has what breaks lean on."""
    import inspect

    from vllm.config import CompilationConfig
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return (
        "splitting_ops" in inspect.signature(CompilationConfig).parameters
        and callable(getattr(CompilationConfig, "set_splitting_ops_for_v1", None))
        and callable(getattr(torch_utils, "weak_ref_tensor", None))
        and callable(getattr(GPUModelRunner, "capture_model", None))
    )

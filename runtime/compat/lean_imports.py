"""Importing vLLM in a process that only looks at a model: about half the time, nothing of the model changed."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def import_vllm_lean() -> None:
    """Import vLLM without what builds no model.  For a process of its own, before torch is imported."""
    # Millions of objects are made and none is garbage: the collector would look at all of them again and again.
    gc.disable()
    atexit.register(gc.freeze)  # nor at the end
    # Small helpers under @torch.compile stay plain functions: wrapping the first one imports all of inductor.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # vLLM does without where the import fails: tracing, which loads gRPC, and a patch of inductor's lowering.
    sys.modules.setdefault("opentelemetry", None)  # type: ignore[arg-type]
    absent = "torch._inductor.lowering" not in sys.modules
    if absent:
        sys.modules["torch._inductor.lowering"] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        if absent:
            # Whoever needs it later may have it.
            del sys.modules["torch._inductor.lowering"]

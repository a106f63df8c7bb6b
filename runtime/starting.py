"""What happens before an engine is there: is this vLLM known, can the lock be served, does vLLM start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtaps.runtime.compat.frontend import Frontend
from vtaps.runtime.errors import EngineError, one_line
from vtaps.runtime.forward_text import changed
from vtaps.runtime.lockfile import parse_program
from vtaps.runtime.program import LockError, Program
from vtaps.spec import vllm_version


def known_vllm() -> None:
    """Raises EngineError (VT504)."""
    found = vllm_version.installed()
    if found is None:
        raise EngineError("VT504", "vLLM is not installed; `vtaps doctor` says how to")
    if not vllm_version.supported(found[1]):
        raise EngineError("VT504", f"{found[0]} {found[1]} is not known; {vllm_version.VLLM_RANGE} is")


def served(lock: Mapping[str, Any], folder: Path) -> Program:
    """The lock as the runtime knows it.  Raises EngineError: VT607, VT505."""
    try:
        program = parse_program(lock, folder)
    except LockError as error:
        raise EngineError("VT607", f"the lock cannot be served: {error}") from error
    if (told := changed(program)) is not None:
        raise EngineError("VT505", told)
    return program


def install(manifest: Path) -> Callable[[], list[str]]:
    """Wrap vLLM; returns what tells the faults that workers of this manifest left.  Raises EngineError (VT504)."""
    from vtaps.runtime.compat import vllm_0_32

    vllm_0_32.faults(manifest)
    try:
        vllm_0_32.install()
    except RuntimeError as error:
        raise EngineError("VT504", str(error)) from error
    return lambda: vllm_0_32.faults(manifest)


def start(args: Mapping[str, Any], *, in_process: bool, faults: Callable[[], list[str]] = lambda: []) -> Frontend:
    """Raises EngineError (VT607)."""
    try:
        return Frontend(args, in_process=in_process)
    except Exception as error:
        told = faults()
        raise EngineError("VT607", told[0] if told else one_line(error)) from error

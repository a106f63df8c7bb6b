"""vLLM's arguments, as a lock asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtaps.runtime.compat.frontend import CPU_KV_CACHE, is_cpu
from vtaps.runtime.errors import EngineError
from vtaps.spec.engine_args import refusal

OURS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enforce_eager": (lambda v: v is not None, "engine.mode says it"),
    "worker_extension_cls": (bool, "the block's own methods are mixed in there"),
}
"""Arguments that the engine sets itself, beside those that ``vtaps.spec.engine_args`` refuses: a lock may be made by
hand."""


def engine_arguments(lock: Mapping[str, Any], folder: Path, *, eager: bool) -> dict[str, Any]:
    """vLLM's arguments as the lock asks for them, without the block: what a plain engine takes.

    ``eager`` runs the model without compilation and CUDA graphs; otherwise both are as the user configured them.
    Raises EngineError (VT503, VT506) for a setting that does not go with this engine.
    """
    model = lock["model"]
    asked = dict(lock.get("engine", {}).get("vllm") or {})
    for name, value in asked.items():
        wrong, reason = OURS.get(name, (lambda _: False, ""))
        refused = ("VT503", reason) if wrong(value) else refusal(name, value)
        if refused is not None:
            raise EngineError(refused[0], f"engine.vllm.{name}: {value!r} does not go with this engine: {refused[1]}")
    args: dict[str, Any] = {
        "model": resolve_path(model["path"], folder),
        "dtype": model.get("dtype") or "auto",
        **({"enforce_eager": True} if eager else {}),
        "enable_prefix_caching": False,
        "use_tqdm_on_load": False,
    }
    if model.get("tokenizer"):
        args["tokenizer"] = resolve_path(model["tokenizer"], folder)
    if model.get("revision"):
        args["revision"] = model["revision"]
    args.update(asked)
    if is_cpu() and not {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"} & asked.keys():
        args["kv_cache_memory_bytes"] = CPU_KV_CACHE
        # -1 is vLLM's "as long as the KV cache holds, at most the model's own".
        args.setdefault("max_model_len", -1)
    return args


def resolve_path(path: str, folder: Path) -> str:
    """A directory relative to ``folder``, or a hub id as it is."""
    local = (folder / Path(path).expanduser()).resolve()
    return str(local) if local.exists() else path

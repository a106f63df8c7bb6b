"""vLLM's prefix cache with blocks kept under what edited them: in the process of the scheduler.

Without these wraps a request with edits has a salt of its own over all of them, and one that reads rows of its prompt
looks nothing up: less is shared, and nothing is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vtaps.runtime.prefix import Said, block_key, first_edited, salt

_KEY = "cache_salt"


def probe() -> bool:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    hasher = inspect.getsource(kv_cache_utils.get_request_block_hasher)
    keys = inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
    lookup = inspect.getsource(KVCacheManager.get_computed_blocks)
    names = ["request", "start_token_idx", "end_token_idx", "start_mm_idx"]
    wrapped: Any = kv_cache_utils.generate_block_hash_extra_keys
    return (
        list(inspect.signature(wrapped).parameters) == names
        and "generate_block_hash_extra_keys(" in hasher
        and hasattr(block_pool, "generate_block_hash_extra_keys")
        and (hasattr(wrapped, "__wrapped__") or f'("{_KEY}", request.{_KEY})' in keys)
        and "request.num_tokens - 1" in lookup
        and list(inspect.signature(Scheduler.finish_requests).parameters) == ["self", "request_ids", "finished_status"]
        and callable(getattr(KVCacheManager, "evict_blocks", None))
        and callable(getattr(KVCacheManager, "get_block_ids", None))
    )


def install() -> None:
    """Wrap what names and looks up blocks, once a process."""
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(kv_cache_utils.generate_block_hash_extra_keys, "vtaps"):
        return
    keys = _wrap_keys(kv_cache_utils.generate_block_hash_extra_keys)
    kv_cache_utils.generate_block_hash_extra_keys = keys
    block_pool.generate_block_hash_extra_keys = keys
    KVCacheManager.get_computed_blocks = _wrap_lookup(KVCacheManager.get_computed_blocks)
    Scheduler.finish_requests = _wrap_finish(Scheduler.finish_requests)


def cache_salt(kv: Said) -> str | None:
    """A request's salt for a scheduler without the wraps, joined to the user's own."""
    return "/".join(s for s in (kv.get("salt"), salt(kv)) if s) or None


def _asked(request: Any) -> Mapping[str, Any] | None:
    params = request.sampling_params
    asked = None if params is None else (params.extra_args or {}).get("vtaps")
    return asked if asked is not None and asked.get("kv") is not None else None


def _wrap_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, index = original(request, start_token_idx, end_token_idx, start_mm_idx)
        asked = _asked(request)
        if asked is None:
            return keys, index
        kv = asked["kv"]
        kept = [k for k in keys or () if k[0] != _KEY]
        if start_token_idx == 0 and kv.get("salt"):
            kept.append((_KEY, kv["salt"]))
        tokens = request.all_token_ids[start_token_idx:end_token_idx]
        own = block_key(kv, start_token_idx, tokens, int(asked.get("child", 0)))
        if own is not None:
            kept.append(("vtaps", own))
        return tuple(kept) or None, index

    generate_block_hash_extra_keys.vtaps = True  # type: ignore[attr-defined]
    return generate_block_hash_extra_keys


class _Upto:
    """A request as the lookup of cached blocks sees it, where rows from ``first`` on have to be computed."""

    def __init__(self, request: Any, first: int) -> None:
        self._request = request
        self.num_tokens = min(request.num_tokens, first + 1)
        self.skip_reading_prefix_cache = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any) -> Any:
        asked = _asked(request)
        first = None if asked is None else asked["kv"]["first"]
        if first is None or request.sampling_params.prompt_logprobs is not None:
            return original(self, request)
        return original(self, _Upto(request, int(first)))

    return get_computed_blocks


def _wrap_finish(original: Callable[..., Any]) -> Callable[..., Any]:
    """What an aborted request edited is dropped: it may have been aborted because an edit did not act."""

    @functools.wraps(original)
    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        names = list(self.requests if request_ids is None else request_ids)
        for name in names:
            request = self.requests.get(name)
            asked = None if request is None or request.is_finished() else _asked(request)
            if asked is not None and asked["kv"]["edits"]:
                self.kv_cache_manager.evict_blocks(_edited_blocks(self, request, asked["kv"]))
        return original(self, None if request_ids is None else names, finished_status)

    return finish_requests


def _edited_blocks(scheduler: Any, request: Any, kv: Said) -> set[int]:
    """The blocks of a request from the first edited row on, in every group of layers."""
    first, found = first_edited(kv), set()
    specs = scheduler.kv_cache_config.kv_cache_groups
    for group, ids in zip(specs, scheduler.kv_cache_manager.get_block_ids(request.request_id), strict=True):
        found |= set(ids[first // group.kv_cache_spec.block_size :])
    return found

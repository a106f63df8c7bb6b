"""Which of vLLM's engine arguments vtaps serves: those that leave the rows of a request what they are.

An argument that is not named here is refused unless it has vLLM's own default (VT506): nobody has shown that rows are
right under it.  Where it is known why they would not be, :data:`vtaps.spec.engine_args.REFUSED` says so (VT503).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOADED = """
    allow_deprecated_quantization code_revision download_dir generation_config hf_token ignore_patterns load_format
    max_parallel_loading_workers model_loader_extra_config override_generation_config pt_load_map_location quantization
    quantization_config safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    served_model_name tokenizer_mode tokenizer_revision trust_remote_code use_tqdm_on_load
"""
_SCHEDULED = """
    enable_chunked_prefill long_prefill_token_threshold long_prefill_token_threshold_adaptive max_logprobs max_model_len
    max_num_batched_tokens max_num_scheduled_tokens max_num_seqs performance_mode scheduler_reserve_full_isl
    scheduling_policy seed stream_interval watermark
"""
_CACHED = """
    block_size disable_cascade_attn disable_hybrid_kv_cache_manager disable_sliding_window enable_prefix_caching
    gpu_memory_utilization kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes mamba_block_size
    mamba_cache_dtype mamba_ssm_cache_dtype num_gpu_blocks_override prefix_caching_hash_algo
"""
_COMPUTED = """
    attention_backend attention_config compilation_config cudagraph_capture_sizes enable_flashinfer_autotune
    gdn_prefill_backend ir_op_priority kda_decode_backend kda_prefill_backend kernel_config linear_backend mamba_backend
    mamba_config mamba_ssu_algorithm max_cudagraph_capture_size moe_backend optimization_level use_fp64_gumbel
"""
_WORKERS = """
    cpu_distributed_timeout_seconds device_ids disable_custom_all_reduce distributed_timeout_seconds master_addr
    master_port numa_bind numa_bind_cpus numa_bind_nodes pipeline_parallel_size tensor_parallel_size
"""
_WITHOUT_IMAGES = """
    allowed_local_media_path allowed_media_domains interleave_mm_strings language_model_only limit_mm_per_prompt
    media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_hasher_algorithm mm_processor_cache_gb
    mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb skip_mm_profiling
"""
_WATCHED = """
    aggregate_engine_logging collect_detailed_traces cudagraph_metrics custom_histogram_buckets disable_log_stats
    enable_logging_iteration_details enable_mfu_metrics jit_monitor_mode jit_monitor_verbose kv_cache_metrics
    kv_cache_metrics_sample log_config_file log_level logging_config otlp_traces_endpoint profiler_config
    show_hidden_metrics_for_version
"""

KINDS: dict[str, tuple[str, ...]] = {
    what: tuple(names.split())
    for what, names in {
        "what is loaded, and from where": _LOADED,
        "how many requests and tokens are in a step": _SCHEDULED,
        "what is kept of them": _CACHED,
        "which kernels and graphs compute": _COMPUTED,
        "how many workers, and where": _WORKERS,
        "images, which no prompt of a spec has": _WITHOUT_IMAGES,
        "logs and metrics": _WATCHED,
    }.items()
}
"""What an argument says → the arguments that are served, whatever their value."""

SERVED = frozenset(name for names in KINDS.values() for name in names)

VALUES: dict[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "distributed_executor_backend": ("uni", "mp"),
    "model_impl": ("auto", "vllm"),
    "runner": ("auto", "generate"),
}
"""Arguments that are served with some values."""


def proved(name: str, value: Any, rule: Mapping[str, Any]) -> bool:
    """Whether vtaps serves ``name: value``; ``rule``: the argument's entry in the table of vLLM's arguments."""
    if name in SERVED or value is None or value in VALUES.get(name, ()):
        return True
    return bool("default" in rule and value == rule["default"]) or ("default" not in rule and not value)

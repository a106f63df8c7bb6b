"""What vLLM's attention layers do with queries and keys, as the layers themselves say it."""

from __future__ import annotations

from typing import Any

from torch import nn


def facts(module: nn.Module | None) -> dict[str, Any]:
    """``heads``, ``kv_heads``, ``head_size``, ``scale``, ``softcap`` and ``window`` (0 for none) of an attention layer;
    or ``refused``: why its probabilities are not known from its queries and keys."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    if type(module) is not Attention:
        return {"refused": f"{type(module).__name__} is an attention of another kind"}
    assert module is not None
    impl: Any = module.impl
    if getattr(impl, "sinks", None) is not None:
        return {"refused": "its attention has sinks"}
    if getattr(impl, "alibi_slopes", None) is not None:
        return {"refused": "its attention adds biases by position (ALiBi)"}
    if module.attn_type != AttentionType.DECODER:
        return {"refused": f"it is {module.attn_type} attention"}
    if not hasattr(impl, "scale"):
        return {"refused": f"{type(impl).__name__} does not say its scale"}
    return {
        "heads": int(module.num_heads),
        "kv_heads": int(module.num_kv_heads),
        "head_size": int(module.head_size),
        "scale": float(impl.scale),
        "softcap": float(getattr(impl, "logits_soft_cap", None) or 0.0),
        "window": int(module.sliding_window or 0),
    }

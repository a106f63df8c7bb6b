"""A small configuration for each of vLLM's text-generation architectures.

The sizes are :data:`SMALL`, as far as the configuration's class knows them; :data:`TABLE` adds what an architecture
needs besides: what published checkpoints state and the class has no default for, patterns of layers that fit four
layers, and the type of configuration where transformers does not name it.  An architecture whose class of
configuration comes with the checkpoint has its fields here alone (:data:`OWN`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

LAYERS = 4

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 32),
    "num_key_value_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "vocab_size": 320,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

OWN: dict[str, Any] = {
    **{
        name: SMALL[name]
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
        )
    },
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What a configuration states whose class is in no package."""

MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}

MLA: dict[str, Any] = {
    name: SMALL[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}


@dataclass(frozen=True)
class Entry:
    """``model_type`` where transformers does not say it; ``fields`` come before those of :data:`SMALL`."""

    model_type: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def _entry(model_type: str | None = None, **fields: Any) -> Entry:
    return Entry(model_type, fields)


_DENSE = ["full_attention"] * LAYERS
_SPARSE: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 16}
_STEP: dict[str, Any] = {"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 64, "share_expert_dim": 64}
_GLM: dict[str, Any] = {
    "padded_vocab_size": 320, "kv_channels": 32, "multi_query_group_num": 2,
    "original_rope": True, "tie_word_embeddings": False,
}  # fmt: skip
_LONGCAT: dict[str, Any] = {
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_num": 4, "zero_expert_type": "identity",
    "expert_ffn_hidden_size": 64,
}  # fmt: skip
_INKLING: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 2, "shared_expert_sink": True, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "dense_mlp_idx": 1, "use_sconv": True, "local_layer_ids": [0, 1],
}  # fmt: skip
_INKLING_SIZES = {name: value for name, value in OWN.items() if name not in ("rope_theta", "tie_word_embeddings")}
_MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1, 1, 0], "layernorm_epsilon": 1e-5, "moe_layer_freq": [0, 1, 1, 1],
    "sliding_window_size": 64, "swa_head_dim": 32, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
}  # fmt: skip
_PANGU: dict[str, Any] = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "router_enable_expert_bias": True,
}  # fmt: skip
_BLOCK = {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"no_op": False, "ffn_mult": 2.0}}
_NO_ATTENTION = {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.0}}
_NO_FFN = {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": True}}

TABLE: dict[str, Entry] = {
    "AfmoeForCausalLM": _entry(score_func="sigmoid", n_group=1, topk_group=1, route_norm=True, route_scale=1.0),
    "BailingMoeForCausalLM": _entry("bailing_moe", **MOE, use_bias=False, use_qkv_bias=False, embedding_dropout=0.0),
    "BailingMoeV2_5ForCausalLM": _entry(
        "bailing_moe_linear", **MOE, **MLA, layer_group_size=4, score_function="sigmoid", n_group=1, topk_group=1,
        moe_router_enable_expert_bias=True, use_qk_norm=True, group_norm_size=1, use_bias=False, use_qkv_bias=False,
    ),
    "BailingMoeV2ForCausalLM": _entry(
        "bailing_moe", **MOE, use_bias=False, use_qkv_bias=False, embedding_dropout=0.0, use_qk_norm=True,
        use_rmsnorm=True, score_function="sigmoid", moe_router_enable_expert_bias=True, n_group=1, topk_group=1,
    ),
    "BailingMoeV3ForCausalLM": _entry(
        "bailing_moe_v3", **MOE, **MLA, layer_group_size=4, n_group=1, topk_group=1, use_bias=False,
        short_conv_kernel_size=4, moe_shared_expert_intermediate_size=64, no_kda_lora=True,
    ),
    "ChatGLMForConditionalGeneration": _entry("chatglm", **_GLM),
    "ChatGLMModel": _entry("chatglm", **_GLM),
    "DbrxForCausalLM": _entry(
        attn_config={"model_type": "", "clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"model_type": "", "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "DeciLMForCausalLM": _entry("nemotron-nas", block_configs=[_BLOCK, _NO_ATTENTION, _NO_FFN, _BLOCK]),
    "DeepseekForCausalLM": _entry(
        "deepseek", n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64,
        first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, scoring_func="softmax",
    ),
    "DeepseekV32ForCausalLM": _entry(**_SPARSE),
    "DeepseekV4ForCausalLM": _entry(
        **OWN | {"head_dim": 512}, **_SPARSE, compress_ratios=[1, 4, 4, 128], hc_eps=1e-6, hc_mult=4,
        hc_sinkhorn_iters=2, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2,
        moe_intermediate_size=64, num_hash_layers=1, o_groups=2, o_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=64,
        sliding_window=64, swiglu_limit=10.0, routed_scaling_factor=1.0, scoring_func="sqrtsoftplus",
        topk_method="noaux_tc", compress_rope_theta=10000.0,
    ),
    "ExaoneForCausalLM": _entry("exaone", activation_function="silu", layer_norm_epsilon=1e-5, num_layers=LAYERS),
    "ExaoneMoEForCausalLM": _entry("exaone_moe"),
    "Gemma3nForCausalLM": _entry(
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=320,
    ),
    "Glm4MoeForCausalLM": _entry(head_dim=32),
    "Glm4MoeLiteForCausalLM": _entry(first_k_dense_replace=1),
    "Glm5NextForCausalLM": _entry(
        "glm5_next_text", **_SPARSE, mhc=True, mla_use_nope=True, indexer_rope_interleave=False,
        scoring_func="sigmoid", topk_method="noaux_tc", num_key_value_heads=4, qk_rope_head_dim=0, head_dim=0,
        linear_head_dim=32, linear_num_heads=4,
    ),
    "GlmMoeDsaForCausalLM": _entry(**_SPARSE),
    "GPT2LMHeadModel": _entry("gpt2"),
    "GPTJForCausalLM": _entry(rotary_dim=16),
    "GraniteMoeHybridForCausalLM": _entry(layer_types=["mamba", "mamba", "attention", "mamba"]),
    "HCXVisionV2ForCausalLM": _entry(
        "hyperclovax_vision_v2", text_config={"model_type": "hyperclovax", **OWN},
        vision_config={"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128},
    ),
    "HYV3ForCausalLM": _entry(first_k_dense_replace=1, expert_hidden_dim=64, route_norm=True),
    "InklingForCausalLM": _entry("inkling_model", **_INKLING),
    "InklingForConditionalGeneration": _entry(text_config={**_INKLING_SIZES, **_INKLING}),
    "InternLM2ForCausalLM": _entry("internlm2", bias=False),
    "InternLM3ForCausalLM": _entry("internlm3", bias=False, qkv_bias=False),
    "IQuestCoderForCausalLM": _entry("iquestcoder"),
    "IQuestLoopCoderForCausalLM": _entry(
        "iquestloopcoder", loop_num=2, loop_window_size=64, max_window_layers=LAYERS,
    ),
    "JambaForCausalLM": _entry(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    ),
    "K2HorizonForCausalLM": _entry(
        "k2_horizon", **MOE, attention_bias=False, attention_gate_func="softplus", decoder_sparse_step=1,
        layernorm_num_groups=4, mlp_only_layers=[0], moe_gate_bias=True, mova_num_experts=4,
        mova_num_experts_per_tok=2, query_key_norm=True, rope_head_dim=32, router_scaling_factor=1.0,
        router_score_func="sigmoid",
    ),
    "KimiLinearForCausalLM": _entry(
        num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1, q_lora_rank=None, mla_use_nope=True,
        linear_attn_config={
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 32, "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    ),
    "Lfm2ForCausalLM": _entry(block_dim=128, conv_dim=128, layer_types=["conv", "conv", "full_attention", "conv"]),
    "Lfm2MoeForCausalLM": _entry(layer_types=["conv", "conv", "full_attention", "conv"]),
    "Llama4ForCausalLM": _entry("llama4_text"),
    "LLaMAForCausalLM": _entry("llama"),
    "LongcatFlashForCausalLM": _entry(**_LONGCAT),
    "LongcatFlashNgramForCausalLM": _entry(
        "longcat_flash", **_LONGCAT, ngram_vocab_size_ratio=2, emb_split_num=2, emb_neighbor_num=2,
    ),
    "Mamba2ForCausalLM": _entry(num_heads=8, n_groups=1, state_size=16),
    "MiMoForCausalLM": _entry("mimo", attention_bias=True, num_nextn_predict_layers=1),
    "MiMoV2FlashForCausalLM": _entry(**_MIMO),
    "MiMoV2ForCausalLM": _entry("mimo_v2_flash", **_MIMO),
    "MiniCPMForCausalLM": _entry("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=12.0),
    "MiniMaxM2ForCausalLM": _entry(rotary_dim=16, use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True),
    "MiniMaxM3SparseForCausalLM": _entry(
        "minimax_m3_text", hidden_act="swigluoai", swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0,
        num_local_experts=8, num_experts_per_tok=2, n_shared_experts=1, scoring_func="sigmoid", use_routing_bias=True,
        routed_scaling_factor=2.0, use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head",
        attention_output_gate=False, moe_layer_freq=[0, 1, 1, 1], rotary_dim=16, partial_rotary_factor=0.5,
        dense_intermediate_size=256, shared_intermediate_size=64,
    ),
    "MistralLarge3ForCausalLM": _entry("deepseek_v3"),
    "MuseGlimmerForCausalLM": _entry("muse_glimmer_text"),
    "NemotronHPuzzleForCausalLM": _entry("nemotron_h"),
    "OrionForCausalLM": _entry("orion"),
    "PanguEmbeddedForCausalLM": _entry("PanguEmbedded", bias=True),
    "PanguProMoEV2ForCausalLM": _entry(
        "PanguProMoE", **_PANGU, param_sink_number=8, v_channels=32, qk_nope_dim=32, qk_rope_dim=16,
    ),
    "PanguUltraMoEForCausalLM": _entry("pangu_ultra_moe", **_PANGU, **MLA, sandwich_norm=True),
    "Param2MoEForCausalLM": _entry(
        "param2moe", **MOE, rope_scaling=None, score_function="sigmoid", n_group=1, topk_group=1, use_qk_norm=True,
    ),
    "PhiMoEForCausalLM": _entry("phimoe"),
    "Plamo3ForCausalLM": _entry(
        "plamo3", layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_local_theta=10000,
        interleaved_sliding_window=[64, 64, 64, None],
    ),
    "Qwen3_5ForCausalLM": _entry("qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": _entry("qwen3_5_moe_text"),
    "Qwen4ExpForCausalLM": _entry(
        "qwen4_exp_text", output_gate_type="sigmoid", linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=4, linear_num_value_heads=4, hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=64, indexer_budget=16, indexer_compress_ratio=4, ngram_vocab_size_base=512,
        split_ngram_parts=8,
    ),
    "Rnj1ForCausalLM": _entry(
        "rnj1", attention_bias=False, final_logit_softcapping=None, hidden_activation="gelu_pytorch_tanh",
        layer_types=_DENSE, query_pre_attn_scalar=32, sliding_window=None,
    ),
    "SarvamMLAForCausalLM": _entry("sarvam_mla", **MOE, **MLA | {"q_lora_rank": None}, n_group=1, topk_group=1),
    "SarvamMoEForCausalLM": _entry(
        "sarvam_moe", **MOE, n_group=1, topk_group=1, use_qk_norm=True, use_rmsnorm=True, embedding_dropout=0.0,
        use_bias=False, use_qkv_bias=False,
    ),
    "SolarForCausalLM": _entry("solar", bskcn_1=[1], bskcn_2=[1], bskcn_3=[2], bskcn_4=[3], bskcn_tv=[0.9, 0.8]),
    "Step1ForCausalLM": _entry("step1"),
    "Step3p5ForCausalLM": _entry(
        "step3p5", **_STEP, moe_layers_enum="1,2,3", num_attention_groups=2, att_impl_type="GQA",
        attention_other_setting=None, layer_types=_DENSE, need_fp32_gate=True, norm_expert_weight=True,
        use_moe_router_bias=True, moe_router_scaling_factor=1.0,
    ),
    "Step3TextForCausalLM": _entry(
        "step3_text", **_STEP, share_q_dim=64, norm_expert_weight=False, moe_layers_enum="1,2,3",
    ),
    "TeleChat2ForCausalLM": _entry(
        "telechat", n_head=4, bias=False, n_layer=LAYERS, ffn_hidden_size=256, layer_norm_epsilon=1e-5,
    ),
    "TeleChat3ForCausalLM": _entry("telechat3"),
    "TeleFLMForCausalLM": _entry("teleflm", use_mup=True, mup_scale_factor=1.0, output_mult=1.0, input_mult=1.0),
    "Zamba2ForCausalLM": _entry(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"]),
}  # fmt: skip


def config_of(architecture: str, model_type: str, known: Collection[str] | None) -> dict[str, Any]:
    """``config.json`` of an architecture; ``known`` are the fields of its configuration's class, None without one."""
    entry = TABLE.get(architecture, Entry())
    sizes = OWN if known is None else {name: value for name, value in SMALL.items() if name in known}
    return {"architectures": [architecture], "model_type": model_type, **sizes, **entry.fields}

# SPDX-License-Identifier: Apache-2.0
"""Settings of small models of every family that build in transformers, of dimensions that divide
nothing. Data only: `testing` builds the models."""

from typing import Any

_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_INNER = {"moe_intermediate_size": 36}
_SHARED = {"shared_expert_intermediate_size": 44}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}
_GATED_DELTA = {
    "head_dim": 24,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 20,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_LATENT = {
    "kv_lora_rank": 28,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_key_value_heads": 6,
}
_WITHOUT_Q_RANK = {key: value for key, value in _LATENT.items() if key != "q_lora_rank"}

# Per family, what a small random model needs besides `testing.ODD_DIMENSIONS`; None leaves a key
# out.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 23},
    "qwen2": {},
    "qwen3": {"head_dim": 20},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": _GRANITE,
    "gemma3_text": {
        "head_dim": 20,
        "sliding_window": 23,
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 7,
        "final_logit_softcapping": 30.0,
    },
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": _EXPERTS,
    "granitemoe": {**_LOCAL_EXPERTS, **_GRANITE},
    "qwen2_moe": {**_EXPERTS, **_INNER, **_SHARED, "mlp_only_layers": [1]},
    "qwen3_moe": {
        **_EXPERTS,
        **_INNER,
        "head_dim": 20,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_ROUTED_EXPERTS,
        **_INNER,
        "head_dim": 20,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.4,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        **_ROUTED_EXPERTS,
        **_INNER,
        **_LATENT,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **_ROUTED_EXPERTS,
        **_INNER,
        **_LATENT,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {**_LOCAL_EXPERTS, "head_dim": 20, "sliding_window": 23},
    "minimax_m2": {**_LOCAL_EXPERTS, "head_dim": 20, "rotary_dim": 10},
    "ernie4_5_moe": {
        **_INNER,
        "moe_num_experts": 12,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
    },
    "qwen3_next": {**_EXPERTS, **_INNER, **_SHARED, **_GATED_DELTA},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_INNER, **_SHARED, **_GATED_DELTA},
    "granitemoehybrid": {
        **_LOCAL_EXPERTS,
        **_MAMBA,
        **_GRANITE,
        "mamba_expand": 2,
        "shared_intermediate_size": 44,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        **_ROUTED_EXPERTS,
        **_INNER,
        "head_dim": 20,
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 44,
    },
    "lfm2_moe": {
        **_EXPERTS,
        **_INNER,
        "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        **_LOCAL_EXPERTS,
        **_INNER,
        **_WITHOUT_Q_RANK,
        "n_group": 3,
        "topk_group": 2,
        "linear_head_dim": 12,
        "linear_num_heads": 6,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"]
        + ["linear_attention"],
    },
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 120,
        "head_dim": 20,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.4],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    },
}

_VISION = {"hidden_size": 24, "intermediate_size": 36}
_GRID_VISION = {
    **_VISION,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 60,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_GRID_IDS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}

# Per multimodal model type: the family of its text part, other settings of that, and its own.
# transformers' multimodal gemma3 does without the final soft cap that its text model has.
MULTIMODAL_CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"final_logit_softcapping": None},
        {
            "vision_config": {
                **_VISION,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 5,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {}, {"vision_config": _GRID_VISION, **_GRID_IDS}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, {"vision_config": _GRID_VISION, **_GRID_IDS}),
}

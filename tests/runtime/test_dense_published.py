# SPDX-License-Identifier: Apache-2.0
"""Configurations of published dense models: read without a key left, shapes counted, windows,
ropes and multipliers where they belong."""

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch

from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.rope import LinearScaling, Llama3Scaling

BOOKKEEPING: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-4B": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "granite-3.3-2b": {
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-4b": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
}
BILLIONS = {
    "Llama-3.1-8B": 8.03,
    "Mistral-7B-v0.1": 7.24,
    "Qwen2.5-0.5B": 0.49,
    "Qwen3-4B": 4.02,
    "SmolLM3-3B": 3.08,
    "granite-3.3-2b": 2.53,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
}


def spec_of(name: str) -> ModelSpec:
    return read_spec({**BOOKKEEPING, **PUBLISHED[name]})


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    return [x.mixer for x in spec.layers if isinstance(x.mixer, AttentionSpec)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_shapes_of_transformers(name: str) -> None:
    """Oracle: transformers' model of the same configuration on the meta device, number by number
    of its state, and the published size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = PUBLISHED[name]
    spec = spec_of(name)
    with torch.device("meta"):
        text = AutoConfig.for_model(**config.get("text_config", config))
        state = AutoModelForCausalLM.from_config(text).state_dict()
    if spec.tied_head:
        del state["lm_head.weight"]
    ours = sum(prod(shape) for shape in spec.parameter_shapes().values())
    assert ours == sum(tensor.numel() for tensor in state.values())
    assert round(ours / 1e9, 2) == BILLIONS[name]


def test_windows_and_ropes_lie_in_the_layers_that_have_them() -> None:
    """Oracle: the models' cards: gemma 3 has five local layers for a global one, of another rope;
    SmolLM3 no rope in every fourth layer; Mistral 7B a window of 4,096 in all."""
    small, large = attentions(spec_of("gemma-3-1b")), attentions(spec_of("gemma-3-4b"))
    assert [x.window for x in small[:7]] == [512] * 5 + [None, 512]
    assert {x.window for x in large} == {1024, None} and large[5].window is None
    for mixers, scaling in ((small, None), (large, LinearScaling(8.0))):
        local, full = mixers[0].rope, mixers[5].rope
        assert local is not None and full is not None
        assert (local.theta, local.scaling) == (1e4, None)
        assert (full.theta, full.scaling) == (1e6, scaling)
    ropes = [x.rope for x in attentions(spec_of("SmolLM3-3B"))]
    assert [rope is not None for rope in ropes] == [True, True, True, False] * 9
    assert {x.window for x in attentions(spec_of("Mistral-7B-v0.1"))} == {4096}
    assert {x.window for x in attentions(spec_of("Qwen2.5-0.5B"))} == {None}
    llama = attentions(spec_of("Llama-3.1-8B"))[0].rope
    assert llama is not None and llama.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_multipliers_are_read() -> None:
    """Oracle: the configurations' own numbers."""
    granite, gemma = spec_of("granite-3.3-2b"), spec_of("gemma-3-4b")
    assert (granite.embedding_multiplier, granite.logit_multiplier) == (12.0, 1 / 8)
    assert {layer.residual_multiplier for layer in granite.layers} == {0.22}
    assert attentions(granite)[0].scale == 0.015625
    assert gemma.embedding_multiplier == 2560**0.5 and gemma.norm_offset == 1.0
    assert attentions(gemma)[0].scale == 1 / 16
    assert gemma.tied_head and gemma.context_limit == 131_072

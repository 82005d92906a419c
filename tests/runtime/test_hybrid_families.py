# SPDX-License-Identifier: Apache-2.0
"""Hybrids in the settings that the small models of `test_families` do not have, and their
checkpoints in every layout."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from freetoken_runtime.errors import WeightsMismatch
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.oracle import MODES, Oracle
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITED = {"time_step_limit": (0.02, 0.1)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite turned, dense, biases, tied": (
        "granitemoehybrid",
        {
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite limited, one group": ("granitemoehybrid", {**LIMITED, "mamba_n_groups": 1}),
    "nemotron latent, biases, no groups": (
        "nemotron_h",
        {
            "moe_latent_size": 28,
            "mlp_bias": True,
            "use_bias": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "nemotron limited, said to be tied, without conv bias": (
        "nemotron_h",
        {"time_step_min": 0.05, "tie_word_embeddings": True, "use_conv_bias": False},
    ),
    "lfm2 biases, no dense, no correction": (
        "lfm2_moe",
        {
            "conv_bias": True,
            "use_expert_bias": False,
            "tie_word_embeddings": False,
            "num_dense_layers": 0,
        },
    ),
    "falcon norm then gate, biases": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "falcon norm of gated, limited": (
        "falcon_h1",
        {**LIMITED, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(tmp_path: Path, name: str) -> None:
    """Oracle: transformers in one cold pass, 1e-4 of the range (seen: 1e-6): prefill and steps
    mixed, and what is resumed from a cut."""
    family, settings = VARIANTS[name]
    oracle = Oracle(build_checkpoint(tmp_path, family, **settings), 211)
    decoder = load(tmp_path).decoder
    assert max(MODES[mode](decoder, oracle) for mode in ("mixed", "resumed")) < 1e-4


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h", "lfm2_moe", "falcon_h1"])
def test_checkpoints_are_read_in_both_layouts(family: str, tmp_path: Path) -> None:
    """Oracle: the same model saved as transformers holds it in memory, experts fused and nemotron's
    backbone called model, against the published names: every parameter bit for bit."""
    published, in_memory = tmp_path / "published", tmp_path / "in_memory"
    model = build_checkpoint(published, family)
    in_memory.mkdir()
    (in_memory / "config.json").write_bytes((published / "config.json").read_bytes())
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, in_memory / "model.safetensors")
    differ = state.keys() != load_file(published / "model.safetensors").keys()
    assert differ or family == "falcon_h1"
    sources = [open_source(folder) for folder in (published, in_memory)]
    for name in sources[0].spec.parameter_shapes():
        assert torch.equal(*(source.read(name) for source in sources)), name


@pytest.mark.parametrize(
    ("family", "victim"),
    [
        ("granitemoehybrid", "model.layers.1.mamba.D"),
        ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear.weight"),
        ("nemotron_h", "backbone.layers.0.mixer.conv1d.bias"),
        ("nemotron_h", "backbone.layers.1.mixer.gate.e_score_correction_bias"),
        ("lfm2_moe", "model.layers.0.conv.conv.weight"),
        ("lfm2_moe", "model.layers.1.feed_forward.expert_bias"),
        ("falcon_h1", "model.layers.3.mamba.dt_bias"),
    ],
)
def test_every_tensor_is_there_once_and_used(family: str, victim: str, tmp_path: Path) -> None:
    """Oracle: the error names what was taken away, added or cut short."""
    build_checkpoint(tmp_path, family)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: whole[name] for name in whole if name != victim}, file)
    with pytest.raises(WeightsMismatch, match=f"missing.*{re.escape(victim)}"):
        open_source(tmp_path)
    save_file({**whole, f"{victim}.of_tomorrow": whole[victim].clone()}, file)
    with pytest.raises(WeightsMismatch, match="not used.*of_tomorrow"):
        open_source(tmp_path)
    save_file({**whole, victim: whole[victim][:-1].contiguous()}, file)
    with pytest.raises(WeightsMismatch, match="shape"):
        open_source(tmp_path)


# What decides shapes, and keys that only these configurations have.
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_size": 1536,
        "init_method": "mup",
        "intermediate_size": 512,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "normalization_function": "rmsnorm",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        "attention_bias": False,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "partial_rotary_factor": 1.0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": 131072,
    },
    "LFM2-8B-A1B": {
        "model_type": "lfm2_moe",
        "conv_L_cache": 3,
        "conv_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": [
            "full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)
        ],
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    "Falcon-H1-0.5B": {
        "model_type": "falcon_h1",
        "attention_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "max_position_embeddings": 16384,
        "mlp_bias": False,
        "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_attention_heads": 8,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "projectors_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": "auto",
        "vocab_size": 32784,
    },
}
BILLIONS = {
    "granite-4.0-h-tiny": 6.9,
    "Nemotron-3-Nano-30B-A3B": 31.6,
    "LFM2-8B-A1B": 8.3,
    "Falcon-H1-0.5B": 0.5,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_shapes_of_transformers(name: str) -> None:
    """Oracle: transformers' model of the same configuration on the meta device, number by number
    of its state, and the published size."""
    config = PUBLISHED[name]
    spec = read_spec(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    state = model.state_dict()
    if spec.tied_head:
        del state["lm_head.weight"]
    ours = sum(prod(shape) for shape in spec.parameter_shapes().values())
    assert ours == sum(tensor.numel() for tensor in state.values())
    assert round(ours / 1e9, 1) == BILLIONS[name]

# SPDX-License-Identifier: Apache-2.0
"""nemotron_h: layers of one block each: Mamba-2, attention without positions, an MLP of squared
ReLU, or a mixture of such experts, which may work on a latent projection."""

from collections.abc import Mapping
from typing import Any

from ..spec import LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mamba import Mamba2Spec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, LatentSpec, MoeSpec
from ..weight_source import Names
from .attention_config import read_kv_heads
from .config_reader import ConfigReader
from .hybrid_config import (
    mamba2_names,
    read_hybrid_kinds,
    refuse_step_limits,
)
from .moe_config import (
    ExpertNaming,
    expert_names,
    one_of_all,
    read_sigmoid_router,
    skip_router_training,
)
from .weight_names import Naming, checkpoint_names, either, tensor

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# Of initialisation, of other engines' kernels, of layers that predict several tokens, or (rope,
# attention_head_dim, expand, tie_word_embeddings) without effect in transformers.
_WITHOUT_EFFECT = """
    attention_head_dim chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap
    mtp_hybrid_override_pattern mtp_layers_block_type norm_eps num_logits_to_keep
    num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual
    residual_in_fp32 rope_parameters rope_scaling rope_theta tie_word_embeddings time_step_floor
    time_step_max use_mamba_kernels
""".split()


def read_nemotron_h(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    for key in _WITHOUT_EFFECT:
        reader.get(key)
    skip_router_training(reader)
    pattern = reader.get("hybrid_override_pattern")
    absent = list(PATTERN.values()) if pattern is None else [PATTERN.get(x, x) for x in pattern]
    supported = tuple(PATTERN.values())
    kinds = read_hybrid_kinds(reader, supported, ("layers_block_type", "layer_types"), absent)
    mlp_bias = reader.flag("mlp_bias")
    blocks = {
        "linear_attention": LayerSpec(_read_mamba(reader), None),
        "full_attention": LayerSpec(_read_attention(reader), None),
        "mlp": LayerSpec(None, _mlp(reader.whole("intermediate_size", 21_504), mlp_bias)),
        "moe": LayerSpec(None, _read_mixture(reader, mlp_bias)),
    }
    reader.require("mlp_hidden_act", "relu2")
    spec = ModelSpec(
        architecture="nemotron_h",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=tuple(blocks[kind] for kind in kinds),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tied_head=False,
        context_limit=reader.whole("max_position_embeddings", 4096),
    )
    reader.finish()
    return spec


def _read_mamba(reader: ConfigReader) -> Mamba2Spec:
    """Step sizes are limited by `time_step_min` alone, as in transformers' prefill; its decode
    steps have no limit, but a state must not depend on how rows came to be cut into passes."""
    reader.require("mamba_hidden_act", "silu", "swish")
    reader.require("mamba_proj_bias", False)
    refuse_step_limits(reader)
    bias = reader.flag("use_bias")
    return Mamba2Spec(
        num_heads=reader.whole("mamba_num_heads", 128),
        head_dim=reader.whole("mamba_head_dim", 64),
        num_groups=reader.whole("n_groups", 8),
        state_size=reader.whole("ssm_state_size", 128),
        kernel=reader.whole("conv_kernel", 4),
        norm="of_gated",
        conv_bias=reader.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
        dt_min=reader.number("time_step_min", 1e-3),
    )


def _read_attention(reader: ConfigReader) -> AttentionSpec:
    reader.require("attention_bias", False)
    reader.require("sliding_window")
    heads = reader.whole("num_attention_heads")
    kv_heads = read_kv_heads(reader, heads, absent=8)
    return AttentionSpec(heads, kv_heads, reader.whole("head_dim", 128), rope=None)


def _mlp(size: int, bias: bool) -> MlpSpec:
    return MlpSpec(size, bias, activation="relu_squared", gated=False)


def _read_mixture(reader: ConfigReader, mlp_bias: bool) -> MoeSpec:
    reader.require("n_shared_experts", 1)
    latent = reader.get("moe_latent_size")
    return MoeSpec(
        router=read_sigmoid_router(reader, num_experts=8, top_k=2, groups=(1, 1), scale=1.0),
        expert=ExpertSpec(reader.whole("moe_intermediate_size", 7688), "relu_squared"),
        shared=_mlp(reader.whole("moe_shared_expert_intermediate_size", 7688), mlp_bias),
        latent=None if latent is None else LatentSpec(reader.whole("moe_latent_size"), mlp_bias),
    )


_NAMES: dict[str, str | Naming] = {
    "head": "lm_head",
    "mixer_norm": "norm",
    "feed_forward_norm": "norm",
    **{part: f"mixer.{part}_proj" for part in ("q", "k", "v", "o", "up", "down")},
    **mamba2_names("mixer"),
    "router": "mixer.gate",
    "router.correction": tensor("mixer.gate.e_score_correction_bias"),
    "latent_down": "mixer.fc1_latent_proj",
    "latent_up": "mixer.fc2_latent_proj",
    "shared.up": "mixer.shared_experts.up_proj",
    "shared.down": "mixer.shared_experts.down_proj",
}


def _expert(part: str) -> ExpertNaming:
    """Experts are stored one by one, or all in one tensor."""
    fused = one_of_all(f"mixer.experts.{part}")
    return lambda count, index: either(f"mixer.experts.{index}.{part}", fused(count, index))


def nemotron_h_names(spec: ModelSpec) -> Names:
    """Everything lies in `backbone`, or in `model`."""
    experts = expert_names(spec, up=_expert("up_proj"), down=_expert("down_proj"))
    backbone, model = (
        checkpoint_names(
            spec,
            _NAMES | experts | {"embedding": f"{place}.embeddings", "norm": f"{place}.norm_f"},
            layers=f"{place}.layers",
        )
        for place in ("backbone", "model")
    )
    return {name: (*ways, *model[name]) for name, ways in backbone.items()}

# SPDX-License-Identifier: Apache-2.0
"""mixtral, and minimax_m2 with its sigmoid router, norms over all heads and partial rope."""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads, read_window, used_window
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import EXPERTS_KEYS, model_of, read_first, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, either, tensor


def read_mixtral(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 131_072)
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    reader.require("hidden_act", "silu", "swish")
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, theta=1e6),
        window=used_window(read_window(reader), context),
    )
    router = RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, 8),
        top_k=reader.whole("num_experts_per_tok", 2),
        scores="softmax",
        normalise=True,
    )
    mixture = MoeSpec(router, ExpertSpec(reader.whole("intermediate_size")))
    layers = [LayerSpec(attention, mixture)] * num_layers
    return model_of(reader, layers, context=context, eps=1e-5)


def read_minimax_m2(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 196_608)
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    _refuse_other_minimaxes(reader, num_layers)
    heads, head_dim = reader.whole("num_attention_heads"), reader.whole("head_dim", 128)
    turning = reader.whole("rotary_dim", head_dim, maximum=head_dim)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, theta=5e6, partial=turning / head_dim),
        qk_norm="width",
    )
    router = RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, 256),
        top_k=reader.whole("num_experts_per_tok", 8),
        scores="sigmoid",
        normalise=True,
        correction=True,
    )
    mixture = MoeSpec(router, ExpertSpec(reader.whole("intermediate_size", 1536)))
    layers = [LayerSpec(attention, mixture)] * num_layers
    return model_of(reader, layers, context=context, eps=1e-6)


def _refuse_other_minimaxes(reader: ConfigReader, num_layers: int) -> None:
    """Keys of a configuration that MiniMax's models share, as far as M2 leaves a choice."""
    reader.require("hidden_act", "silu", "swish")
    reader.require("attn_type_list", [1] * num_layers)
    reader.require("qk_norm_type", "per_layer")
    reader.require("use_qk_norm", True)
    reader.require("use_routing_bias", True)
    reader.require("scoring_func", "sigmoid")
    reader.require("shared_intermediate_size", 0)
    reader.require("sliding_window")
    for key in ("layernorm_full_attention_beta", "layernorm_mlp_beta"):
        reader.require(key, 1)
    for key in (  # of linear attention, dense layers and multi-token prediction, which M2 lacks
        "layernorm_linear_attention_beta",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "shared_moe_mode",
        "use_mtp",
    ):
        reader.get(key)


_NAMES: Mapping[str, str | Naming] = {
    **LLAMA_NAMES,
    "router": either("block_sparse_moe.gate", "mlp.gate"),
    "router.correction": either(
        tensor("block_sparse_moe.e_score_correction_bias"), tensor("mlp.e_score_correction_bias")
    ),
}


def mixtral_names(spec: ModelSpec) -> Names:
    experts = usual_expert_names(
        spec,
        "block_sparse_moe.experts",
        separate=("w1", "w3", "w2"),
        fused=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    )
    return checkpoint_names(spec, {**_NAMES, **experts})

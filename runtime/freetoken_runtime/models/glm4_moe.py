# SPDX-License-Identifier: Apache-2.0
"""glm4_moe: partial rope, optional norms of each head, DeepSeek-V3's router, dense layers first."""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import model_of, read_count, read_shared, read_sigmoid_router, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, tensor


def read_glm4_moe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 131_072)
    reader.require("hidden_act", "silu", "swish")
    reader.get("num_nextn_predict_layers")  # layers after the last, left out of the weights too
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, partial=0.5),
        qkv_bias=reader.flag("attention_bias"),
        qk_norm="head" if reader.flag("use_qk_norm") else None,
    )
    inner = reader.whole("moe_intermediate_size", 1408)
    mixture = MoeSpec(
        router=read_sigmoid_router(reader, 128, 8, groups=(1, 1), scale=1.0),
        expert=ExpertSpec(inner),
        shared=read_shared(reader, "n_shared_experts", 1, inner),
    )
    dense = MlpSpec(reader.whole("intermediate_size", 10_944))
    num_dense = read_count(reader, "first_k_dense_replace", 1)
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    layers = [
        LayerSpec(attention, dense if index < num_dense else mixture) for index in range(num_layers)
    ]
    return model_of(reader, layers, context=context, eps=1e-5)


# As in DeepSeek's checkpoints.
MIXTURE_NAMES: Mapping[str, str | Naming] = {
    "router": "mlp.gate",
    "router.correction": tensor("mlp.gate.e_score_correction_bias"),
    **{f"shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}


def glm4_moe_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, {**LLAMA_NAMES, **MIXTURE_NAMES, **usual_expert_names(spec)})

# SPDX-License-Identifier: Apache-2.0
"""lfm2_moe: short convolutions between gates, some layers of attention; the first layers dense,
the others mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from ..spec import LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.convolution import ShortConvSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .hybrid_config import read_hybrid_kinds
from .moe_config import read_count, skip_router_training, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, tensor


def read_lfm2_moe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    skip_router_training(reader)
    hidden = reader.whole("hidden_size")
    context = reader.whole("max_position_embeddings", 128_000)
    kinds = read_hybrid_kinds(reader, ("conv", "full_attention"), ("layer_types",))
    conv = ShortConvSpec(hidden, reader.whole("conv_L_cache", 3), reader.flag("conv_bias"))
    attention = _read_attention(reader, context)
    dense = MlpSpec(reader.whole("intermediate_size"))
    mixture = _read_mixture(reader)
    num_dense = read_count(reader, "num_dense_layers", 2)
    tied = reader.flag("tie_word_embeddings", True)
    spec = ModelSpec(
        architecture="lfm2_moe",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(conv if kind == "conv" else attention, dense if i < num_dense else mixture)
            for i, kind in enumerate(kinds)
        ),
        norm_eps=reader.number("norm_eps", 1e-5),
        tied_head=reader.flag("tie_embedding", tied),  # the older spelling wins
        context_limit=context,
    )
    reader.finish()
    return spec


def _read_attention(reader: ConfigReader, context: int) -> AttentionSpec:
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, theta=1e6),
        qk_norm="head",
    )


def _read_mixture(reader: ConfigReader) -> MoeSpec:
    router = RouterSpec(
        num_experts=reader.whole("num_experts", 32),
        top_k=reader.whole("num_experts_per_tok", 4),
        scores="sigmoid",
        normalise=reader.flag("norm_topk_prob", True),
        correction=reader.flag("use_expert_bias", True),
        sum_added=1e-6,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    return MoeSpec(router, ExpertSpec(reader.whole("moe_intermediate_size", 1792)))


_NAMES: dict[str, str | Naming] = {
    "embedding": "model.embed_tokens",
    "norm": "model.embedding_norm",
    "head": "lm_head",
    "mixer_norm": "operator_norm",
    "feed_forward_norm": "ffn_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "in": "conv.in_proj",
    "conv": "conv.conv",
    "out": "conv.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "router": "feed_forward.gate",
    "router.correction": tensor("feed_forward.expert_bias"),
}


def lfm2_moe_names(spec: ModelSpec) -> Names:
    experts = usual_expert_names(spec, "feed_forward.experts", separate=("w1", "w3", "w2"))
    return checkpoint_names(spec, _NAMES | experts)

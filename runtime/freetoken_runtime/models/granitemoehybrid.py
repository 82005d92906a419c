# SPDX-License-Identifier: Apache-2.0
"""granitemoehybrid: Mamba-2 layers with a few of attention; a shared MLP, alone or beside experts.

Positions are rotary only where `position_embedding_type` says so.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, MixerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names, Shape, Stored, Ways
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .hybrid_config import (
    mamba2_names,
    read_count,
    read_hybrid_kinds,
    read_mamba2,
)
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, part_of

KINDS = ("linear_attention", "full_attention")


def read_granitemoehybrid(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    reader.require("hidden_act", "silu", "swish")
    reader.require("normalization_function", "rmsnorm")
    for key in ("output_router_logits", "router_aux_loss_coef", "init_method"):  # of training
        reader.get(key)
    hidden = reader.whole("hidden_size")
    context = reader.whole("max_position_embeddings", 2048)
    absent = ["mamba"] * reader.whole("num_hidden_layers", 32, maximum=MAX_LAYERS)
    kinds = read_hybrid_kinds(reader, KINDS, ("layer_types", "layers_block_type"), absent)
    mixers: dict[str, MixerSpec] = {
        "linear_attention": read_mamba2(
            reader, int(reader.number("mamba_expand", 2) * hidden), "of_gated"
        ),
        "full_attention": _read_attention(reader, context),
    }
    feed_forward = _read_feed_forward(reader)
    residual = reader.number("residual_multiplier", 1.0)
    spec = ModelSpec(
        architecture="granitemoehybrid",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(mixers[kind], feed_forward, residual_multiplier=residual) for kind in kinds
        ),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / reader.number("logits_scaling", 1.0),
    )
    reader.finish()
    return spec


def _read_attention(reader: ConfigReader, context: int) -> AttentionSpec:
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    bias = reader.flag("attention_bias")
    rope = read_rope(reader, head_dim, context)
    reader.require("position_embedding_type", "rope", "nope")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=heads),
        head_dim=head_dim,
        rope=rope if reader.get("position_embedding_type") == "rope" else None,
        qkv_bias=bias,
        output_bias=bias,
        scaling=reader.number("attention_multiplier", 1.0),
    )


def _read_feed_forward(reader: ConfigReader) -> MlpSpec | MoeSpec:
    shared = MlpSpec(reader.whole("shared_intermediate_size", 1024))
    inner = reader.whole("intermediate_size")
    experts = read_count(reader, "num_local_experts", 8)
    top_k = reader.whole("num_experts_per_tok", 2)
    if not experts:
        return shared
    router = RouterSpec(experts, top_k, "softmax_of_chosen")
    return MoeSpec(router, ExpertSpec(inner), shared)


_NAMES: Mapping[str, str | Naming] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    **mamba2_names("mamba"),
}


def granitemoehybrid_names(spec: ModelSpec) -> Names:
    """Matrices of experts are stored as one tensor, gate and up of the shared MLP as another."""
    feed_forward, hidden = spec.layers[0].feed_forward, spec.hidden_size
    table = dict(_NAMES)
    at, shared = "", feed_forward
    if isinstance(feed_forward, MoeSpec):
        at, shared = "shared.", feed_forward.shared
        table["router"] = "block_sparse_moe.router.layer"
        experts, inner = feed_forward.router.num_experts, feed_forward.expert.intermediate_size
        for index in range(experts):
            stored = (experts, 2 * inner, hidden)
            table[f"experts.{index}.gate"] = _expert("input_linear", index, 0, stored)
            table[f"experts.{index}.up"] = _expert("input_linear", index, inner, stored)
            stored = (experts, hidden, inner)
            table[f"experts.{index}.down"] = _expert("output_linear", index, 0, stored)
    assert isinstance(shared, MlpSpec)
    width = shared.intermediate_size
    both = ("shared_mlp.input_linear.weight", 0)
    table[f"{at}gate"] = part_of(*both, 0, width, 2 * width, hidden)
    table[f"{at}up"] = part_of(*both, width, 2 * width, 2 * width, hidden)
    table[f"{at}down"] = "shared_mlp.output_linear"
    return checkpoint_names(spec, table)


def _expert(name: str, index: int, start: int, stored: Shape) -> Naming:
    """Rows from `start` on of one expert in a tensor [E, out, in]."""

    def ways(prefix: str, shape: Shape) -> Ways:
        part = ((0, index, index + 1), (1, start, start + shape[0]))
        return ((Stored(f"{prefix}block_sparse_moe.{name}.weight", stored, part=part),),)

    return ways

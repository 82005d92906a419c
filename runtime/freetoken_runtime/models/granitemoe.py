# SPDX-License-Identifier: Apache-2.0
"""granitemoe: Granite's multipliers, and a router that chooses before its softmax."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import EXPERTS_KEYS, expert_names, half_of, model_of, one_of_all, read_first
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, either

_BLOCK = "block_sparse_moe"


def read_granitemoe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 2048)
    reader.require("hidden_act", "silu", "swish")
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    bias = reader.flag("attention_bias")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=heads),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context),
        qkv_bias=bias,
        output_bias=bias,
        scaling=reader.number("attention_multiplier", 1.0),
    )
    router = RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, 8),
        top_k=reader.whole("num_experts_per_tok", 2),
        scores="softmax_of_chosen",
    )
    layer = LayerSpec(
        attention,
        MoeSpec(router, ExpertSpec(reader.whole("intermediate_size"))),
        residual_multiplier=reader.number("residual_multiplier", 1.0),
    )
    embedding = reader.number("embedding_multiplier", 1.0)
    logits = 1.0 / reader.number("logits_scaling", 1.0)
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    spec = model_of(reader, [layer] * num_layers, context=context, eps=1e-6)
    return replace(spec, embedding_multiplier=embedding, logit_multiplier=logits)


def granite_mixture_names(spec: ModelSpec) -> dict[str, str | Naming]:
    """Table entries of router and experts, which are fused in every checkpoint, under two pairs of
    names."""
    older = expert_names(
        spec,
        gate=half_of(f"{_BLOCK}.input_linear.weight", 0),
        up=half_of(f"{_BLOCK}.input_linear.weight", 1),
        down=one_of_all(f"{_BLOCK}.output_linear.weight"),
    )
    newer = expert_names(
        spec,
        gate=half_of(f"{_BLOCK}.experts.gate_up_proj", 0),
        up=half_of(f"{_BLOCK}.experts.gate_up_proj", 1),
        down=one_of_all(f"{_BLOCK}.experts.down_proj"),
    )
    table: dict[str, str | Naming] = {
        "router": either(f"{_BLOCK}.router.layer", f"{_BLOCK}.router")
    }
    return table | {part: either(naming, newer[part]) for part, naming in older.items()}


def granitemoe_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, {**LLAMA_NAMES, **granite_mixture_names(spec)})

# SPDX-License-Identifier: Apache-2.0
"""qwen2_moe, qwen3_moe and olmoe: softmax routers, whose weights may be normalised. qwen2_moe has a
gated shared expert and biases, qwen3_moe norms of each head, olmoe norms over all heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec
from ..weight_source import Names
from .attention_config import (
    FULL,
    SLIDING,
    read_head_dim,
    read_kinds,
    read_kv_heads,
    read_window,
    used_window,
)
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import model_of, read_softmax_router, read_sparse_layers, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names


def read_qwen2_moe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 32_768)
    attention = replace(
        _read_attention(reader, context, kv_heads=16), qkv_bias=reader.flag("qkv_bias", True)
    )
    mixture = MoeSpec(
        router=read_softmax_router(reader, 60, 4),
        expert=ExpertSpec(reader.whole("moe_intermediate_size", 1408)),
        shared=MlpSpec(reader.whole("shared_expert_intermediate_size", 5632)),
        shared_gate=True,
    )
    dense = MlpSpec(reader.whole("intermediate_size", 5632))
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    windows = _read_windows(reader, num_layers, context)
    layers = [
        LayerSpec(replace(attention, window=window), mixture if sparse else dense)
        for window, sparse in zip(windows, read_sparse_layers(reader, num_layers), strict=True)
    ]
    return model_of(reader, layers, context=context, eps=1e-6)


def read_qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 32_768)
    bias = reader.flag("attention_bias")
    window = read_window(reader, 4096) if reader.flag("use_sliding_window") else None
    reader.get("sliding_window")
    attention = replace(
        _read_attention(reader, context, kv_heads=4),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        window=used_window(window, context),
    )
    mixture = MoeSpec(
        read_softmax_router(reader, 128, 8), ExpertSpec(reader.whole("moe_intermediate_size", 768))
    )
    dense = MlpSpec(reader.whole("intermediate_size", 6144))
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    layers = [
        LayerSpec(attention, mixture if sparse else dense)
        for sparse in read_sparse_layers(reader, num_layers)
    ]
    return model_of(reader, layers, context=context, eps=1e-6)


def read_olmoe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 4096)
    reader.require("clip_qkv")
    bias = reader.flag("attention_bias")
    attention = replace(
        _read_attention(reader, context, kv_heads=None),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="width",
    )
    mixture = MoeSpec(
        read_softmax_router(reader, 64, 8), ExpertSpec(reader.whole("intermediate_size"))
    )
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    layers = [LayerSpec(attention, mixture)] * num_layers
    return model_of(reader, layers, context=context, eps=1e-5)


def _read_attention(reader: ConfigReader, context: int, kv_heads: int | None) -> AttentionSpec:
    """`kv_heads`: where the key is absent, one per head if None."""
    reader.require("hidden_act", "silu", "swish")
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=kv_heads or heads),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context),
    )


def _read_windows(reader: ConfigReader, num_layers: int, context: int) -> list[int | None]:
    """One per layer, None for full attention: by `layer_types`, or every second layer of the first
    `max_window_layers`, if `use_sliding_window` says so."""
    used = reader.flag("use_sliding_window")
    window = read_window(reader, 4096) if used else None
    reader.get("sliding_window")  # 0 where it is not used
    first = reader.whole("max_window_layers", 28) if used else 0
    default = [SLIDING if i % 2 == 0 and i < first else FULL for i in range(num_layers)]
    kinds = read_kinds(reader, default)
    if SLIDING in kinds and window is None:
        raise UnsupportedConfig(
            "config key 'layer_types' asks for sliding attention without a window",
            remedy="set use_sliding_window and sliding_window",
        )
    return [used_window(window, context) if kind == SLIDING else None for kind in kinds]


_NAMES: Mapping[str, str | Naming] = {
    **LLAMA_NAMES,
    "router": "mlp.gate",
    "shared_router": "mlp.shared_expert_gate",
    **{f"shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}


def qwen_moe_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, {**_NAMES, **usual_expert_names(spec)})

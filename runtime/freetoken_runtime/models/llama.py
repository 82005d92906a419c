# SPDX-License-Identifier: Apache-2.0
"""The Llama family: llama, mistral, qwen2 and qwen3.

They differ in which biases and norms exist, in which layers have a window, and in a few defaults,
nothing else. Other families share their attention and their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
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
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names


@dataclass(frozen=True)
class Traits:
    """What tells a family from the others. `bias`: of attention, as the key `attention_bias` says,
    always for q, k and v, or never. `kv_heads`: where the key is absent, 0 for one per head."""

    context: int
    bias: Literal["key", "qkv"] | None = "key"
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    theta: float = 10_000.0


TRAITS = {
    "llama": Traits(2048, mlp_bias=True, kv_heads=0),
    "mistral": Traits(131_072, bias=None),
    "qwen2": Traits(32_768, bias="qkv"),
    "qwen3": Traits(32_768, qk_norm=True, head_dim=128),
}


def read_llama(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> spec, for every model type in TRAITS."""
    reader = ConfigReader(config)
    family = str(config["model_type"])
    traits = TRAITS[family]
    context = reader.whole("max_position_embeddings", traits.context)
    attention = read_attention(reader, traits, context)
    mlp = read_mlp(reader, traits)
    spec = ModelSpec(
        architecture=family,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=tuple(
            LayerSpec(replace(attention, window=window), mlp)
            for window in _read_windows(reader, family, context)
        ),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
    )
    reader.finish()
    return spec


def read_attention(reader: ConfigReader, traits: Traits, context: int) -> AttentionSpec:
    """Full attention with rope."""
    heads = reader.whole("num_attention_heads")
    kv_heads = read_kv_heads(reader, heads, heads if traits.kv_heads == 0 else traits.kv_heads)
    if traits.head_dim is None:
        head_dim = read_head_dim(reader, heads)
    else:
        head_dim = reader.whole("head_dim", traits.head_dim)
    bias = reader.flag("attention_bias") if traits.bias == "key" else False
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, theta=traits.theta),
        qkv_bias=bias or traits.bias == "qkv",
        output_bias=bias,
        qk_norm="head" if traits.qk_norm else None,
    )


def read_mlp(reader: ConfigReader, traits: Traits) -> MlpSpec:
    reader.require("hidden_act", "silu", "swish")
    bias = reader.flag("mlp_bias") if traits.mlp_bias else False
    return MlpSpec(reader.whole("intermediate_size"), bias)


def _read_windows(reader: ConfigReader, family: str, context: int) -> tuple[int | None, ...]:
    """The window of every layer; mistral has one in all, the qwens where `layer_types` says."""
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        return (used_window(read_window(reader, absent=4096), context),) * layers
    window = read_window(reader, absent=4096)
    if not reader.flag("use_sliding_window"):
        window = None
    # 0 layers below the first with a window is a number that `whole` would refuse.
    first = 0 if reader.get("max_window_layers") == 0 else reader.whole("max_window_layers", 28)
    first = layers if window is None else first
    kinds = read_kinds(reader, [SLIDING if index >= first else FULL for index in range(layers)])
    if window is None and SLIDING in kinds:
        raise UnsupportedConfig(
            "config key 'layer_types' asks for sliding attention without 'sliding_window'",
            value=reader.get("sliding_window"),
            remedy="set use_sliding_window and sliding_window",
        )
    return tuple(used_window(window, context) if kind == SLIDING else None for kind in kinds)


# Part of a layer here -> module in a Hugging Face checkpoint.
LLAMA_NAMES: Mapping[str, str | Naming] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def llama_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, LLAMA_NAMES)

# SPDX-License-Identifier: Apache-2.0
"""gemma3_text: windows in most layers, each kind with a rope of its own, norms around every block.

`attn_logit_softcapping` is refused unless it is null; embeddings are scaled by the root of their
width.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..specs.rope import RopeSpec
from ..weight_source import Names
from .attention_config import FULL, SLIDING, read_kinds, read_kv_heads, read_window, used_window
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .rope_config import Rotation, rope_of
from .weight_names import checkpoint_names


def read_gemma3(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 131_072)
    layers = reader.whole("num_hidden_layers", 26, maximum=MAX_LAYERS)
    reader.require("hidden_activation", "gelu_pytorch_tanh")
    reader.require("attn_logit_softcapping")
    reader.require("use_bidirectional_attention", False)
    pattern = reader.whole("sliding_window_pattern", 6)
    reader.get("_sliding_window_pattern")  # what transformers made `layer_types` of
    kinds = read_kinds(reader, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)])
    mixers = _read_mixers(reader, context)
    mlp = MlpSpec(reader.whole("intermediate_size", 9216), activation="gelu_tanh")
    cap = reader.get("final_logit_softcapping")
    hidden = reader.whole("hidden_size", 2304)
    spec = ModelSpec(
        architecture="gemma3_text",
        vocab_size=reader.whole("vocab_size", 262_208),
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], mlp, post_norms=True) for kind in kinds),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings", True),
        context_limit=context,
        norm_offset=1.0,
        embedding_multiplier=hidden**0.5,
        logit_soft_cap=None if cap is None else reader.number("final_logit_softcapping", 1.0),
    )
    reader.finish()
    return spec


def _read_mixers(reader: ConfigReader, context: int) -> dict[str, AttentionSpec]:
    heads = reader.whole("num_attention_heads", 8)
    head_dim = reader.whole("head_dim", 256)
    ropes = _read_ropes(reader, head_dim, context)
    bias = reader.flag("attention_bias")
    window = used_window(read_window(reader, absent=4096), context)
    return {
        kind: AttentionSpec(
            num_heads=heads,
            num_kv_heads=read_kv_heads(reader, heads, absent=4),
            head_dim=head_dim,
            rope=ropes[kind],
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head",
            window=window if kind == SLIDING else None,
            scaling=reader.number("query_pre_attn_scalar", 256) ** -0.5,
        )
        for kind in (SLIDING, FULL)
    }


def _read_ropes(reader: ConfigReader, head_dim: int, context: int) -> dict[str, RopeSpec]:
    """Newer configurations have parameters per kind of layer; in older ones `rope_scaling` is that
    of the layers without window."""
    newer, older = reader.get("rope_parameters", {}), reader.get("rope_scaling")
    if not isinstance(newer, Mapping) or set(newer) - {FULL, SLIDING}:
        raise UnsupportedConfig(
            "config key 'rope_parameters'", value=newer, limit=f"an object with {FULL}, {SLIDING}"
        )
    wide = Rotation(head_dim, reader.number("rope_theta", 1e6))
    near = Rotation(head_dim, reader.number("rope_local_base_freq", 10_000.0))
    return {
        FULL: rope_of(older or newer.get(FULL) or {}, wide, context),
        SLIDING: rope_of(newer.get(SLIDING) or {}, near, context),
    }


def gemma3_names(spec: ModelSpec) -> Names:
    return checkpoint_names(
        spec,
        {
            **LLAMA_NAMES,
            "mixer_post_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward_post_norm": "post_feedforward_layernorm",
        },
    )

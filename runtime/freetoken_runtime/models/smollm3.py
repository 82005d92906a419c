# SPDX-License-Identifier: Apache-2.0
"""smollm3: llama with a rope in some layers only, and windows, if any, in the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from .attention_config import FULL, SLIDING, read_kinds, read_window, used_window
from .config_reader import ConfigReader
from .llama import Traits, read_attention, read_mlp

_TRAITS = Traits(32_768, mlp_bias=True, kv_heads=4, theta=2e6)


def read_smollm3(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", _TRAITS.context)
    attention = read_attention(reader, _TRAITS, context)
    mlp = read_mlp(reader, _TRAITS)
    roped = _read_roped(reader)
    window = read_window(reader) if reader.flag("use_sliding_window") else None
    reader.get("sliding_window")  # without the flag it has no meaning
    kinds = read_kinds(
        reader, [SLIDING if window is not None and not rope else FULL for rope in roped]
    )
    if window is None and SLIDING in kinds:
        raise UnsupportedConfig(
            "config key 'layer_types' asks for sliding attention without 'sliding_window'",
            remedy="set use_sliding_window and sliding_window",
        )
    mixers = [
        replace(
            attention,
            rope=attention.rope if rope else None,
            window=used_window(window, context) if kind == SLIDING else None,
        )
        for rope, kind in zip(roped, kinds, strict=True)
    ]
    spec = ModelSpec(
        architecture="smollm3",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=tuple(LayerSpec(mixer, mlp) for mixer in mixers),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings", True),
        context_limit=context,
    )
    reader.finish()
    return spec


def _read_roped(reader: ConfigReader) -> list[bool]:
    """Per layer, whether it has a rope: `no_rope_layers` holds a 1 where it has."""
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    interval = reader.whole("no_rope_layer_interval", 4)
    roped = reader.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(roped, list) or len(roped) < layers or not {0, 1}.issuperset(roped):
        raise UnsupportedConfig(
            "config key 'no_rope_layers'", value=roped, limit=f"a list of {layers} zeros and ones"
        )
    return [bool(rope) for rope in roped[:layers]]

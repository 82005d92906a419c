# SPDX-License-Identifier: Apache-2.0
"""granite: llama with multipliers of embeddings, residuals, scores and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from .config_reader import ConfigReader
from .llama import TRAITS, read_attention, read_mlp


def read_granite(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    traits = TRAITS["llama"]
    context = reader.whole("max_position_embeddings", traits.context)
    layer = LayerSpec(
        replace(
            read_attention(reader, traits, context),
            scaling=reader.number("attention_multiplier", 1.0),
        ),
        read_mlp(reader, traits),
        residual_multiplier=reader.number("residual_multiplier", 1.0),
    )
    spec = ModelSpec(
        architecture="granite",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=(layer,) * reader.whole("num_hidden_layers", maximum=MAX_LAYERS),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        logit_multiplier=1.0 / reader.number("logits_scaling", 1.0),
    )
    reader.finish()
    return spec

# SPDX-License-Identifier: Apache-2.0
"""falcon_h1: attention and Mamba-2 side by side in every layer, with a multiplier almost anywhere.

The multiplier of the keys goes into the scale of the scores: rotations do not see it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mamba import Mamba2Spec
from ..specs.mlp import MlpSpec
from ..specs.parallel import ParallelSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .hybrid_config import mamba2_names, read_mamba2, read_numbers
from .llama import LLAMA_NAMES
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names

# Of initialisation, or of generation defaults.
_WITHOUT_EFFECT = (
    "mlp_expansion_factor",
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
)


def read_falcon_h1(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    for key in _WITHOUT_EFFECT:
        reader.get(key)
    reader.require("hidden_act", "silu", "swish")
    reader.require("attn_layer_indices")
    reader.require("mamba_use_mlp", True)
    reader.require("sliding_window")
    context = reader.whole("max_position_embeddings", 8192)
    mixer = ParallelSpec(
        attention=_read_attention(reader, context),
        mamba=_read_mamba(reader),
        attention_in=reader.number("attention_in_multiplier", 1.0),
        attention_out=reader.number("attention_out_multiplier", 1.0),
        mamba_in=reader.number("ssm_in_multiplier", 1.0),
        mamba_out=reader.number("ssm_out_multiplier", 1.0),
    )
    gate, down = read_numbers(reader, "mlp_multipliers", 2)
    mlp = MlpSpec(
        reader.whole("intermediate_size"),
        bias=reader.flag("mlp_bias"),
        gate_multiplier=gate,
        output_multiplier=down,
    )
    spec = ModelSpec(
        architecture="falcon_h1",
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=(LayerSpec(mixer, mlp),) * reader.whole("num_hidden_layers", maximum=MAX_LAYERS),
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        logit_multiplier=reader.number("lm_head_multiplier", 1.0),
    )
    reader.finish()
    return spec


def _read_attention(reader: ConfigReader, context: int) -> AttentionSpec:
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    bias = reader.flag("attention_bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context),
        qkv_bias=bias,
        output_bias=bias,
        scaling=reader.number("key_multiplier", 1.0) * head_dim**-0.5,
    )


def _read_mamba(reader: ConfigReader) -> Mamba2Spec:
    expanded = int(reader.number("mamba_expand", 2) * reader.whole("hidden_size"))
    absent = expanded if reader.has("mamba_d_ssm") else 1024
    norm: Literal["of_gated", "then_gate"] | None = None
    before_gate = reader.flag("mamba_norm_before_gate", True)
    if reader.flag("mamba_rms_norm"):
        norm = "then_gate" if before_gate else "of_gated"
    z, x, b, c, dt = read_numbers(reader, "ssm_multipliers", 5)
    multipliers = (z, x, b, c, dt)
    return replace(
        read_mamba2(reader, reader.whole("mamba_d_ssm", absent), norm),
        output_bias=reader.flag("projectors_bias"),
        multipliers=None if set(multipliers) == {1.0} else multipliers,
    )


_NAMES: Mapping[str, str | Naming] = {
    **LLAMA_NAMES,
    "norm": "model.final_layernorm",
    "feed_forward_norm": "pre_ff_layernorm",
    **mamba2_names("mamba", at="mamba."),
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}


def falcon_h1_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, _NAMES)

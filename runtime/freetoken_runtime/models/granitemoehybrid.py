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
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .granitemoe import granite_mixture_names
from .hybrid_config import mamba2_names, read_hybrid_kinds, read_mamba2
from .llama import LLAMA_NAMES
from .moe_config import read_count, skip_router_training
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, part_of

KINDS = ("linear_attention", "full_attention")


def read_granitemoehybrid(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    reader.require("hidden_act", "silu", "swish")
    reader.require("normalization_function", "rmsnorm")
    reader.get("init_method")
    skip_router_training(reader)
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


_NAMES: Mapping[str, str | Naming] = {**LLAMA_NAMES, **mamba2_names("mamba")}


def granitemoehybrid_names(spec: ModelSpec) -> Names:
    """Gate and up of the shared MLP are one tensor."""
    feed_forward, at = spec.layers[0].feed_forward, ""
    if isinstance(feed_forward, MoeSpec):
        feed_forward, at = feed_forward.shared, "shared."
    assert isinstance(feed_forward, MlpSpec)
    width = feed_forward.intermediate_size
    both, stored = "shared_mlp.input_linear.weight", (2 * width, spec.hidden_size)
    shared: dict[str, str | Naming] = {
        f"{at}gate": part_of(both, 0, 0, width, *stored),
        f"{at}up": part_of(both, 0, width, 2 * width, *stored),
        f"{at}down": "shared_mlp.output_linear",
    }
    return checkpoint_names(spec, {**_NAMES, **shared, **granite_mixture_names(spec)})

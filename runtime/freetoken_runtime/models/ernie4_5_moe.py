# SPDX-License-Identifier: Apache-2.0
"""ernie4_5_moe: rope over neighbours, softmax with a correction of the choice, shared experts."""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names
from .attention_config import read_head_dim, read_kv_heads
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import model_of, read_count, read_first, read_shared, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, either, paired, reshaped


def read_ernie4_5_moe(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 131_072)
    reader.require("hidden_act", "silu", "swish")
    heads = reader.whole("num_attention_heads")
    head_dim = read_head_dim(reader, heads)
    reader.require("use_bias", False)  # it would give the head one too
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=4),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, theta=5e5),
    )
    mixture = _read_mixture(reader)
    dense = MlpSpec(reader.whole("intermediate_size", 12_288))
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    layers = [
        LayerSpec(attention, mixture if sparse else dense)
        for sparse in _read_sparse_layers(reader, num_layers)
    ]
    return model_of(reader, layers, context=context, eps=1e-5, tied=True)


def _read_mixture(reader: ConfigReader) -> MoeSpec:
    reader.require("moe_gate", "topk")
    reader.require("moe_use_aux_free", True)
    for key in ("moe_capacity", "num_nextn_predict_layers"):  # of training
        reader.get(key)
    inner = reader.whole("moe_intermediate_size", 1536)
    shared = read_shared(reader, "moe_num_shared_experts", 2, inner)
    router = RouterSpec(
        num_experts=read_first(reader, ("moe_num_experts", "num_experts"), 64),
        top_k=read_first(reader, ("moe_k", "num_experts_per_tok"), 6),
        scores="softmax",
        normalise=True,
        correction=True,
        sum_minimum=reader.number("moe_norm_min", 1e-12),
    )
    return MoeSpec(router, ExpertSpec(inner), shared)


def _read_sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Every `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index`, both
    included; -1 is the last layer."""
    start = read_count(reader, "moe_layer_start_index", 1)
    end = reader.get("moe_layer_end_index", -1)
    if type(end) is not int or end < -1:
        raise UnsupportedConfig("config key 'moe_layer_end_index'", value=end, limit="-1 or more")
    step = reader.whole("moe_layer_interval", 1)
    last = num_layers - 1 if end == -1 else end
    return [start <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]


_NAMES: Mapping[str, str | Naming] = {
    **LLAMA_NAMES,
    "router": "mlp.gate",
    **{f"shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}


def ernie4_5_moe_names(spec: ModelSpec) -> Names:
    """Rows of q and k are stored as pairs of neighbours, the correction with a leading 1."""
    names: dict[str, str | Naming] = {**_NAMES, **usual_expert_names(spec)}
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    for part, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads)):
        names[part] = paired(f"self_attn.{part}_proj.weight", heads)
    for layer in spec.layers:
        if isinstance(layer.feed_forward, MoeSpec):
            count = layer.feed_forward.router.num_experts
            correction = "moe_statics.e_score_correction_bias"
            names["router.correction"] = either(
                reshaped(f"mlp.{correction}", 1, count),
                reshaped(f"mlp.gate.{correction}", 1, count),
            )
    return checkpoint_names(spec, names)

# SPDX-License-Identifier: Apache-2.0
"""kimi_linear: Kimi delta attention, every fourth layer latent attention without rope; the first
layers dense, the others mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, FeedForwardSpec, LayerSpec, MixerSpec, ModelSpec
from ..specs.attention import MlaSpec
from ..specs.gated_delta import KdaSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec
from ..weight_source import Names, Shape, Stored, Ways
from .attention_config import FULL, read_kinds
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .mla_config import mla_names, read_mla
from .moe_config import (
    model_of,
    read_count,
    read_layer_indices,
    read_shared,
    read_sigmoid_router,
    usual_expert_names,
)
from .weight_names import Naming, checkpoint_names, either, reshaped, tensor

LINEAR = "linear_attention"
# The checkpoint's spelling -> that of the other families.
_SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def read_kimi_linear(config: Mapping[str, Any]) -> ModelSpec:
    """config.json, of the checkpoint or as transformers saves it -> spec."""
    for theirs, ours in _SPELLINGS.items():
        if config.get(theirs, config.get(ours)) != config.get(ours, config.get(theirs)):
            raise UnsupportedConfig(
                "config keys of one meaning differ",
                value={theirs: config.get(theirs), ours: config.get(ours)},
            )
    absent = {"q_lora_rank": None}
    reader = ConfigReader(absent | {_SPELLINGS.get(key, key): x for key, x in config.items()})
    for key in ("rope_theta", "num_nextn_predict_layers", "topk_method"):
        reader.get(key)  # no layer turns, further tokens are not predicted
    reader.require("hidden_act", "silu", "swish")
    reader.require("mla_use_nope", True)
    reader.require("moe_layer_freq", 1)
    reader.require("moe_router_activation_func", "sigmoid")
    reader.require("rope_scaling")
    reader.require("use_grouped_topk", True)
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    context = reader.whole("max_position_embeddings", 1_048_576)
    delta, kinds = _read_delta(reader, layers)
    mixers: dict[str, MixerSpec] = {LINEAR: delta, FULL: read_mla(reader, None, pairs=False)}
    feed_forwards = _read_feed_forwards(reader, layers)
    pairs = zip(kinds, feed_forwards, strict=True)
    stack = [LayerSpec(mixers[kind], feed_forward) for kind, feed_forward in pairs]
    return model_of(reader, stack, context=context, eps=1e-5)


def _read_delta(reader: ConfigReader, layers: int) -> tuple[KdaSpec, tuple[str, ...]]:
    """The delta attention and the kind of every layer; the checkpoint has both in an object of its
    own, where layers count from 1."""
    settings = reader.get("linear_attn_config", {})
    if not isinstance(settings, Mapping):
        raise UnsupportedConfig(
            "config key 'linear_attn_config'", value=settings, limit="an object"
        )
    inner = ConfigReader(settings)
    full = read_layer_indices(inner, "full_attn_layers", layers + 1)
    linear = read_layer_indices(inner, "kda_layers", layers + 1)
    default = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    if full or linear:
        if full | linear != set(range(1, layers + 1)) or full & linear:
            raise UnsupportedConfig(
                "full_attn_layers and kda_layers must name every layer once",
                value=(sorted(full), sorted(linear)),
                limit=f"1 to {layers}",
            )
        default = [FULL if index + 1 in full else LINEAR for index in range(layers)]
    spec = KdaSpec(
        num_heads=inner.whole("num_heads", reader.whole("linear_num_heads", 32)),
        head_dim=inner.whole("head_dim", reader.whole("linear_head_dim", 128)),
        kernel=inner.whole("short_conv_kernel_size", reader.whole("linear_conv_kernel_dim", 4)),
    )
    inner.finish()
    return spec, read_kinds(reader, default, (LINEAR, FULL))


def _read_feed_forwards(reader: ConfigReader, layers: int) -> list[FeedForwardSpec]:
    inner = reader.whole("moe_intermediate_size", 1024)
    mixture = MoeSpec(
        read_sigmoid_router(reader, 256, 8, groups=(1, 1), scale=2.446),
        ExpertSpec(inner),
        read_shared(reader, "n_shared_experts", 1, inner),
    )
    dense = MlpSpec(reader.whole("intermediate_size", 9216))
    first = read_count(reader, "first_k_dense_replace", 1)
    default = ["dense" if index < first else "sparse" for index in range(layers)]
    kinds = reader.get("mlp_layer_types", default)
    by_kind: dict[str, FeedForwardSpec] = {"dense": dense, "sparse": mixture}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= by_kind.keys():
        raise UnsupportedConfig("config key 'mlp_layer_types'", value=kinds, limit="dense, sparse")
    return [by_kind[kind] for kind in kinds]


def kimi_linear_names(spec: ModelSpec) -> Names:
    """Feed-forwards are under `mlp` or `block_sparse_moe`, dense ones too."""
    experts = usual_expert_names(spec, "block_sparse_moe.experts", separate=("w1", "w3", "w2"))
    mixers = [x.mixer for x in spec.layers]
    latent = mla_names(spec) if any(isinstance(mixer, MlaSpec) for mixer in mixers) else {}
    delta = next((mixer for mixer in mixers if isinstance(mixer, KdaSpec)), None)
    heads = 1 if delta is None else delta.num_heads
    names = {"delta.a_log": reshaped("self_attn.A_log", 1, 1, heads, 1)}
    return checkpoint_names(spec, {**LLAMA_NAMES, **latent, **_NAMES, **names, **experts})


def _convolutions(prefix: str, shape: Shape) -> Ways:
    """Those of q, k and v, one after the other."""
    stored = (shape[0] // 3, *shape[1:])
    return (tuple(Stored(f"{prefix}self_attn.{part}_conv1d.weight", stored) for part in "qkv"),)


def _either(name: str) -> Naming:
    return either(f"block_sparse_moe.{name}", f"mlp.{name}")


_NAMES: dict[str, str | Naming] = {
    **{f"delta.{part}": f"self_attn.{part}_proj" for part in "qkvbo"},
    "delta.z_down": "self_attn.g_a_proj",
    "delta.z_up": "self_attn.g_b_proj",
    "delta.a_down": "self_attn.f_a_proj",
    "delta.a_up": "self_attn.f_b_proj",
    "delta.conv": _convolutions,
    "delta.dt_bias": tensor("self_attn.dt_bias"),
    "delta.gate_norm": "self_attn.o_norm",
    **{part: _either(f"{part}_proj") for part in ("gate", "up", "down")},
    **{f"shared.{x}": _either(f"shared_experts.{x}_proj") for x in ("gate", "up", "down")},
    "router": "block_sparse_moe.gate",
    "router.correction": tensor("block_sparse_moe.gate.e_score_correction_bias"),
}

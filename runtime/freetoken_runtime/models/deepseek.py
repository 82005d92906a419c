# SPDX-License-Identifier: Apache-2.0
"""deepseek_v2 and deepseek_v3: latent attention, dense layers first, shared and routed experts."""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import MlaSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertGroups, ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names
from .config_reader import ConfigReader
from .glm4_moe import MIXTURE_NAMES
from .llama import LLAMA_NAMES
from .mla_config import mla_names, read_deepseek_mla
from .moe_config import model_of, read_count, read_shared, read_sigmoid_router, usual_expert_names
from .weight_names import checkpoint_names


def read_deepseek_v2(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 2048)
    reader.require("mlp_bias", False)
    reader.require("norm_topk_prob", False)
    reader.require("scoring_func", "softmax")
    mixer = read_deepseek_mla(reader, context, pairs=True)
    inner = reader.whole("moe_intermediate_size", 1407)
    router = _read_softmax_router(reader)
    shared = read_shared(reader, "n_shared_experts", 2, inner)
    layers = _layers(reader, mixer, MoeSpec(router, ExpertSpec(inner), shared), dense=0)
    return model_of(reader, layers, context=context, eps=1e-6)


def read_deepseek_v3(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 4096)
    reader.require("scoring_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):  # left out of the weights too
        reader.get(key)
    pairs = reader.flag("rope_interleave", True)
    mixer = read_deepseek_mla(reader, context, pairs=pairs)
    inner = reader.whole("moe_intermediate_size", 2048)
    router = read_sigmoid_router(reader, 256, 8, groups=(8, 4), scale=2.5)
    shared = read_shared(reader, "n_shared_experts", 1, inner)
    layers = _layers(reader, mixer, MoeSpec(router, ExpertSpec(inner), shared), dense=3)
    return model_of(reader, layers, context=context, eps=1e-6)


def _read_softmax_router(reader: ConfigReader) -> RouterSpec:
    """Within the groups that have the likeliest expert, or without groups. Weights are not
    normalised in this family."""
    reader.require("topk_method", "greedy", "group_limited_greedy")
    count, chosen = read_count(reader, "n_group", 1), read_count(reader, "topk_group", 1)
    grouped = reader.get("topk_method") == "group_limited_greedy" and count > 1
    return RouterSpec(
        num_experts=reader.whole("n_routed_experts", 64),
        top_k=reader.whole("num_experts_per_tok"),
        scores="softmax",
        groups=ExpertGroups(count, chosen, "largest") if grouped else None,
        scale=reader.number("routed_scaling_factor", 1.0),
    )


def _layers(
    reader: ConfigReader, mixer: MlaSpec, mixture: MoeSpec, *, dense: int
) -> list[LayerSpec]:
    """`dense`: how many layers at the start are no mixtures, by default."""
    reader.require("hidden_act", "silu", "swish")
    reader.require("moe_layer_freq", 1)
    reader.get("ep_size")  # how experts were spread over devices
    mlp = MlpSpec(reader.whole("intermediate_size"))
    dense = read_count(reader, "first_k_dense_replace", dense)
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    return [LayerSpec(mixer, mlp if index < dense else mixture) for index in range(layers)]


def deepseek_names(spec: ModelSpec) -> Names:
    return checkpoint_names(
        spec, {**LLAMA_NAMES, **mla_names(spec), **MIXTURE_NAMES, **usual_expert_names(spec)}
    )

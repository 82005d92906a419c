# SPDX-License-Identifier: Apache-2.0
"""qwen3_5: as qwen3_next, the projections of gated delta nets stored one by one; dense, or every
layer a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, ModelSpec
from ..specs.mlp import MlpSpec
from ..weight_source import Names
from .config_reader import ConfigReader
from .delta_config import delta_of, hybrid_names, read_hybrid, read_mixture
from .weight_names import Naming, part_of

# The vision tower and multi-token prediction are no part of the text model.
_OF_OTHER_PARTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def read_qwen3_5(config: Mapping[str, Any]) -> ModelSpec:
    """config.json, or the text part of one -> spec."""
    reader = ConfigReader(config)
    for key in _OF_OTHER_PARTS:
        reader.get(key)
    reader.require("attn_output_gate", True)
    reader.require("mamba_ssm_dtype", "float32")
    reader.require("output_gate_type", "swish", "silu")
    reader.require("mlp_only_layers", [])
    family = str(config["model_type"])
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    if family == "qwen3_5_moe_text":
        reader.get("intermediate_size")  # no layer is dense
        reader.require("decoder_sparse_step", 1)
        reader.require("norm_topk_prob", True)
        mixture = read_mixture(reader, num_experts=256, top_k=8, normalised=True)
        spec = read_hybrid(reader, family, (mixture,) * layers, kv_heads=2)
    else:
        dense = MlpSpec(reader.whole("intermediate_size", 12_288))
        spec = read_hybrid(reader, family, (dense,) * layers, kv_heads=4)
    reader.finish()
    return spec


def qwen3_5_names(spec: ModelSpec) -> Names:
    delta = delta_of(spec)
    if delta is None:
        return hybrid_names(spec, {})
    key, channels = delta.key_width, delta.channels
    names: dict[str, str | Naming] = {f"delta.{x}": f"linear_attn.in_proj_{x}" for x in "zba"}
    for part, start, stop in (("q", 0, key), ("k", key, 2 * key), ("v", 2 * key, channels)):
        stored = "linear_attn.in_proj_qkv.weight"
        names[f"delta.{part}"] = part_of(stored, 0, start, stop, channels, spec.hidden_size)
    return hybrid_names(spec, names)

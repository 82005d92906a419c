# SPDX-License-Identifier: Apache-2.0
"""qwen3_next: gated delta nets, every fourth layer gated attention; mixtures of experts.

Its checkpoints interleave what a key head needs: q, k, v and z of one head follow each other.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import MAX_LAYERS, ModelSpec
from ..specs.mlp import MlpSpec
from ..weight_source import Names
from .config_reader import ConfigReader
from .delta_config import delta_of, hybrid_names, of_heads, read_hybrid, read_mixture
from .moe_config import read_sparse_layers


def read_qwen3_next(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> spec."""
    reader = ConfigReader(config)
    reader.require("use_sliding_window", False)
    normalised = reader.flag("norm_topk_prob", True)
    dense = MlpSpec(reader.whole("intermediate_size", 5632))
    mixture = read_mixture(reader, num_experts=512, top_k=10, normalised=normalised)
    sparse = read_sparse_layers(reader, reader.whole("num_hidden_layers", maximum=MAX_LAYERS))
    feed_forwards = tuple(mixture if is_sparse else dense for is_sparse in sparse)
    spec = read_hybrid(reader, "qwen3_next", feed_forwards, kv_heads=2)
    reader.finish()
    return spec


def qwen3_next_names(spec: ModelSpec) -> Names:
    delta = delta_of(spec)
    if delta is None:
        return hybrid_names(spec, {})
    repeat = delta.num_heads // delta.num_key_heads
    values = repeat * delta.head_dim
    sizes = {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values}
    names = of_heads("linear_attn.in_proj_qkvz", delta.num_key_heads, sizes)
    names |= of_heads("linear_attn.in_proj_ba", delta.num_key_heads, {"b": repeat, "a": repeat})
    return hybrid_names(spec, {f"delta.{part}": naming for part, naming in names.items()})

# SPDX-License-Identifier: Apache-2.0
"""Names of parameters in GGUF files: llama.cpp's, and what its converter does to their order."""

from collections.abc import Mapping

from .models.moe_config import expert_names, one_of_all
from .models.weight_names import Naming, checkpoint_names, paired, tensor
from .spec import ModelSpec
from .specs.attention import AttentionSpec
from .weight_source import Names

_COMMON: Mapping[str, str | Naming] = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "mixer_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}
# Per family, what is named otherwise.
_OTHERS: Mapping[str, Mapping[str, str | Naming]] = {
    "gemma3_text": {
        "mixer_post_norm": "post_attention_norm",
        "feed_forward_post_norm": "post_ffw_norm",
    },
    "gpt_oss": {
        "feed_forward_norm": "post_attention_norm",
        "sinks": tensor("attn_sinks.weight"),
    },
}


def gguf_names(spec: ModelSpec) -> Names:
    table = {**_COMMON, **_OTHERS.get(spec.architecture, {}), **_experts(spec)}
    if spec.architecture == "llama":
        table |= _neighbours(spec)
    return checkpoint_names(spec, table, layers="blk")


def _neighbours(spec: ModelSpec) -> dict[str, str | Naming]:
    """The converter puts the rows of q and k so that rope pairs neighbouring dimensions."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return {
        f"{part}{bias}": paired(f"attn_{part}.{bias.removeprefix('.') or 'weight'}", heads)
        for part, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads))
        for bias in ("", ".bias")
    }


def _experts(spec: ModelSpec) -> dict[str, str | Naming]:
    """All experts of a layer are one tensor, gate and up apart."""
    return expert_names(
        spec,
        **{
            f"{part}{bias}": one_of_all(f"ffn_{part}_exps.{bias.removeprefix('.') or 'weight'}")
            for part in ("gate", "up", "down")
            for bias in ("", ".bias")
        },
    )

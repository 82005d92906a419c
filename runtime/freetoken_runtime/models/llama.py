# SPDX-License-Identifier: Apache-2.0
"""The Llama family: llama, mistral (without window), qwen2 and qwen3.

They differ in which biases and norms exist and in a few defaults, nothing else.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..weight_source import Names
from .config_reader import ConfigReader
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names

DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


def read_llama(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> spec, for every model type in DEFAULT_CONTEXT."""
    reader = ConfigReader(config)
    family = str(config["model_type"])
    context = reader.whole("max_position_embeddings", DEFAULT_CONTEXT[family])
    layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    reader.require("hidden_act", "silu", "swish")
    _refuse_window(reader, family, context)
    layer = LayerSpec(_read_attention(reader, family, context), _read_mlp(reader, family))
    spec = ModelSpec(
        architecture=family,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=(layer,) * layers,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
    )
    reader.finish()
    return spec


def _read_attention(reader: ConfigReader, family: str, context: int) -> AttentionSpec:
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    # Null means one per head; where the key is absent, only llama's default is that.
    null = family == "llama" or reader.has("num_key_value_heads")
    kv_heads = reader.whole("num_key_value_heads", heads if null else None)
    if family == "qwen3":
        head_dim = reader.whole("head_dim", 128)
    elif reader.get("head_dim") is None and hidden % heads:
        raise UnsupportedConfig("hidden_size / num_attention_heads must be whole", value=hidden)
    else:
        head_dim = reader.whole("head_dim", hidden // heads)
    bias = reader.flag("attention_bias") if family in ("llama", "qwen3") else False
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        qk_norm="head" if family == "qwen3" else None,
    )


def _read_mlp(reader: ConfigReader, family: str) -> MlpSpec:
    bias = reader.flag("mlp_bias") if family == "llama" else False
    return MlpSpec(reader.whole("intermediate_size"), bias)


def _refuse_window(reader: ConfigReader, family: str, context: int) -> None:
    if family == "llama":
        return
    window = reader.get("sliding_window")
    if family == "mistral" and not reader.has("sliding_window"):
        window = 4096  # transformers' default for an absent key; null means no window
    if family in ("qwen2", "qwen3") and not reader.flag("use_sliding_window"):
        window = None
    if "sliding_attention" in reader.get("layer_types", ()):
        raise UnsupportedConfig(
            "config key 'layer_types' asks for sliding attention, which is not supported",
            value=window,
            remedy="use a model with full attention in every layer",
        )
    if window is not None and window < context:
        raise UnsupportedConfig(
            "config key 'sliding_window' is smaller than the context, which is not supported",
            value=window,
            limit=f"null, or at least max_position_embeddings ({context})",
        )


# Part of a layer here -> module in a Hugging Face checkpoint.
LLAMA_NAMES: Mapping[str, str | Naming] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def llama_names(spec: ModelSpec) -> Names:
    return checkpoint_names(spec, LLAMA_NAMES)

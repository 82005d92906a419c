# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says about its model: metadata -> the family's configuration -> spec.

Keys and their defaults are llama.cpp's. A key of the architecture that nobody reads is refused, as
it may change the maths.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from .errors import UnsupportedArchitecture, UnsupportedConfig, WeightsDamaged, WeightsMismatch
from .gguf_header import GgufHeader
from .models.registry import read_spec
from .spec import MAX_LAYERS, LayerSpec, ModelSpec
from .specs.attention import AttentionSpec
from .specs.rope import FactorScaling

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rope's frequencies (Llama 3)
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_GEMMA3_27B_LAYERS = 62  # llama.cpp knows the model whose scores are scaled otherwise by these


class Fields:
    """Metadata of the architecture by key; a missing or mistyped one is an error that names file
    and key. Mutable: it remembers what was read."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self._file, self._header = file, header
        self._unread: set[str] = set()
        self.architecture = self._text("general.architecture", None)
        self._prefix = f"{self.architecture}."
        keys = {*header.metadata, *header.arrays}
        self._unread |= {key for key in keys if key.startswith(self._prefix)}
        self._unread -= {self._prefix + key for key in _HARMLESS}

    def finish(self) -> None:
        """UnsupportedConfig naming a key of the architecture that nobody read."""
        for key in sorted(self._unread):
            raise UnsupportedConfig(
                f"{self._file}: metadata {key!r} is not supported and may change the maths",
                value=self._header.metadata.get(key, "an array"),
                remedy="use a file of a supported model",
            )

    def has(self, key: str) -> bool:
        return self._prefix + key in self._header.metadata

    def whole(self, key: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        value = self._value(self._prefix + key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self.refused(key, value, f"1 to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(self._prefix + key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise self.refused(key, value, "positive and finite")
        return float(value)

    def text(self, key: str, default: str) -> str:
        return self._text(self._prefix + key, default)

    def require(self, key: str, supported: object) -> None:
        """A key that may be absent but otherwise must have this value."""
        value = self._value(self._prefix + key, supported)
        if value != supported:
            raise self.refused(key, value, supported)

    def tensor_rows(self, name: str) -> int:
        if name not in self._header.tensors:
            raise WeightsMismatch(f"weights are missing in {self._file}: {name}")
        return self._header.tensors[name].shape[0]

    def has_tensor(self, name: str) -> bool:
        return name in self._header.tensors

    def _text(self, key: str, default: str | None) -> str:
        return str(self._value(key, default))

    def _value(self, key: str, default: object) -> object:
        if key in self._header.arrays:
            raise UnsupportedConfig(f"{self._file}: {key}", value="an array", limit="one value")
        self._unread.discard(key)
        value = self._header.metadata.get(key, default)
        if value is None:
            raise WeightsDamaged(f"weight file {self._file} has no metadata {key!r}")
        return value

    def refused(self, key: str, value: object, limit: object) -> UnsupportedConfig:
        return UnsupportedConfig(f"{self._file}: {self._prefix}{key}", value=value, limit=limit)


def read_gguf_spec(
    file: Path, header: GgufHeader, rope_factors: tuple[float, ...] | None
) -> ModelSpec:
    """UnsupportedArchitecture, UnsupportedConfig, WeightsDamaged, WeightsMismatch, all naming the
    file. `rope_factors`: the tensor of that name, if the file has it."""
    _refuse_parts(file, header)
    fields = Fields(file, header)
    if fields.architecture not in _ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"the architecture of {file} is not supported",
            value=fields.architecture,
            limit=f"{', '.join(_ARCHITECTURES)} (GGUF)",
        )
    config = _read_common(fields) | _ARCHITECTURES[fields.architecture](fields)
    fields.finish()
    spec = replace(read_spec(config), norm_offset=0.0)  # Gemma's norms are stored as 1 + w
    layers = []
    for index, layer in enumerate(spec.layers):
        if fields.architecture == "llama":
            layer = _with_biases(fields, index, layer)
        if rope_factors is not None:
            layer = _with_factors(file, layer, rope_factors)
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def _refuse_parts(file: Path, header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise UnsupportedConfig(
            f"{file} is one of several files of a model",
            value=count,
            limit=1,
            remedy="merge them, with llama.cpp's gguf-split --merge",
        )


def _read_common(fields: Fields) -> dict[str, Any]:
    heads = fields.whole("attention.head_count")
    hidden = fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", hidden // heads or 1)
    fields.require("attention.value_length", head_dim)
    fields.require("rope.dimension_count", head_dim)
    config = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": fields.whole("block_count", maximum=MAX_LAYERS),
        "max_position_embeddings": fields.whole("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "vocab_size": fields.tensor_rows("token_embd.weight"),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
    }
    scaling = _read_scaling(fields)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _read_scaling(fields: Fields) -> dict[str, Any] | None:
    """llama.cpp takes a factor without a type as linear scaling."""
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scaling.factor") else "")
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind in ("", "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.refused("rope.scaling.type", kind, "none, linear, yarn")
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _read_llama(fields: Fields) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "intermediate_size": fields.whole("feed_forward_length"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
    }


def _read_qwen(fields: Fields) -> dict[str, Any]:
    return {
        "model_type": fields.architecture,
        "intermediate_size": fields.whole("feed_forward_length"),
    }


def _read_qwen3moe(fields: Fields) -> dict[str, Any]:
    """Every layer is a mixture; the weights of its experts are normalised."""
    fields.require("expert_weights_norm", True)
    used = fields.whole("expert_used_count")
    total = fields.whole("feed_forward_length", maximum=2**31 - 1)
    return {
        "model_type": "qwen3_moe",
        "intermediate_size": total,
        "num_experts": fields.whole("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": fields.whole("expert_feed_forward_length", total // used or 1),
        "norm_topk_prob": True,
    }


def _read_gemma3(fields: Fields) -> dict[str, Any]:
    """Every sixth layer sees everything, the others through a window and with a rope of their own,
    unless the file says otherwise."""
    heads = fields.whole("attention.head_count")
    hidden = fields.whole("embedding_length")
    wide = fields.whole("block_count") == _GEMMA3_27B_LAYERS
    head_dim = fields.whole("attention.key_length", hidden // heads or 1)
    config = {
        "model_type": "gemma3_text",
        "intermediate_size": fields.whole("feed_forward_length"),
        "sliding_window": fields.whole("attention.sliding_window"),
        "sliding_window_pattern": fields.whole("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": hidden / heads if wide else head_dim,
    }
    if fields.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    return config


def _read_gpt_oss(fields: Fields) -> dict[str, Any]:
    """Every second layer has a window, the first one too. The rope's ramp is not rounded to whole
    dimensions, as in the original, whatever llama.cpp does."""
    total = fields.whole("feed_forward_length", fields.whole("expert_feed_forward_length"))
    inner = fields.whole("expert_feed_forward_length", total)
    config: dict[str, Any] = {
        "model_type": "gpt_oss",
        "intermediate_size": inner,
        "num_local_experts": fields.whole("expert_count"),
        "num_experts_per_tok": fields.whole("expert_used_count"),
        "sliding_window": fields.whole("attention.sliding_window"),
    }
    scaling = _read_scaling(fields)
    if scaling is None:  # `rope_scaling` must not be absent: the family's own would be taken
        return {**config, "rope_scaling": {"rope_type": "default"}}
    return {**config, "rope_scaling": {**scaling, **_untruncated(scaling)}}


def _untruncated(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {"truncate": False} if scaling["rope_type"] == "yarn" else {}


_ARCHITECTURES: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen,
    "qwen3": _read_qwen,
    "qwen3moe": _read_qwen3moe,
    "gemma3": _read_gemma3,
    "gpt-oss": _read_gpt_oss,
}


def _with_biases(fields: Fields, index: int, layer: LayerSpec) -> LayerSpec:
    """Models that others call llama have biases in attention, which only the tensors tell."""
    assert isinstance(layer.mixer, AttentionSpec)
    mixer = replace(
        layer.mixer,
        qkv_bias=fields.has_tensor(f"blk.{index}.attn_q.bias"),
        output_bias=fields.has_tensor(f"blk.{index}.attn_output.bias"),
    )
    return replace(layer, mixer=mixer)


def _with_factors(file: Path, layer: LayerSpec, factors: tuple[float, ...]) -> LayerSpec:
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
    if mixer.rope.scaling is not None:
        raise UnsupportedConfig(
            f"{file}: rope scaling is not supported beside {ROPE_FACTORS!r}",
            value=mixer.rope.scaling,
        )
    if len(factors) != mixer.rope.dim // 2:
        raise WeightsMismatch(
            f"tensor {ROPE_FACTORS!r} in {file} has the wrong length",
            value=len(factors),
            limit=mixer.rope.dim // 2,
        )
    if not all(0 < factor < inf for factor in factors):
        raise WeightsDamaged(f"tensor {ROPE_FACTORS!r} in {file} is not positive and finite")
    return replace(
        layer, mixer=replace(mixer, rope=replace(mixer.rope, scaling=FactorScaling(factors)))
    )

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of the llama architecture: metadata -> spec, tensors -> parameters.

Layouts of the blocks of 32 weights are those of ggml (`ggml-quants.h`); names and metadata keys
those of llama.cpp, whose converter also permutes the rows of q and k, which is undone here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from .errors import (
    UnsupportedArchitecture,
    UnsupportedConfig,
    UnsupportedQuantization,
    WeightsDamaged,
)
from .spec import (
    AttentionSpec,
    FactorScaling,
    LayerSpec,
    LinearScaling,
    MlpSpec,
    ModelSpec,
    RopeScaling,
    RopeSpec,
)
from .weight_source import Groups, WeightSource

_MODULES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "mixer_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = 32


class GgufFile(WeightSource):
    """Weights of one .gguf file, mapped."""

    def __init__(self, file: Path) -> None:
        reader = _open(file)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        spec = _read_spec(file, reader, self._tensors)
        super().__init__(file, spec, {name: _gguf_name(name) for name in spec.parameter_shapes()})

    @property
    def files(self) -> Sequence[Path]:
        return [self.path]

    def _stored_names(self) -> set[str]:
        return set(self._tensors) - {_ROPE_FACTORS}

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[stored].shape))

    def _read(self, name: str, stored: str) -> torch.Tensor:
        tensor = self._tensors[stored]
        weights = _dequantise(tensor.tensor_type, tensor.data, stored, self.path)
        weights = weights.view(self._stored_shape(stored))
        order = self._row_order(name)
        return weights if order is None else weights[order]

    def _read_groups(self, name: str, stored: str) -> Groups | None:
        tensor = self._tensors[stored]
        if tensor.tensor_type not in (Type.Q4_0, Type.Q4_1):
            return None
        groups = _groups(tensor.tensor_type, tensor.data)
        order = self._row_order(name)
        if order is None:
            return groups
        return Groups(
            groups.values[order], groups.scales[order], groups.minimums[order], groups.size
        )

    def _row_order(self, name: str) -> torch.Tensor | None:
        """For q and k: which stored row is row i here. llama.cpp pairs neighbouring dimensions in
        its rope, so its converter interleaves the halves of every head."""
        part = name.removesuffix(".bias").rpartition(".")[2]
        if part not in ("q", "k"):
            return None
        mixer = self.spec.layers[0].mixer
        heads = mixer.num_heads if part == "q" else mixer.num_kv_heads
        rows = torch.arange(heads * mixer.head_dim)
        return rows.view(heads, mixer.head_dim // 2, 2).transpose(1, 2).reshape(-1)


def _open(file: Path) -> Any:
    size = file.stat().st_size
    if size == 0:
        raise WeightsDamaged(f"weight file {file} is empty", remedy="download it again")
    try:
        reader = GGUFReader(file)
        ends = [(int(t.data_offset) + int(t.n_bytes), t.name) for t in reader.tensors]
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise WeightsDamaged(
            f"weight file {file} is truncated or not GGUF ({error})",
            value=f"{size} bytes",
            remedy="download it again",
        ) from error
    end, name = max(ends, default=(0, ""))
    if end > size:
        raise WeightsDamaged(f"weight file {file} ends inside tensor {name!r}", value=size)
    return reader


def _read_spec(file: Path, reader: Any, tensors: dict[str, Any]) -> ModelSpec:
    fields = _Fields(file, reader)
    if fields.text("general.architecture") != "llama":
        raise UnsupportedArchitecture(
            f"the architecture of {file} is not supported",
            value=fields.text("general.architecture"),
            limit="llama (GGUF)",
        )
    heads = fields.whole("llama.attention.head_count")
    hidden = fields.whole("llama.embedding_length")
    context = fields.whole("llama.context_length")
    head_dim = fields.whole("llama.attention.key_length", hidden // heads)
    if fields.whole("llama.attention.value_length", head_dim) != head_dim:
        raise UnsupportedConfig(f"{file}: keys and values of different lengths", value=head_dim)
    if fields.whole("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedConfig(f"{file}: partial rotation is not supported", limit=head_dim)
    for key in ("llama.expert_count", "llama.attention.sliding_window"):
        if fields.number(key, 0):
            raise UnsupportedConfig(f"{file}: {key} is not supported", value=fields.number(key, 0))
    theta = fields.number("llama.rope.freq_base", 10_000.0)
    mixer = AttentionSpec(
        num_heads=heads,
        num_kv_heads=fields.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=RopeSpec(head_dim, theta, _read_scaling(file, fields, tensors)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
    )
    mlp = MlpSpec(fields.whole("llama.feed_forward_length"), "blk.0.ffn_up.bias" in tensors)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsDamaged(f"weight file {file} has no token_embd.weight")
    return ModelSpec(
        architecture="llama",
        vocab_size=int(embedding.shape[-1]),
        hidden_size=hidden,
        layers=(LayerSpec(mixer, mlp),) * fields.whole("llama.block_count"),
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
        tied_head="output.weight" not in tensors,
        context_limit=context,
    )


def _read_scaling(file: Path, fields: "_Fields", tensors: dict[str, Any]) -> RopeScaling | None:
    kind = fields.text("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedConfig(f"{file}: rope scaling is not supported", value=kind)
    if _ROPE_FACTORS in tensors:
        return FactorScaling(tuple(float(x) for x in tensors[_ROPE_FACTORS].data))
    if kind == "linear":
        return LinearScaling(fields.number("llama.rope.scaling.factor", 1.0))
    return None


class _Fields:
    """Metadata by key; a missing or mistyped one is an error that names file and key."""

    def __init__(self, file: Path, reader: Any) -> None:
        self._file, self._fields = file, reader.fields

    def _value(self, key: str, default: Any) -> Any:
        field = self._fields.get(key)
        if field is None and default is None:
            raise WeightsDamaged(f"weight file {self._file} has no metadata {key!r}")
        return default if field is None else field.contents()

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedConfig(f"{self._file}: {key}", value=value, limit="a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise UnsupportedConfig(f"{self._file}: {key}", value=value, limit="a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._value(key, default))


def _gguf_name(name: str) -> str:
    stem, kind = (name[: -len(".bias")], "bias") if name.endswith(".bias") else (name, "weight")
    if not stem.startswith("layers."):
        return f"{_MODULES[stem]}.{kind}"
    _, index, part = stem.split(".")
    return f"blk.{index}.{_MODULES[part]}.{kind}"


def _dequantise(kind: Type, data: np.ndarray, stored: str, file: Path) -> torch.Tensor:
    """Stored bytes -> fp32, or the stored float dtype."""
    if kind == Type.F32:
        return torch.from_numpy(data.astype(np.float32))
    if kind == Type.F16:
        return torch.from_numpy(data.astype(np.float16))
    if kind == Type.BF16:
        return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16)
    if kind == Type.Q8_0:
        blocks = torch.from_numpy(np.array(data)).view(-1, 2 + _BLOCK)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return blocks[:, 2:].view(torch.int8) * scales
    if kind in (Type.Q4_0, Type.Q4_1):
        groups = _groups(kind, data)
        values = groups.values.view(-1, _BLOCK).float()
        return values.mul_(groups.scales.view(-1, 1)).add_(groups.minimums.view(-1, 1))
    raise UnsupportedQuantization(
        f"tensor {stored!r} in {file} has a type that cannot be loaded",
        value=Type(kind).name,
        limit="F32, F16, BF16, Q8_0, Q4_0, Q4_1",
    )


def _groups(kind: Type, data: np.ndarray) -> Groups:
    """Rows of blocks: fp16 scale, for Q4_1 fp16 minimum, 16 bytes whose low nibbles are weights
    0..15 and whose high nibbles are weights 16..31."""
    head = 2 if kind == Type.Q4_0 else 4
    blocks = torch.from_numpy(np.array(data)).view(len(data), -1, head + _BLOCK // 2)
    floats = blocks[..., :head].contiguous().view(torch.float16).float()  # [N, K / 32, 1 or 2]
    nibbles = blocks[..., head:]
    values = torch.cat((nibbles & 15, nibbles >> 4), -1).view(len(data), -1)
    scales = floats[..., 0]
    # Q4_0 is (q - 8) d; q d - 8 d is the same fp32 number, as d has only 11 bits.
    minimums = -8 * scales if kind == Type.Q4_0 else floats[..., 1].contiguous()
    return Groups(values, scales.contiguous(), minimums, _BLOCK)

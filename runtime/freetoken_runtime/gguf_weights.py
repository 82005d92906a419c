# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of the llama architecture: metadata -> spec, tensors -> parameters.

Layouts of the blocks of 32 weights are those of ggml (`ggml-quants.h`); names and metadata keys
those of llama.cpp, whose converter also permutes the rows of q and k, which is undone here.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from .errors import (
    UnsupportedArchitecture,
    UnsupportedConfig,
    UnsupportedQuantization,
    WeightsDamaged,
    WeightsMismatch,
)
from .gguf_header import GgufHeader, TensorInfo, read_header
from .spec import MAX_LAYERS, LayerSpec, ModelSpec
from .specs.attention import AttentionSpec
from .specs.mlp import MlpSpec
from .specs.rope import FactorScaling, LinearScaling, RopeScaling, RopeSpec
from .weight_source import Groups, Stored, WeightSource

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
_HARMLESS_KEYS = {"llama.vocab_size", "llama.tensor_data_layout"}
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rope's frequencies (Llama 3)
_FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_TYPES = (*_FLOATS, Type.Q8_0, Type.Q4_0, Type.Q4_1)
_BLOCK = 32


class GgufFile(WeightSource):
    """Weights of one .gguf file, mapped."""

    def __init__(self, file: Path) -> None:
        header = read_header(file)
        self._tensors = header.tensors
        self._bytes = np.memmap(file, np.uint8, "r")
        spec = _read_spec(file, header, self._bytes)
        shapes = spec.parameter_shapes()
        names = {name: ((Stored(_gguf_name(name), shape),),) for name, shape in shapes.items()}
        super().__init__(file, spec, names)

    @property
    def files(self) -> Sequence[Path]:
        return [self.path]

    def check(self) -> None:
        super().check()
        for name, info in self._tensors.items():
            if info.kind not in _TYPES:
                raise UnsupportedQuantization(
                    f"tensor {name!r} in {self.path} has a type that cannot be loaded",
                    value=info.kind.name,
                    limit=", ".join(kind.name for kind in _TYPES),
                )

    def _stored_names(self) -> set[str]:
        return set(self._tensors) - {_ROPE_FACTORS}

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return self._tensors[stored].shape

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        info = self._tensors[stored.tensor]
        weights = _dequantise(info, _stored_bytes(self._bytes, info))
        order = self._row_order(name)
        return weights if order is None else weights[order]

    def _read_groups(self, name: str, stored: str) -> Groups | None:
        info = self._tensors[stored]
        if info.kind not in (Type.Q4_0, Type.Q4_1):
            return None
        groups = _groups(info, _stored_bytes(self._bytes, info))
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
        assert isinstance(mixer, AttentionSpec)
        heads = mixer.num_heads if part == "q" else mixer.num_kv_heads
        rows = torch.arange(heads * mixer.head_dim)
        return rows.view(heads, mixer.head_dim // 2, 2).transpose(1, 2).reshape(-1)


def _read_spec(file: Path, header: GgufHeader, stored: np.ndarray) -> ModelSpec:
    fields, tensors = _Fields(file, header), header.tensors
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
    theta = fields.number("llama.rope.freq_base", 10_000.0)
    scaling = _read_scaling(file, fields, header, stored)
    if isinstance(scaling, FactorScaling) and len(scaling.factors) != head_dim // 2:
        raise WeightsMismatch(f"tensor {_ROPE_FACTORS!r} in {file} has the wrong length")
    mixer = AttentionSpec(
        num_heads=heads,
        num_kv_heads=fields.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=RopeSpec(head_dim, theta, scaling),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
    )
    mlp = MlpSpec(fields.whole("llama.feed_forward_length"), "blk.0.ffn_up.bias" in tensors)
    layers = fields.whole("llama.block_count", maximum=MAX_LAYERS)
    eps = fields.number("llama.attention.layer_norm_rms_epsilon", 1e-5)
    fields.finish()
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsMismatch(f"weights are missing in {file}: token_embd.weight")
    return ModelSpec(
        architecture="llama",
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        layers=(LayerSpec(mixer, mlp),) * layers,
        norm_eps=eps,
        tied_head="output.weight" not in tensors,
        context_limit=context,
    )


def _read_scaling(
    file: Path, fields: "_Fields", header: GgufHeader, stored: np.ndarray
) -> RopeScaling | None:
    kind = fields.text("llama.rope.scaling.type", "none")
    factor = fields.number("llama.rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise UnsupportedConfig(f"{file}: rope scaling is not supported", value=kind)
    factors = header.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        return FactorScaling(tuple(_dequantise(factors, _stored_bytes(stored, factors)).tolist()))
    if kind == "linear":
        return LinearScaling(factor)
    return None


class _Fields:
    """Metadata by key; a missing or mistyped one is an error that names file and key. Mutable: it
    remembers what was read."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self._file, self._metadata = file, header.metadata
        self._unread = {
            key for key in (*header.metadata, *header.arrays) if key.startswith("llama.")
        }
        self._unread -= _HARMLESS_KEYS

    def finish(self) -> None:
        """UnsupportedConfig naming a key of the architecture that nobody read."""
        for key in sorted(self._unread):
            raise UnsupportedConfig(
                f"{self._file}: metadata {key!r} is not supported and may change the maths",
                value=self._metadata.get(key, "an array"),
            )

    def _value(self, key: str, default: object) -> object:
        self._unread.discard(key)
        value = self._metadata.get(key, default)
        if value is None:
            raise WeightsDamaged(f"weight file {self._file} has no metadata {key!r}")
        return value

    def whole(self, key: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or not 1 <= value <= maximum:
            raise UnsupportedConfig(f"{self._file}: {key}", value=value, limit=f"1 to {maximum}")
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


def _stored_bytes(stored: np.ndarray, info: TensorInfo) -> torch.Tensor:
    """A tensor's bytes [size] uint8, copied out of the mapping."""
    return torch.from_numpy(np.array(stored[info.offset : info.offset + info.size_bytes]))


def _dequantise(info: TensorInfo, stored: torch.Tensor) -> torch.Tensor:
    """Stored bytes -> a tensor of `info.shape`, in the stored float dtype or fp32."""
    if info.kind in _FLOATS:
        return stored.view(_FLOATS[info.kind]).view(info.shape)
    if info.kind == Type.Q8_0:
        blocks = stored.view(-1, 2 + _BLOCK)  # fp16 scale, 32 int8
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].contiguous().view(torch.int8) * scales).view(info.shape)
    groups = _groups(info, stored)
    values = groups.values.view(-1, _BLOCK).float()
    values.mul_(groups.scales.view(-1, 1)).add_(groups.minimums.view(-1, 1))
    return values.view(info.shape)


def _groups(info: TensorInfo, stored: torch.Tensor) -> Groups:
    """Rows of blocks: fp16 scale, for Q4_1 fp16 minimum, 16 bytes whose low nibbles are weights
    0..15 and whose high nibbles are weights 16..31."""
    head = 2 if info.kind == Type.Q4_0 else 4
    rows = info.shape[0]
    blocks = stored.view(rows, -1, head + _BLOCK // 2)
    floats = blocks[..., :head].contiguous().view(torch.float16).float()  # [N, K / 32, 1 or 2]
    nibbles = blocks[..., head:]
    values = torch.cat((nibbles & 15, nibbles >> 4), -1).view(rows, -1)
    scales = floats[..., 0].contiguous()
    # Q4_0 is (q - 8) d; q d - 8 d is the same fp32 number, as d has only 11 bits.
    minimums = -8 * scales if info.kind == Type.Q4_0 else floats[..., 1].contiguous()
    return Groups(values, scales, minimums, _BLOCK)

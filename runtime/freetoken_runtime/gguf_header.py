# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a GGUF file lie: the header as the storage layer reads it, with the sizes of
ggml's types. Arrays are stepped over: the vocabulary is read by tokenizers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from freetoken_storage.gguf import GgufDamaged, GgufTensor, GgufValue, read_gguf

from .errors import WeightsDamaged


@dataclass(frozen=True)
class TensorInfo:
    """`shape` in the usual order, outputs first. `offset`: bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: Type
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: Mapping[str, GgufValue]  # scalars and strings
    arrays: frozenset[str]  # keys of what was stepped over
    tensors: Mapping[str, TensorInfo]


def read_header(file: Path) -> GgufHeader:
    """WeightsDamaged, naming the file, if it is empty, foreign, truncated or inconsistent."""
    try:
        header = read_gguf(file, arrays=False)
    except GgufDamaged as error:
        raise _damaged(file, error.detail, error.value) from error
    tensors = {}
    for name, tensor in header.tensors.items():
        try:
            info = _placed(name, tensor, header.data_start)
            if info.offset + info.size_bytes > header.size_bytes:
                raise ValueError(f"the file ends inside tensor {name!r}")
        except ValueError as error:
            raise _damaged(file, str(error), f"{header.size_bytes} bytes") from error
        tensors[name] = info
    return GgufHeader(header.metadata, header.skipped, tensors)


def _placed(name: str, tensor: GgufTensor, start: int) -> TensorInfo:
    kind = Type(tensor.kind)
    if kind not in GGML_QUANT_SIZES:
        raise ValueError(f"tensor {name!r} has type {kind.name}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = math.prod(tensor.shape)
    if not tensor.shape or elements == 0 or tensor.shape[-1] % block:
        raise ValueError(f"tensor {name!r} has the shape {tensor.shape}")
    size_bytes = elements // block * block_bytes
    return TensorInfo(tensor.shape, kind, start + tensor.offset, size_bytes)


def _damaged(file: Path, detail: str, value: object) -> WeightsDamaged:
    return WeightsDamaged(
        f"weight file {file} is truncated or not GGUF ({detail})",
        value=value,
        remedy="download it again",
    )

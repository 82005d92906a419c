# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file (versions 2 and 3, little-endian): metadata and where tensors lie.

    "GGUF"  version u32  tensors u64  entries u64
    entries x (key string, type u32, value)        string = length u64, UTF-8 bytes
    tensors x (name string, dimensions u32, shape u64 ..., type u32, offset u64)
    padding to `general.alignment` (32), then tensor data; offsets count from here

Every length is checked against the file before it is used. Arrays are stepped over, not kept: the
vocabulary is read by tokenizers.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from .errors import WeightsDamaged

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class TensorInfo:
    """`shape` in the usual order, outputs first. `offset`: bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: Type
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: Mapping[str, int | float | str]  # scalars and strings
    arrays: frozenset[str]  # keys of what was stepped over
    tensors: Mapping[str, TensorInfo]


def read_header(file: Path) -> GgufHeader:
    """WeightsDamaged, naming the file, if it is empty, foreign, truncated or inconsistent."""
    size = file.stat().st_size
    if size == 0:
        raise WeightsDamaged(f"weight file {file} is empty", remedy="download it again")
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return _Parser(data).header()
        except (ValueError, struct.error) as error:
            raise WeightsDamaged(
                f"weight file {file} is truncated or not GGUF ({error})",
                value=f"{size} bytes",
                remedy="download it again",
            ) from error


class _Parser:
    """A cursor over the mapped file. ValueError or struct.error wherever it does not add up."""

    def __init__(self, data: mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("no GGUF magic")
        version = self._count("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensors, entries = self._count("Q"), self._count("Q")
        metadata: dict[str, int | float | str] = {}
        arrays: set[str] = set()
        for _ in range(entries):
            key = self._string()
            if key in metadata or key in arrays:
                raise ValueError(f"metadata {key!r} is listed twice")
            value = self._value(self._count("I"))
            if value is None:
                arrays.add(key)
            else:
                metadata[key] = value
        infos: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = self._string()
            if name in infos:
                raise ValueError(f"tensor {name!r} is listed twice")
            infos[name] = self._tensor_info(name)
        return GgufHeader(metadata, frozenset(arrays), self._placed(infos, metadata))

    def _tensor_info(self, name: str) -> TensorInfo:
        dimensions = self._count("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._count("Q") for _ in range(dimensions))[::-1]
        kind = Type(self._count("I"))
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name!r} has type {kind.name}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if not shape or elements == 0 or shape[-1] % block:
            raise ValueError(f"tensor {name!r} has the shape {shape}")
        return TensorInfo(shape, kind, self._count("Q"), elements // block * block_bytes)

    def _placed(
        self, infos: dict[str, TensorInfo], metadata: Mapping[str, object]
    ) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"alignment {alignment!r}")
        start = self._at + -self._at % alignment
        placed = {}
        for name, info in infos.items():
            offset = start + info.offset
            if offset + info.size_bytes > len(self._data):
                raise ValueError(f"the file ends inside tensor {name!r}")
            placed[name] = TensorInfo(info.shape, info.kind, offset, info.size_bytes)
        return placed

    def _value(self, kind: int) -> int | float | str | None:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        raise ValueError(f"metadata type {kind}")

    def _skip_array(self) -> None:
        kind, count = self._count("I"), self._count("Q")
        if kind in _SCALARS:
            self._bytes(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return
        for _ in range(count):
            if kind != _STRING:  # arrays of arrays are legal, but nobody writes them
                raise ValueError(f"array of metadata type {kind}")
            self._bytes(self._count("Q"))

    def _scalar(self, code: str) -> int | float:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        number: int | float = value
        return number

    def _count(self, code: str) -> int:
        return int(self._scalar(code))

    def _string(self) -> str:
        return self._bytes(self._count("Q")).decode()

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("a length exceeds the file")
        self._at += count
        return self._data[self._at - count : self._at]

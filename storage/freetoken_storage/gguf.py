# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file (versions 2 and 3, little-endian): metadata, and where tensors lie.

    "GGUF"  version u32  tensors u64  pairs u64
    pairs   x (key string, type u32, value)      string = length u64, UTF-8; an array is: item type
                                                 u32, count u64, items
    tensors x (name string, dimensions u32, shape u64 ..., type u32, offset u64)
    padding to `general.alignment` (32), then tensor data; offsets count from here

Every length is checked against the file before it is used, so a hostile file costs no more memory
than its own size. What a key or a tensor type means is not known here.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import StorageError

GgufValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

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
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 13, 24  # with empty strings, no dimensions, one byte
_MAX_DIMENSIONS = 8
_MAX_ALIGNMENT = 1 << 20


class GgufDamaged(StorageError):
    """A file that is empty, truncated, foreign or contradicts itself. `detail` says how."""

    code = "gguf_damaged"

    def __init__(self, path: Path, detail: str, size_bytes: int) -> None:
        super().__init__(
            f"{path} is not a whole GGUF file: {detail}",
            value=f"{size_bytes} bytes",
            remedy="download the file again",
        )
        self.detail = detail


@dataclass(frozen=True)
class GgufTensor:
    """`shape` in the usual order, outputs first; `kind` is ggml's number of the type. `offset`
    counts from the start of the tensor data and was not checked: its size depends on the type."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """`skipped`: keys of arrays that were not asked for. `data_start`: where tensor data begins."""

    metadata: Mapping[str, GgufValue]
    skipped: frozenset[str]
    tensors: Mapping[str, GgufTensor]
    data_start: int
    size_bytes: int  # of the whole file


def read_gguf(path: str | os.PathLike[str], *, arrays: bool = True) -> GgufHeader:
    """The header of a file. `arrays=False` steps over arrays (a vocabulary is most of a header).

    GgufDamaged; OSError if the file cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if size == 0:
                raise ValueError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header(keep_arrays=arrays)
        except ValueError as error:
            raise GgufDamaged(path, str(error), size) from error


class _Cursor:
    """A position in the mapped file; ValueError wherever it does not add up."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self, *, keep_arrays: bool) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._count("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, known are {_VERSIONS}")
        num_tensors, num_pairs = self._count("Q"), self._count("Q")
        self._room(num_pairs * _MIN_PAIR_BYTES + num_tensors * _MIN_TENSOR_BYTES)
        metadata: dict[str, GgufValue] = {}
        skipped: set[str] = set()
        for _ in range(num_pairs):
            key = self._name()
            if key in metadata or key in skipped:
                raise ValueError(f"metadata {key!r} is listed twice")
            value = self._value(self._count("I"), keep_arrays)
            if value is None:
                skipped.add(key)
            else:
                metadata[key] = value
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self._name()
            if name in tensors:
                raise ValueError(f"tensor {name!r} is listed twice")
            tensors[name] = self._tensor(name)
        start = self._data_start(metadata.get("general.alignment", 32))
        return GgufHeader(metadata, frozenset(skipped), tensors, start, self._size)

    def _tensor(self, name: str) -> GgufTensor:
        dimensions = self._count("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._count("Q") for _ in range(dimensions))[::-1]
        return GgufTensor(shape, self._count("I"), self._count("Q"))

    def _data_start(self, alignment: GgufValue) -> int:
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"alignment {alignment!r}")
        return self._at + -self._at % alignment

    def _value(self, kind: int, keep_arrays: bool) -> GgufValue | None:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        item, count = self._count("I"), self._count("Q")
        if item == _STRING:
            return self._strings(count, keep=keep_arrays)
        if item not in _SCALARS:  # arrays of arrays are legal, but nobody writes them
            raise ValueError(f"an array of value type {item}")
        code = _SCALARS[item]
        packed = self._bytes(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", packed)) if keep_arrays else None

    def _strings(self, count: int, *, keep: bool) -> list[str] | None:
        """In one loop: vocabularies have hundreds of thousands."""
        self._room(count * _LENGTH.size)
        data, size, position = self._data, self._size, self._at
        strings: list[str] = []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > size:
                raise ValueError(f"it ends at byte {size}, {start} needed")
            position = start + _LENGTH.unpack_from(data, position)[0]
            if position > size:
                raise ValueError(f"it ends at byte {size}, {position} needed")
            if keep:
                strings.append(data[start:position].decode("utf-8", "replace"))
        self._at = position
        return strings if keep else None

    def _scalar(self, code: str) -> bool | int | float:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        number: bool | int | float = value
        return number

    def _count(self, code: str) -> int:
        return int(self._scalar(code))

    def _name(self) -> str:
        """A key or a name; UnicodeDecodeError, a ValueError, if it is none."""
        return self._bytes(self._count("Q")).decode()

    def _text(self) -> str:
        return self._bytes(self._count("Q")).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        self._room(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _room(self, count: int) -> None:
        if count > self._size - self._at:
            raise ValueError(f"it ends at byte {self._size}, {self._at + count} needed")

# SPDX-License-Identifier: Apache-2.0
"""The key-value part of a GGUF file: what a tokenizer needs, without weights or torch.

    "GGUF"  version u32  tensors u64  pairs u64   then per pair: key (u64 length + UTF-8),
    type u32, value; an array is: item type u32, count u64, items. Little-endian throughout.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path

from .errors import TokenizerUnsupported

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

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
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)
_MAX_PAIRS = 1 << 16


def read_metadata(path: str | Path) -> dict[str, Value]:
    """Every key of the file. TokenizerUnsupported, naming the file, if it is not a whole GGUF."""
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).pairs()
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, detail: str) -> TokenizerUnsupported:
    return TokenizerUnsupported(
        "not a readable GGUF file",
        value=f"{path}: {detail}",
        remedy="download the file again",
    )


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._position = 0

    def pairs(self) -> dict[str, Value]:
        if self._take(4) != b"GGUF":
            raise _damaged(self._path, "it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _damaged(self._path, f"version {version}, known are {_VERSIONS}")
        self._number("Q")  # tensors
        count = self._number("Q")
        if count > _MAX_PAIRS:
            raise _damaged(self._path, f"{count} keys, limit {_MAX_PAIRS}")
        return {self._string(): self._value(self._number("I")) for _ in range(count)}

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise _damaged(self._path, f"it ends at byte {len(self._data)}, {end} needed")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _number(self, code: str) -> int:
        (number,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return int(number)

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        code = self._code(kind)
        value: Value = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def _array(self, kind: int, count: int) -> Value:
        if kind == _STRING:
            if count * 8 > len(self._data) - self._position:
                raise _damaged(self._path, f"an array of {count} strings does not fit")
            return self._strings(count)
        code = self._code(kind)
        size = struct.calcsize("<" + code) * count
        return list(struct.unpack(f"<{count}{code}", self._take(size)))

    def _strings(self, count: int) -> list[str]:
        """As `_string`, in one loop: vocabularies have hundreds of thousands."""
        data, end, position = self._data, len(self._data), self._position
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end:
                raise _damaged(self._path, f"it ends at byte {end}, {start} needed")
            position = start + _LENGTH.unpack_from(data, position)[0]
            if position > end:
                raise _damaged(self._path, f"it ends at byte {end}, {position} needed")
            strings.append(data[start:position].decode("utf-8", "replace"))
        self._position = position
        return strings

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise _damaged(self._path, f"unknown value type {kind}")
        return code

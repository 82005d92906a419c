# SPDX-License-Identifier: Apache-2.0
"""FTW, the weight format: a folder with a header, shards of records, and the model's small files.

    model.ftw            the header
        bytes 0 … 7      "FTWEIGHT"
        bytes 8 … 11     u32  version, 1
        bytes 12 … 15    u32  0
        bytes 16 … 23    u64  length of the JSON, at most 64 MiB
        bytes 24 … 55    SHA-256 of bytes 0 … 23 and of the JSON: the digest of the whole model
        bytes 56 …       the JSON, to the end of the file
    records-00001.ftw …  records, each at a multiple of 4,096 and within one shard; the gaps are 0
    tokenizer.json …     files as they were given

    {"files":   [[name, bytes, xxh3]],                       beside the header
     "layouts": [[bytes, [[field, dtype, [shape], offset]]]],
     "meta":    {…},                                         its writer's; not read here
     "records": [[name, layout, shard, offset, xxh3]],       layout, shard: places in their lists
     "shards":  [[name, bytes]]}

A record is what is read at once: one expert, or one matrix or vector beside them. Its layout says
where its fields lie; fields follow one another, each at a multiple of 64 from the record's begin,
with 0 between, and hold little-endian elements, the last dimension fastest. Records with the same
fields share a layout. xxh3 is XXH3-128 of a record's or a file's bytes, as 32 hex digits, seed 0.

A reader refuses, by name: other magic (FtwForeign), another version or unknown keys (FtwNewer),
what ends early or is absent (FtwTruncated), what fails a checksum or contradicts itself
(FtwAltered), counts beyond the limits below (FtwTooLarge). Names are plain file names of at most
255 bytes. A shard has exactly the size that is listed. A record is checked when it is read, a
mapped one once per opening.
A writer writes into another folder, syncs, and renames: a folder with a header is whole.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from .errors import StorageError

HEADER_NAME = "model.ftw"
VERSION = 1
RECORD_ALIGNMENT = 4096
FIELD_ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
MAX_RECORDS = 1_000_000
MAX_LAYOUTS = 10_000
MAX_FIELDS = 64
MAX_SHARDS = 100_000
MAX_FILES = 64
MAX_NAME_BYTES = 255
MAX_SIZE_BYTES = 1 << 50  # of anything
ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
}

_MAGIC = b"FTWEIGHT"
_FIXED = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32
_JSON_START = _FIXED.size + _DIGEST_BYTES
_KEYS = {"files", "layouts", "meta", "records", "shards"}
_REMEDY = "convert the model again"


class FtwError(StorageError):
    """Any fault of an FTW folder."""

    code = "ftw_error"


class FtwForeign(FtwError):
    """Not an FTW header."""

    code = "ftw_foreign"


class FtwNewer(FtwError):
    """Written by a newer version of the format than this program knows."""

    code = "ftw_newer"


class FtwTruncated(FtwError):
    """A file of the folder is absent or ends early, or a read did."""

    code = "ftw_truncated"


class FtwAltered(FtwError):
    """Bytes that fail their checksum, or contradict the header. They were not used."""

    code = "ftw_altered"


class FtwTooLarge(FtwError):
    """A count or size beyond what the format allows."""

    code = "ftw_too_large"


@dataclass(frozen=True)
class Field:
    """One array of a record, `offset` bytes behind the record's begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class Layout:
    """How the bytes of a record are divided."""

    fields: tuple[Field, ...]

    @property
    def size_bytes(self) -> int:
        return self.fields[-1].stop

    def field(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)


@dataclass(frozen=True)
class Record:
    """Where a record lies. `xxh3`: of its bytes, in hex."""

    name: str
    layout: Layout
    shard: str
    offset: int
    xxh3: str

    @property
    def stop(self) -> int:
        return self.offset + self.layout.size_bytes


@dataclass(frozen=True)
class SideFile:
    """A file beside the header, such as tokenizer.json."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Header:
    """Everything but the weights. `shards`: name -> bytes. `meta`: what the writer needs to read
    the records; JSON values."""

    meta: Mapping[str, Any]
    records: tuple[Record, ...]
    shards: Mapping[str, int]
    files: tuple[SideFile, ...]


def aligned(size_bytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return size_bytes + -size_bytes % alignment


def encode(header: Header) -> bytes:
    """The bytes of a header file: the same for equal headers."""
    layouts = list(dict.fromkeys(record.layout for record in header.records))
    numbers = {layout: number for number, layout in enumerate(layouts)}
    shards = {name: number for number, name in enumerate(header.shards)}
    content = {
        "files": [[x.name, x.size_bytes, x.xxh3] for x in header.files],
        "layouts": [
            [x.size_bytes, [[f.name, f.dtype, list(f.shape), f.offset] for f in x.fields]]
            for x in layouts
        ],
        "meta": header.meta,
        "records": [
            [x.name, numbers[x.layout], shards[x.shard], x.offset, x.xxh3] for x in header.records
        ],
        "shards": [[name, size] for name, size in header.shards.items()],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise FtwTooLarge("the header is too large", value=len(text), limit=MAX_HEADER_BYTES)
    fixed = _FIXED.pack(_MAGIC, VERSION, 0, len(text))
    return fixed + hashlib.sha256(fixed + text).digest() + text


def decode(stored: bytes, path: Path) -> tuple[Header, str]:
    """A header file's bytes -> the header and its digest in hex. The errors name `path`."""
    text = _content(stored, path)
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
        header = _Decoder(content, path).header()
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise FtwAltered(
            f"{path} contradicts itself: {type(error).__name__}: {error}", remedy=_REMEDY
        ) from error
    return header, stored[_FIXED.size : _JSON_START].hex()


def _content(stored: bytes, path: Path) -> bytes:
    """The JSON, once it is known to be whole."""
    if stored[: len(_MAGIC)] != _MAGIC[: len(stored)]:
        raise FtwForeign(f"{path} is not an FTW header", value=stored[: len(_MAGIC)])
    if len(stored) < _JSON_START:
        raise truncated(path, len(stored), _JSON_START)
    _, version, reserved, length = _FIXED.unpack_from(stored)
    if version != VERSION or reserved:
        raise FtwNewer(
            f"{path} was written by another version of the format",
            value=version,
            limit=VERSION,
            remedy="update freetoken-agent, or " + _REMEDY,
        )
    if length > MAX_HEADER_BYTES:
        raise FtwTooLarge(f"the header {path} is too large", value=length, limit=MAX_HEADER_BYTES)
    if len(stored) < _JSON_START + length:
        raise truncated(path, len(stored), _JSON_START + length)
    text = stored[_JSON_START:]
    digest = hashlib.sha256(stored[: _FIXED.size] + text).digest()
    if digest != stored[_FIXED.size : _JSON_START]:
        raise FtwAltered(f"the header {path} fails its checksum", remedy=_REMEDY)
    return text


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """The system's refusals to read a file, as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise FtwTruncated(f"{path} is missing", remedy=_REMEDY) from error
    except OSError as error:
        raise FtwError(f"{path} cannot be read: {error.strerror or error}") from error


def truncated(path: Path, size_bytes: int, expected: int) -> FtwTruncated:
    """The error for a file that ends before `expected`."""
    return FtwTruncated(
        f"{path} is truncated",
        value=f"{size_bytes} bytes",
        limit=f"{expected} bytes",
        remedy=_REMEDY,
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


class _Decoder:
    """JSON -> a header in which every offset and name has been checked; ValueError, TypeError,
    KeyError or IndexError where it does not add up."""

    def __init__(self, content: Any, path: Path) -> None:
        if not isinstance(content, dict):
            raise ValueError("not an object")
        if content.keys() - _KEYS:
            raise FtwNewer(f"{path} has unknown keys", value=sorted(content.keys() - _KEYS)[:5])
        if not isinstance(content["meta"], dict):
            raise ValueError("meta is not an object")
        self._content = content
        self._path = path

    def header(self) -> Header:
        shards = {_name(name): _size(size) for name, size in self._list("shards", MAX_SHARDS)}
        layouts = [_layout(size, fields) for size, fields in self._list("layouts", MAX_LAYOUTS)]
        places = list(shards)
        records = []
        for name, layout, shard, offset, xxh3 in self._list("records", MAX_RECORDS):
            at = places[_size(shard)]
            record = Record(str(name), layouts[_size(layout)], at, _size(offset), _hex(xxh3))
            if record.offset % RECORD_ALIGNMENT or record.stop > shards[at]:
                raise ValueError(f"record {name!r} lies outside its shard")
            records.append(record)
        _refuse_overlaps(records)
        files = [
            SideFile(_name(name), _size(size), _hex(xxh3))
            for name, size, xxh3 in self._list("files", MAX_FILES)
        ]
        names = [HEADER_NAME, *shards, *(file.name for file in files)]
        if len(set(names)) < len(names) or len(shards) < len(self._content["shards"]):
            raise ValueError("a file is listed twice")
        return Header(self._content["meta"], tuple(records), shards, tuple(files))

    def _list(self, key: str, limit: int) -> list[Any]:
        items = self._content[key]
        if not isinstance(items, list):
            raise ValueError(f"{key} is not a list")
        if len(items) > limit:
            raise FtwTooLarge(f"{self._path} lists too many {key}", value=len(items), limit=limit)
        return items


def _layout(size: Any, fields: Any) -> Layout:
    if not isinstance(fields, list) or not 1 <= len(fields) <= MAX_FIELDS:
        raise ValueError(f"a layout of {len(fields)} fields")
    made: list[Field] = []
    for name, dtype, shape, offset in fields:
        field = Field(str(name), dtype, tuple(_size(extent) for extent in shape), _size(offset))
        start = aligned(made[-1].stop, FIELD_ALIGNMENT) if made else 0
        if field.offset != start or field.size_bytes < 1:
            raise ValueError(f"field {name!r} is misplaced")
        _size(field.stop)
        made.append(field)
    layout = Layout(tuple(made))
    if len({field.name for field in made}) < len(made) or layout.size_bytes != size:
        raise ValueError("a layout whose fields do not add up")
    return layout


def _refuse_overlaps(records: list[Record]) -> None:
    stops: dict[str, int] = {}
    for record in sorted(records, key=lambda record: (record.shard, record.offset)):
        if record.offset < stops.get(record.shard, 0):
            raise ValueError(f"record {record.name!r} overlaps another")
        stops[record.shard] = record.stop
    if len({record.name for record in records}) < len(records):
        raise ValueError("a record is listed twice")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SIZE_BYTES:
        raise ValueError(f"{value!r} is no size")
    return value


def _name(value: Any) -> str:
    """A plain file name: nothing else may reach the file system."""
    plain = isinstance(value, str) and value not in ("", ".", "..") and value.isprintable()
    if not plain or "/" in value or "\\" in value or len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{value!r} is no file name")
    return str(value)


def _hex(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{value!r} is no checksum")
    return value

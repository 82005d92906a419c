# SPDX-License-Identifier: Apache-2.0
"""The frame of every stored value.

    byte  0        0xF1 a whole value, 0xF2 the list of its pieces, 0xF3 one piece
    bytes 1 … 8    xxh3_64 of the payload, little-endian, seeded with xxh3_64(byte 0 + key)
    bytes 9 …      payload

The seed ties a value to its key: intact bytes under the wrong key are damage too. A payload above
PAYLOAD_BYTES is cut into pieces of that size under keys of their own; the 0xF2 value then holds
msgpack [length, number of pieces]. One framed piece and LMDB's 16 bytes of page header fill exactly
16 pages: uneven runs of pages fragment the file (1 MiB pieces let it grow 16 % over its budget in
1,500 random replacements, these 2 %).
"""

import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]
import xxhash

from . import keys
from .errors import StoreDamaged
from .transactions import Transaction

WHOLE = 0xF1
LIST = 0xF2
PIECE = 0xF3
HEADER_BYTES = 9
PAGE_HEADER_BYTES = 16
PAYLOAD_BYTES = 64 * 1024 - PAGE_HEADER_BYTES - HEADER_BYTES

_HEADER = struct.Struct("<BQ")


def checksum(kind: int, key: bytes, payload: bytes | memoryview) -> int:
    seed = xxhash.xxh3_64_intdigest(bytes((kind,)) + key)
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def seal(kind: int, key: bytes, payload: bytes | memoryview) -> bytes:
    """The framed value of `payload` for `key`."""
    return b"".join((_HEADER.pack(kind, checksum(kind, key, payload)), payload))


def unseal(kind: int, key: bytes, value: memoryview, what: str) -> memoryview:
    """The verified payload, a view into `value`. StoreDamaged: `what` names it."""
    if len(value) < HEADER_BYTES:
        raise StoreDamaged(f"{what} is cut short", value=len(value), limit=f"{HEADER_BYTES} bytes")
    found, expected = _HEADER.unpack_from(value)
    payload = value[HEADER_BYTES:]
    if found != kind:
        raise StoreDamaged(f"{what} has a foreign format byte", value=hex(found))
    if checksum(kind, key, payload) != expected:
        raise StoreDamaged(f"{what} fails its checksum", value=f"{len(payload)} bytes")
    return payload


def save(txn: Transaction, key: bytes, payload: bytes) -> None:
    """Store a payload of any length under `key`, replacing what was there."""
    discard_pieces(txn, key)
    if len(payload) <= PAYLOAD_BYTES:
        txn.put(key, seal(WHOLE, key, payload))
        return
    prefix = keys.pieces(key)
    view = memoryview(payload)
    count = 0
    for start in range(0, len(payload), PAYLOAD_BYTES):
        piece_key = keys.piece(prefix, count)
        txn.put(piece_key, seal(PIECE, piece_key, view[start : start + PAYLOAD_BYTES]))
        count += 1
    txn.put(key, seal(LIST, key, msgpack.packb([len(payload), count])))


def load(txn: Transaction, key: bytes, what: str) -> bytes | None:
    """The verified payload under `key`, or None. StoreDamaged: `what` names it."""
    value = txn.get(key)
    if value is None:
        return None
    return read(txn, key, value, what)


def read(txn: Transaction, key: bytes, value: memoryview, what: str) -> bytes:
    """As `load`, for a value that was found already (by a scan)."""
    if len(value) == 0 or value[0] != LIST:
        return bytes(unseal(WHOLE, key, value, what))
    length, count = msgpack.unpackb(unseal(LIST, key, value, what))
    prefix = keys.pieces(key)
    joined = bytearray()
    for index in range(count):
        piece_key = keys.piece(prefix, index)
        piece = txn.get(piece_key)
        if piece is None:
            raise StoreDamaged(f"{what} lacks piece {index} of {count}")
        joined += unseal(PIECE, piece_key, piece, what)
    if len(joined) != length:
        raise StoreDamaged(f"{what} has another length", value=len(joined), limit=length)
    return bytes(joined)


def discard(txn: Transaction, key: bytes) -> bool:
    """Remove a value with its pieces; False if it was absent."""
    discard_pieces(txn, key)
    return txn.delete(key)


def discard_pieces(txn: Transaction, key: bytes) -> None:
    value = txn.get(key)
    if value is None or len(value) == 0 or value[0] != LIST:
        return
    for piece_key in [found for found, _ in txn.scan(keys.pieces(key))]:
        txn.delete(piece_key)


def pack(*fields: object) -> bytes:
    """Fields of a record, as msgpack."""
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(payload: bytes, size: int, what: str) -> Any:
    """The `size` fields of a record. StoreDamaged if it holds something else."""
    try:
        fields = msgpack.unpackb(payload, use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise StoreDamaged(f"{what} is not a record") from error
    if not isinstance(fields, tuple) or len(fields) != size:
        raise StoreDamaged(f"{what} is not a record of {size} fields", value=type(fields).__name__)
    return fields

# SPDX-License-Identifier: Apache-2.0
"""What may be put as a snapshot and read into; both stores ask here, so both refuse alike."""

from collections.abc import Mapping

from . import keys, values
from .errors import InvalidRecord, StoreClosed
from .names import encode_name
from .records import Snapshot, SnapshotInfo


def check_digest(digest: bytes) -> bytes:
    """`digest`, if it is one. InvalidRecord."""
    if not isinstance(digest, bytes) or len(digest) != keys.DIGEST_BYTES:
        raise InvalidRecord(
            "a digest is not 32 bytes", value=digest, limit=f"{keys.DIGEST_BYTES} bytes"
        )
    return digest


def snapshot_info(snapshot: Snapshot) -> SnapshotInfo:
    """What will be stored about a snapshot, if it may be stored. InvalidRecord, InvalidName."""
    digest = check_digest(snapshot.digest)
    if snapshot.parent is not None and check_digest(snapshot.parent) == digest:
        raise InvalidRecord("a snapshot is its own parent", value=digest.hex())
    sizes = {}
    for name, buffer in snapshot.buffers.items():
        encode_name("buffer name", name)
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise InvalidRecord(f"buffer {name!r} is not contiguous", value=view.strides)
        sizes[name] = view.nbytes
    record_bytes = len(values.pack(snapshot.parent, snapshot.meta, list(sizes.items()))) + 32
    if record_bytes > values.PAYLOAD_BYTES:
        raise InvalidRecord(
            "the meta and the buffer names of a snapshot are too long",
            value=f"{record_bytes} bytes",
            limit=f"{values.PAYLOAD_BYTES} bytes",
            remedy="put large data into a buffer",
        )
    return SnapshotInfo(snapshot.parent, bytes(snapshot.meta), sizes)


def check_targets(info: SnapshotInfo, buffers: Mapping[str, memoryview]) -> dict[str, memoryview]:
    """The destinations as writable bytes. KeyError for an unknown buffer name, InvalidRecord for a
    destination that is not writable, contiguous and of exactly the stored size."""
    targets = {}
    for name, buffer in buffers.items():
        size_bytes = info.sizes[name]
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes != size_bytes:
            raise InvalidRecord(
                f"the destination of buffer {name!r} does not fit",
                value=f"{buffer.nbytes} bytes, readonly={buffer.readonly}",
                limit=f"{size_bytes} writable, contiguous bytes",
            )
        targets[name] = buffer.cast("B") if size_bytes else buffer
    return targets


def ended_reader() -> StoreClosed:
    """The error of a reader that outlived its block."""
    return StoreClosed(
        "a snapshot reader was used outside its block", remedy="read inside `with … .reader()`"
    )

# SPDX-License-Identifier: Apache-2.0
"""What a stored state's record says, and the memory its buffers are read into.

    meta    magic 4s  position of the first id u32  ids u32  the ids int32 ...   little-endian

A block's ids are its own; an anchor's ids lead from the boundary before it to its position.
"""

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch

from .anchors import Anchor
from .buffers import StateLayout
from .digest import BLOCK, Ids, as_ids
from .prefix import shared_rows

_META = struct.Struct("<4sII")
BLOCK_KIND = b"KVB1"
ANCHOR_KIND = b"ROW1"


def pack_meta(kind: bytes, start: int, ids: Ids) -> bytes:
    """The meta of a block or anchor whose ids begin at `start`."""
    return _META.pack(kind, start, len(ids)) + as_ids(ids).tobytes()


def ids_of(meta: bytes, kind: bytes, start: int) -> Ids | None:
    """The ids in a record's meta, or None if it is not of this kind or begins elsewhere."""
    if len(meta) < _META.size:
        return None
    magic, first, count = _META.unpack_from(meta)
    if magic != kind or first != start or len(meta) != _META.size + 4 * count or count > BLOCK:
        return None
    return np.frombuffer(meta, dtype="<i4", offset=_META.size)


def concerns(meta: bytes, wanted: Ids, start: int) -> bool:
    """Whether a block or anchor that begins at `start` holds all of the ids `wanted`."""
    found = (ids_of(meta, kind, start) for kind in (BLOCK_KIND, ANCHOR_KIND))
    return any(ids is not None and shared_rows(ids, wanted) == len(wanted) for ids in found)


def memory_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, memoryview]:
    """The tensors' memory, writable and byte by byte."""
    return {
        name: memoryview(t.view(torch.uint8).numpy().data).cast("B") for name, t in tensors.items()
    }


def anchor_buffers(anchor: Anchor, layout: StateLayout) -> dict[str, torch.Tensor]:
    """An anchor's stored tensors by name: `row`, and `<layer>.<index>` for what tokens
    overwrite."""
    named = {"row": anchor.row}
    for layer, buffers in enumerate(layout.stored(anchor.fixed)):
        named |= {f"{layer}.{index}": buffer for index, buffer in enumerate(buffers)}
    return {name: tensor.contiguous() for name, tensor in named.items()}


class Staging:
    """Memory for one block on its way from the store. Used by one thread."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._bytes = torch.empty(max(1, layout.capacity_bytes(BLOCK)), dtype=torch.uint8)

    def tensors(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Named tensors over the memory for tokens [start, stop) of a path; valid until the next
        call."""
        tensors: dict[str, torch.Tensor] = {}
        offset = 0
        for name, dims in self._layout.buffer_dims(start, stop).items():
            dtype = self._layout.dtype_of(name)
            size_bytes = math.prod(dims) * dtype.itemsize
            tensors[name] = self._bytes[offset : offset + size_bytes].view(dtype).view(dims)
            offset += size_bytes
        return tensors

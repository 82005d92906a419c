# SPDX-License-Identifier: Apache-2.0
"""What a store holds of one path, record by record, and how each is read.

A path's look-up stops at the longest block; here every record counts that some path could take up
which begins with these ids: the full blocks, the short ones beside them, and all anchors.
"""

import logging
from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch

from freetoken_storage.errors import InvalidRecord, StoreDamaged
from freetoken_storage.records import SnapshotReader

from ..state.anchors import Anchor
from ..state.buffers import StateLayout
from ..state.digest import BLOCK, Ids
from ..state.disk import DiskStates
from ..state.prefix import shared_rows
from ..state.stored_form import (
    ANCHOR_KIND,
    BLOCK_KIND,
    Staging,
    anchor_buffers,
    concerns,
    ids_of,
    memory_of,
)

_log = logging.getLogger(__name__)

# What keeps a record from being compared: it went meanwhile, its checksum is wrong, its buffers
# are not those of this model.
Unreadable = Literal["gone", "damaged", "malformed"]


@dataclass(frozen=True)
class StoredRecord:
    """A block: the rows of tokens [start, stop) of the path, the first ones of those it holds up to
    `end`. An anchor: what is kept of position `stop`."""

    kind: Literal["block", "anchor"]
    digest: bytes
    start: int
    stop: int
    end: int


def records_of(disk: DiskStates, ids: Ids) -> list[StoredRecord]:
    """Every stored record of the path, blocks before anchors of the same position."""
    names = disk.boundaries(ids)
    found: list[StoredRecord] = []
    for index, parent in enumerate(names):
        children = disk.snapshots.children(parent)
        with disk.snapshots.reader() as reader:
            for digest in children:
                record = _record(disk, reader, digest, ids, index * BLOCK)
                if record is not None:
                    found.append(record)
        if index + 1 < len(names) and names[index + 1] not in children:
            break  # parents outlive children: nothing goes on from here
    return sorted(found, key=lambda record: (record.stop, record.kind != "block"))


def _record(
    disk: DiskStates, reader: SnapshotReader, digest: bytes, ids: Ids, start: int
) -> StoredRecord | None:
    """The record as far as the path shares it; None if it does not, or is not to be used."""
    info = disk.records.info(reader, digest)
    if info is None:
        return None
    wanted = ids[start:]
    block, anchor = ids_of(info.meta, BLOCK_KIND, start), ids_of(info.meta, ANCHOR_KIND, start)
    if block is not None and (rows := shared_rows(block, wanted)):
        return StoredRecord("block", digest, start, start + rows, start + len(block))
    if anchor is not None and shared_rows(anchor, wanted) == len(anchor) and start + len(anchor):
        stop = start + len(anchor)
        return StoredRecord("anchor", digest, start, stop, stop)
    return None


def beyond(disk: DiskStates, ids: Ids, start: int, judged: Set[bytes]) -> list[bytes]:
    """What a store holds of any path that begins with ids[: start + 1], from row `start` on, but
    for records that were judged; what hangs on those found is left out, too."""
    names = disk.boundaries(ids)
    first = start // BLOCK
    found = []
    for index in range(first, len(names)):
        children = [d for d in disk.snapshots.children(names[index]) if d not in judged]
        with disk.snapshots.reader() as reader:
            for digest in children:
                info = disk.records.info(reader, digest)
                begins = first * BLOCK
                wanted = ids[begins : start + 1]
                if info is None or (index == first and not concerns(info.meta, wanted, begins)):
                    continue
                found.append(digest)
    return found


class RecordReader:
    """Reads records of one store. Owner thread only; what it returns is valid until the next
    read."""

    def __init__(self, disk: DiskStates, layout: StateLayout, hidden_size: int) -> None:
        self._disk = disk
        self._layout = layout
        self._hidden_size = hidden_size
        self._staging = Staging(layout)

    def read(self, record: StoredRecord) -> dict[str, torch.Tensor] | Anchor | Unreadable:
        """A block's rows by name, each [L, rows, H, D], of the tokens that the path shares; an
        anchor as it would be restored."""
        return self._block(record) if record.kind == "block" else self._anchor(record)

    def _block(self, record: StoredRecord) -> dict[str, torch.Tensor] | Unreadable:
        buffers = self._staging.tensors(record.start, record.end)
        fault = self._read(record.digest, buffers)
        return fault or self._layout.cut(buffers, record.start, record.start, record.stop)

    def _anchor(self, record: StoredRecord) -> Anchor | Unreadable:
        stale = bool(self._layout.replay_tokens)
        anchor = Anchor(torch.empty(self._hidden_size), self._layout.empty(), stale=stale)
        fault = self._read(record.digest, anchor_buffers(anchor, self._layout))
        return fault or anchor

    def _read(self, digest: bytes, buffers: dict[str, torch.Tensor]) -> Unreadable | None:
        with self._disk.snapshots.reader() as reader:
            try:
                info = reader.info(digest)
                if info is None:
                    return "gone"
                if info.sizes.keys() != buffers.keys():
                    return "malformed"
                reader.read_into(digest, memory_of(buffers))
            except StoreDamaged:
                return "damaged"
            except InvalidRecord as error:
                _log.warning("a stored state has another shape: %s", error)
                return "malformed"
        return None


def covering(records: SequenceOf[StoredRecord]) -> dict[int, StoredRecord]:
    """By where they start, the blocks that hold most of the path."""
    best: dict[int, StoredRecord] = {}
    for record in records:
        known = best.get(record.start)
        if record.kind == "block" and (known is None or record.stop > known.stop):
            best[record.start] = record
    return best

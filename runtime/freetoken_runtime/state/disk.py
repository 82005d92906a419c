# SPDX-License-Identifier: Apache-2.0
"""States in a snapshot store: how they are named, laid out, found and read back.

    catalog ── fingerprint d(0) ── d(64) ── d(128) ── …      full blocks, 64 tokens each
                                     │        └ d(150)       a short block: an anchor's last rows
                                     └ anchor(d(128))        the hidden row at 128

A block holds the KV rows of all layers for its own tokens (`k0 v0 …`, one pair per row shape,
[L, rows, H, D]) and its ids in the record's meta, so that a path can be found that shares only a
part of a block. An anchor's row hangs off the full block before it, with the ids from there to it,
and counts only where the rows are found.
"""

import json
import logging
import threading
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import torch

from freetoken_storage.errors import StorageError, StoreDamaged
from freetoken_storage.records import Snapshot, SnapshotInfo, SnapshotReader, Snapshots

from .buffers import StateLayout
from .digest import (
    BLOCK,
    Fingerprint,
    Ids,
    anchor_digest,
    catalog_digest,
    chain,
    digest_at,
)
from .prefix import shared_rows
from .sequence import PathView, Sequence
from .stored_form import BLOCK_KIND, ROW_KIND, Staging, concerns, ids_of, memory_of, pack_meta

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """A stored block and how many of its leading rows a path can use."""

    digest: bytes
    start: int
    stored_rows: int
    rows: int


@dataclass(frozen=True)
class DiskMatch:
    """What a store holds of a path: rows [0, position), the pieces from the boundary at or below
    `floor` on, and whether the hidden row at the path's end is there."""

    position: int
    pieces: tuple[Piece, ...]
    row_known: bool
    goes_on: bool  # the store continues from there with other ids


NOTHING = DiskMatch(0, (), False, False)


@dataclass(frozen=True)
class Restored:
    """What a restore read, and why it ended early, if it did."""

    size_bytes: int
    lost: Literal["damaged", "evicted"] | None = None


class DiskStates:
    """The states of one fingerprint in one store. Thread-safe; holds no tensor of its own but one
    staging block, which the owner thread uses."""

    def __init__(
        self,
        snapshots: Snapshots,
        origin: Fingerprint,
        layout: StateLayout,
        hidden: tuple[int, torch.dtype],
    ) -> None:
        self.snapshots = snapshots
        self.origin = origin
        self._layout = layout
        self._hidden_size, self._hidden_dtype = hidden
        self._lock = threading.Lock()
        self._damaged: set[bytes] = set()  # found so; until written anew
        self._stuck: set[bytes] = set()  # damaged, and could not be removed: not to be used
        self._pins: dict[str, list[Ids]] = {}
        self._staging = Staging(layout)

    # -- finding

    def boundaries(self, ids: Ids) -> list[bytes]:
        """d(0), d(64), … of a path."""
        return chain(self.origin.digest, ids)

    def match(self, ids: Ids, floor: int = 0) -> DiskMatch:
        """The longest stored prefix of `ids`; rows before `floor` are at hand already. A store
        that cannot be read holds nothing: states are never worth an error."""
        try:
            return self._match(ids, floor)
        except StorageError as error:
            _log.warning("stored states could not be looked up: %s", error)
            return NOTHING

    def _match(self, ids: Ids, floor: int) -> DiskMatch:
        names = self.boundaries(ids)
        with self.snapshots.reader() as reader:
            depth = self._deepest(reader, names)
            start = depth * BLOCK
            first = floor // BLOCK
            pieces = [Piece(names[i + 1], i * BLOCK, BLOCK, BLOCK) for i in range(first, depth)]
            partial, goes_on = self._partial(
                reader, names[depth], ids[start : start + BLOCK], start
            )
            if partial is not None:
                pieces.append(partial)
            position = start + (partial.rows if partial else 0)
            row_known = False
            if position == len(ids) > 0:
                name = anchor_digest(digest_at(names, ids, position))
                row_known = self._info(reader, name) is not None
        return DiskMatch(position, tuple(pieces), row_known, goes_on)

    def _partial(
        self, reader: SnapshotReader, parent: bytes, wanted: Ids, start: int
    ) -> tuple[Piece | None, bool]:
        """The child block of `parent` that shares most ids with `wanted`."""
        best: Piece | None = None
        continues = False
        for digest in self.snapshots.children(parent):
            info = self._info(reader, digest)
            ids = None if info is None else ids_of(info.meta, BLOCK_KIND, start)
            if ids is None:
                continue
            rows = shared_rows(ids, wanted)
            continues = continues or (rows < len(ids) and rows < len(wanted))
            if rows > (best.rows if best else 0):
                best = Piece(digest, start, len(ids), rows)
        return best, continues

    def foreign(self, ids: Ids) -> str | None:
        """`fingerprint:<part>` if the store holds a part of this path for another model."""
        try:
            return self._foreign(ids)
        except StorageError:
            return None

    def _foreign(self, ids: Ids) -> str | None:
        for digest in self.snapshots.children(catalog_digest()):
            if digest == self.origin.digest:
                continue
            with self.snapshots.reader() as reader:
                info = self._info(reader, digest)
                if info is None:
                    continue
                names = chain(digest, ids[:BLOCK])
                known = len(names) > 1 and self._info(reader, names[1]) is not None
                if not known:
                    known = self._partial(reader, digest, ids[:BLOCK], 0)[0] is not None
            if known:
                other = Fingerprint(digest, json.loads(info.meta))
                return f"fingerprint:{self.origin.difference(other)}"
        return None

    def was_damaged(self, digest: bytes) -> bool:
        """Whether this process found the stored state damaged and removed it."""
        with self._lock:
            return digest in self._damaged

    def _info(self, reader: SnapshotReader, digest: bytes) -> SnapshotInfo | None:
        """The record's info; a damaged one counts as absent, until it is written anew."""
        try:
            info = reader.info(digest)
        except StoreDamaged:
            with self._lock:
                self._damaged.add(digest)
            return None
        return None if digest in self._stuck else info

    def _deepest(self, reader: SnapshotReader, names: SequenceOf[bytes]) -> int:
        """Index of the last full block that is stored. Parents outlive children, so the stored
        ones are a prefix of the chain."""
        low, high = 0, len(names) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._info(reader, names[middle]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    # -- reading (owner thread)

    def restore(self, sequence: Sequence, match: DiskMatch, ids: Ids) -> Restored:
        """Append the pieces beyond the sequence's rows to it. A piece that cannot be read ends the
        restore: the rows before it stay. A damaged one leaves the store."""
        read = 0
        piece = match.pieces[0]
        try:
            with self.snapshots.reader() as reader:
                for piece in match.pieces:
                    if piece.start + piece.rows > sequence.length:
                        self._restore_piece(reader, piece, sequence, ids)
                        read += self._layout.token_bytes * piece.stored_rows
            self.snapshots.touch([piece.digest])  # those above it outlive it
        except StoreDamaged:
            self._discard(piece.digest)
            return Restored(read, "damaged")
        except KeyError:  # it went between the look-up and now; what hung on it is of no use
            self._remove(piece.digest)
            return Restored(read, "evicted")
        except StorageError as error:
            _log.warning("stored states could not be read: %s", error)
            return Restored(read, "evicted")
        return Restored(read)

    def _restore_piece(
        self, reader: SnapshotReader, piece: Piece, sequence: Sequence, ids: Ids
    ) -> None:
        skip = sequence.length - piece.start
        buffers = self._staging.tensors(piece.stored_rows)
        reader.read_into(piece.digest, memory_of(buffers))
        sequence.begin(piece.rows - skip)
        sequence.load({name: block[:, skip : piece.rows] for name, block in buffers.items()})
        sequence.commit(ids[sequence.length : piece.start + piece.rows])

    def restore_row(self, ids: Ids) -> torch.Tensor | None:
        """The hidden row at the end of `ids`, or None if it is gone or damaged."""
        name = anchor_digest(digest_at(self.boundaries(ids), ids, len(ids)))
        row = torch.empty(self._hidden_size, dtype=self._hidden_dtype)
        try:
            with self.snapshots.reader() as reader:
                reader.read_into(name, memory_of({"row": row}))
        except StoreDamaged:
            self._discard(name)
            return None
        except (StorageError, KeyError):
            return None
        return row

    def _discard(self, digest: bytes) -> None:
        """Remove a damaged state; where that cannot be done now, stop using it."""
        with self._lock:
            self._damaged.add(digest)
        if not self._remove(digest):
            self._stuck.add(digest)

    def _remove(self, digest: bytes) -> bool:
        try:
            self.snapshots.remove([digest])
        except StorageError as error:
            _log.warning("a damaged state could not be removed: %s", error)
            return False
        return True

    # -- writing (persister thread)

    def register(self) -> None:
        """Enter the fingerprint into the store's catalog, so that others can be told apart. Put
        before every path: an eviction may have taken it."""
        parts = json.dumps(dict(self.origin.parts), sort_keys=True).encode()
        if not self._is_stored(self.origin.digest):
            self.snapshots.put(
                [
                    Snapshot(catalog_digest(), None, {}),
                    Snapshot(self.origin.digest, catalog_digest(), {}, meta=parts),
                ]
            )

    def _is_stored(self, digest: bytes) -> bool:
        """Whether it is there and readable, as far as its record tells: a damaged record must not
        keep its state from being written anew."""
        with self.snapshots.reader() as reader:
            return self._info(reader, digest) is not None

    def _put(self, snapshots: SequenceOf[Snapshot]) -> None:
        """Write states that are not stored, in place of damaged ones."""
        names = {snapshot.digest for snapshot in snapshots}
        if stuck := names & self._stuck:
            self.snapshots.remove(list(stuck))  # or else put would find them there
            self._stuck -= stuck
        self.snapshots.put(snapshots)
        with self._lock:
            self._damaged -= names

    def stored_blocks(self, names: SequenceOf[bytes]) -> int:
        """How many of the full blocks with these names (d(0) first) are stored; they are in use."""
        with self.snapshots.reader() as reader:
            depth = self._deepest(reader, names)
        if depth:
            self.snapshots.touch([names[depth]])
        return depth

    def write_block(self, view: PathView, names: SequenceOf[bytes], start: int) -> int:
        """Write the block that begins at `start`, full or up to the path's end; returns the bytes
        written, 0 if it was there. `names`: the path's boundaries."""
        stop = min(start + BLOCK, len(view.ids))
        digest = digest_at(names, view.ids, stop)
        if self._is_stored(digest):
            return 0
        ids = view.ids[start:stop]
        parent = names[start // BLOCK]
        meta = pack_meta(BLOCK_KIND, start, ids)
        stale = self._shorter(parent, ids, start)
        rows = {name: array.data for name, array in view.copy_rows(start, stop).items()}
        self._put([Snapshot(digest, parent, rows, meta)])
        if stale:
            self.snapshots.remove(stale)
        return self._layout.token_bytes * (stop - start)

    def write_anchors(
        self, ids: Ids, names: SequenceOf[bytes], rows: Mapping[int, torch.Tensor]
    ) -> None:
        """Write the hidden rows of these positions, whose blocks are there. `names`: the path's
        boundaries."""
        snapshots = []
        for position, row in sorted(rows.items()):
            start = position - position % BLOCK
            name = anchor_digest(digest_at(names, ids, position))
            if not self._is_stored(name):
                meta = pack_meta(ROW_KIND, start, ids[start:position])
                memory = memory_of({"row": row.contiguous()})
                snapshots.append(Snapshot(name, names[start // BLOCK], memory, meta))
        if snapshots:
            self._put(snapshots)

    def _shorter(self, parent: bytes, ids: Ids, start: int) -> list[bytes]:
        """Short blocks under `parent` that a block of these ids makes superfluous."""
        found = []
        with self.snapshots.reader() as reader:
            for digest in self.snapshots.children(parent):
                info = self._info(reader, digest)
                known = None if info is None else ids_of(info.meta, BLOCK_KIND, start)
                if known is not None and len(known) < len(ids):
                    if shared_rows(known, ids) == len(known):
                        found.append(digest)
        return found

    def forget(self, ids: Ids, start: int) -> int:
        """Remove every state of a path that begins with ids[: start + 1], at or after position
        `start`, whichever model computed it; returns how many snapshots went. Damaged ones that
        may belong to the path go with them."""
        block = start - start % BLOCK
        wanted = ids[block : start + 1]
        origins = {self.origin.digest, *self.snapshots.children(catalog_digest())}
        doomed = []
        with self.snapshots.reader() as reader:
            for origin in origins:
                parent = chain(origin, ids[:block])[block // BLOCK]
                for digest in self.snapshots.children(parent):
                    info = self._info(reader, digest)
                    if info is None or concerns(info.meta, wanted, block):
                        doomed.append(digest)
        return self.snapshots.remove(doomed) if doomed else 0

    # -- pinning

    def pin(self, owner: str, paths: SequenceOf[Ids]) -> None:
        """Protect what is stored of these paths, now and later, replacing `owner`'s earlier pins;
        no paths unpin."""
        with self._lock:
            if paths:
                self._pins[owner] = list(paths)
            else:
                self._pins.pop(owner, None)
        self._pin(owner, paths)

    def refresh_pins(self, ids: Ids) -> None:
        """More of this path is stored: extend the pins that concern it."""
        with self._lock:
            owners = {
                owner: paths
                for owner, paths in self._pins.items()
                if any(shared_rows(path, ids) for path in paths)
            }
        for owner, paths in owners.items():
            self._pin(owner, paths)

    def _pin(self, owner: str, paths: SequenceOf[Ids]) -> None:
        digests = []
        for ids in paths:
            match = self.match(ids)
            if match.pieces:
                digests.append(match.pieces[-1].digest)
            if match.row_known:
                digests.append(anchor_digest(digest_at(self.boundaries(ids), ids, len(ids))))
        self.snapshots.pin(owner, digests)

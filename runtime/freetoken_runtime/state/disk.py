# SPDX-License-Identifier: Apache-2.0
"""States in a snapshot store: how they are named, laid out, found and read back.

    catalog ── fingerprint d(0) ── d(64) ── d(128) ── …      full blocks, 64 tokens each
                                     │        └ d(150)       a short block: an anchor's last rows
                                     └ anchor(d(128))        what an anchor at 128 adds

A block holds the KV rows of all layers for its own tokens (`k0 v0 …`, one pair per row shape,
[L, rows, H, D]) and its ids in the record's meta, so that a path can be found that shares only a
part of a block. An anchor (the hidden row, and per layer the buffers that every token overwrites,
`3.0 3.1 …`) hangs off the full block before it, with the ids from there to it, and counts only
where the rows are found.
"""

import json
import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import torch

from freetoken_storage.errors import InvalidRecord, StorageError, StoreDamaged
from freetoken_storage.records import Snapshot, SnapshotReader, Snapshots

from .anchors import Anchor
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
from .disk_match import NOTHING, DiskMatch, Lost, Piece, Restored
from .disk_pins import DiskPins
from .prefix import shared_rows
from .sequence import Sequence
from .spans import PathView
from .state_records import StateRecords
from .stored_form import (
    ANCHOR_KIND,
    BLOCK_KIND,
    Staging,
    anchor_buffers,
    ids_of,
    memory_of,
    pack_meta,
)

_log = logging.getLogger(__name__)


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
        self.records = StateRecords(snapshots)
        self._layout = layout
        self._hidden_size, self._hidden_dtype = hidden
        self.pins = DiskPins(snapshots, self._pin_targets)
        self._staging = Staging(layout)

    # -- finding

    def boundaries(self, ids: Ids) -> tuple[bytes, ...]:
        """d(0), d(64), … of a path."""
        return chain(self.origin.digest, ids)

    def match(self, ids: Ids, floor: int = 0, base: int = 0) -> DiskMatch:
        """The longest stored prefix of `ids`; rows before `floor` are at hand already, and the
        state at `base`. A store that cannot be read holds nothing: states are never worth an
        error."""
        try:
            return self._match(ids, floor, base)
        except StorageError as error:
            _log.warning("stored states could not be looked up: %s", error)
            return NOTHING

    def _match(self, ids: Ids, floor: int, base: int) -> DiskMatch:
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
            usable, anchored = self._usable(reader, names, ids, max(floor, position), base)
        replay = min(self._layout.replay_tokens, usable)
        return DiskMatch(position, tuple(pieces), usable, anchored, replay, goes_on)

    def _usable(
        self, reader: SnapshotReader, names: SequenceOf[bytes], ids: Ids, rows: int, base: int
    ) -> tuple[int, bool]:
        """The deepest position up to `rows` that can be restored, and whether by an anchor."""
        total = len(ids)
        if rows == total and self._has_anchor(reader, names, ids, total):
            return total, True
        limit, step = min(rows, total - 1), self._layout.step
        sliced = limit - limit % step if step else 0
        found = 0 if step == 1 else self._anchor(reader, names, ids[:limit], max(base, sliced))
        return (found, True) if found > sliced else (sliced, False)

    def _has_anchor(
        self, reader: SnapshotReader, names: SequenceOf[bytes], ids: Ids, position: int
    ) -> bool:
        name = anchor_digest(digest_at(names, ids, position))
        return self.records.info(reader, name) is not None

    def _anchor(
        self, reader: SnapshotReader, names: SequenceOf[bytes], ids: Ids, above: int
    ) -> int:
        """The deepest position in (above, len(ids)] with an anchor; 0 if there is none."""
        for start in range(len(ids) - len(ids) % BLOCK, above - BLOCK, -BLOCK):
            found = self._anchors_after(reader, names[start // BLOCK], ids, start)
            if found and max(found) > above:
                return max(found)
        return 0

    def _anchors_after(
        self, reader: SnapshotReader, parent: bytes, ids: Ids, start: int
    ) -> list[int]:
        """Positions of the path in [start, start + BLOCK) with an anchor under `parent`."""
        found = []
        for digest in self.snapshots.children(parent):
            info = self.records.info(reader, digest)
            known = None if info is None else ids_of(info.meta, ANCHOR_KIND, start)
            if known is not None and shared_rows(known, ids[start:]) == len(known):
                found.append(start + len(known))
        return found

    def anchors(self, ids: Ids) -> set[int]:
        """Every position of the path with an anchor, as far as its rows are stored."""
        try:
            names = self.boundaries(ids)
            with self.snapshots.reader() as reader:
                depth = self._deepest(reader, names)
                starts = ((names[index], index * BLOCK) for index in range(depth + 1))
                found = [self._anchors_after(reader, name, ids, at) for name, at in starts]
        except StorageError:
            return set()
        return set().union(*found)

    def _partial(
        self, reader: SnapshotReader, parent: bytes, wanted: Ids, start: int
    ) -> tuple[Piece | None, bool]:
        """The child block of `parent` that shares most ids with `wanted`."""
        best: Piece | None = None
        continues = False
        for digest in self.snapshots.children(parent):
            info = self.records.info(reader, digest)
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
                info = self.records.info(reader, digest)
                if info is None:
                    continue
                names = chain(digest, ids[:BLOCK])
                known = len(names) > 1 and self.records.info(reader, names[1]) is not None
                if not known:
                    known = self._partial(reader, digest, ids[:BLOCK], 0)[0] is not None
            if known:
                other = Fingerprint(digest, json.loads(info.meta))
                return f"fingerprint:{self.origin.difference(other)}"
        return None

    def _deepest(self, reader: SnapshotReader, names: SequenceOf[bytes]) -> int:
        """Index of the last full block that is stored. Parents outlive children, so the stored
        ones are a prefix of the chain."""
        low, high = 0, len(names) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.records.info(reader, names[middle]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    # -- reading (owner thread)

    def restore(self, sequence: Sequence, match: DiskMatch, ids: Ids) -> Restored:
        """Append the pieces beyond the sequence's rows to it. A piece that cannot be read ends the
        restore: the rows before it stay. A damaged one leaves the store."""
        read, piece = 0, match.pieces[0]
        try:
            with self.snapshots.reader() as reader:
                for piece in match.pieces:
                    if piece.start + piece.rows > sequence.length:
                        self._restore_piece(reader, piece, sequence, ids)
                        read += self._layout.token_bytes * piece.stored_rows
            self.snapshots.touch([piece.digest])  # those above it outlive it
        except (StoreDamaged, InvalidRecord):
            self.records.discard(piece.digest)
            return Restored(read, "damaged")
        except KeyError:  # it went between the look-up and now; what hung on it is of no use
            self.records.remove(piece.digest)
            return Restored(read, "evicted")
        except StorageError as error:
            _log.warning("stored states could not be read: %s", error)
            return Restored(read, "evicted")
        return Restored(read)

    def _restore_piece(
        self, reader: SnapshotReader, piece: Piece, sequence: Sequence, ids: Ids
    ) -> None:
        stop = piece.start + piece.rows
        buffers = self._staging.tensors(piece.start, piece.start + piece.stored_rows)
        reader.read_into(piece.digest, memory_of(buffers))
        first = sequence.length
        sequence.begin(stop - first)
        sequence.load(self._layout.cut(buffers, piece.start, first, stop))
        sequence.commit(ids[first:stop])

    def restore_anchor(self, ids: Ids) -> Anchor | Lost:
        """What the anchor at the end of `ids` adds to the rows, or why it is not there. Nothing
        that was not read remains in it."""
        name = anchor_digest(digest_at(self.boundaries(ids), ids, len(ids)))
        row = torch.full((self._hidden_size,), math.nan, dtype=self._hidden_dtype)
        anchor = Anchor(row, self._layout.empty(), stale=bool(self._layout.replay_tokens))
        try:
            with self.snapshots.reader() as reader:
                reader.read_into(name, memory_of(anchor_buffers(anchor, self._layout)))
            self.snapshots.touch([name])
        except (StoreDamaged, InvalidRecord):
            self.records.discard(name)
            return "damaged"
        except KeyError:  # it went, or has no such buffer: it is of no use
            self.records.remove(name)
            return "evicted"
        except StorageError:
            return "evicted"
        return anchor

    # -- writing (persister thread)

    def register(self) -> None:
        """Enter the fingerprint into the store's catalog, so that others can be told apart. Put
        before every path: an eviction may have taken it."""
        parts = json.dumps(dict(self.origin.parts), sort_keys=True).encode()
        if not self.records.is_stored(self.origin.digest):
            self.snapshots.put(
                [
                    Snapshot(catalog_digest(), None, {}),
                    Snapshot(self.origin.digest, catalog_digest(), {}, meta=parts),
                ]
            )

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
        if self.records.is_stored(digest):
            return 0
        ids = view.ids[start:stop]
        parent = names[start // BLOCK]
        meta = pack_meta(BLOCK_KIND, start, ids)
        stale = self._shorter(parent, ids, start)
        rows = {name: array.data for name, array in view.copy_rows(start, stop).items()}
        self.records.put([Snapshot(digest, parent, rows, meta)])
        if stale:
            self.snapshots.remove(stale)
        return self._layout.token_bytes * (stop - start)

    def write_anchors(
        self, ids: Ids, names: SequenceOf[bytes], anchors: Mapping[int, Anchor]
    ) -> None:
        """Write the anchors of these positions, whose blocks are there, one by one: the least
        valuable first, since a store over its budget lets go what was used longest ago. `names`:
        the path's boundaries."""
        for position in sorted(anchors, key=lambda p: (anchors[p].rank, p)):
            start = position - position % BLOCK
            name = anchor_digest(digest_at(names, ids, position))
            if self.records.is_stored(name):
                self.snapshots.touch([name])
                continue
            meta = pack_meta(ANCHOR_KIND, start, ids[start:position])
            memory = memory_of(anchor_buffers(anchors[position], self._layout))
            self.records.put([Snapshot(name, names[start // BLOCK], memory, meta)])

    def _shorter(self, parent: bytes, ids: Ids, start: int) -> list[bytes]:
        """Short blocks under `parent` that a block of these ids makes superfluous."""
        found = []
        with self.snapshots.reader() as reader:
            for digest in self.snapshots.children(parent):
                info = self.records.info(reader, digest)
                known = None if info is None else ids_of(info.meta, BLOCK_KIND, start)
                if known is not None and len(known) < len(ids):
                    if shared_rows(known, ids) == len(known):
                        found.append(digest)
        return found

    # -- shortening (owner thread)

    def usable_end(self, ids: Ids) -> int:
        """The last position of `ids` that a path can go on from if all of its rows are there."""
        step = self._layout.step
        return max(self.anchors(ids) | {len(ids) - len(ids) % step if step else 0})

    def shortened(self, ids: Ids) -> Snapshot | None:
        """The last rows of `ids`, a part of a longer block, as a block of their own. None where no
        longer one can be read, or `ids` ends at a boundary."""
        names, start = self.boundaries(ids), len(ids) - len(ids) % BLOCK
        parent, wanted = names[start // BLOCK], ids[start:]
        try:
            with self.snapshots.reader() as reader:
                piece, _ = self._partial(reader, parent, wanted, start)
                if piece is None or not len(wanted) == piece.rows < piece.stored_rows:
                    return None
                buffers = self._staging.tensors(start, start + piece.stored_rows)
                reader.read_into(piece.digest, memory_of(buffers))
        except (StorageError, KeyError):
            return None
        rows = self._layout.cut(buffers, start, start, len(ids))
        memory = memory_of({name: tensor.contiguous() for name, tensor in rows.items()})
        meta = pack_meta(BLOCK_KIND, start, wanted)
        return Snapshot(digest_at(names, ids, len(ids)), parent, memory, meta)

    # -- pinning

    def _pin_targets(self, ids: Ids) -> list[bytes]:
        """What protects the stored part of a path: its last block and its deepest anchor; what is
        above them outlives them."""
        match = self.match(ids)
        targets = [piece.digest for piece in match.pieces[-1:]]
        if match.anchored:
            targets.append(anchor_digest(digest_at(self.boundaries(ids), ids, match.usable)))
        return targets

# SPDX-License-Identifier: Apache-2.0
"""The live state of one token path: shared, frozen spans of KV rows and a tail that grows.

    sequence   span │ span │ span+tail
                 │      │       └── ends at its buffer's mark: grows in place
                 └──────┴────────── views of rows that other sequences may share

Like slices of an append-only array: forking, truncating and restoring make views. Two sequences
whose last spans end at the same mark may both grow; the first to claim rows keeps growing in
place, the other gets a tail of its own.

What every token overwrites (recurrent states, convolution tails, open groups) is never changed in
place: each pass hands over new tensors, so an anchor is a reference to those of its position.

Only the owner thread changes sequences; `ids`, `length`, `anchors` and `restorable` may be read
from any thread.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from .anchors import Anchor
from .buffers import Fixed, KVBuffer, Pool
from .digest import Ids
from .spans import PathView, Span, cut

MAX_SPANS = 4  # attention over more pieces costs more than copying the short ones
GROWTH_ROWS = 1024  # a tail doubles up to this many rows, then grows by them


class Spaces:
    """The buffers of an engine and which sequences look at them. Owner thread only."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.zeros = pool.layout.zeros()  # the overwritten buffers at the start of every path
        self._holders: WeakKeyDictionary[KVBuffer, WeakSet[Sequence]] = WeakKeyDictionary()

    def hold(self, buffer: KVBuffer, sequence: "Sequence") -> None:
        self._holders.setdefault(buffer, WeakSet()).add(sequence)

    def drop(self, buffer: KVBuffer, sequence: "Sequence") -> None:
        holders = self._holders.get(buffer)
        if holders is not None:
            holders.discard(sequence)

    def move(self, old: KVBuffer, capacity: int) -> KVBuffer:
        """Copy the used rows of `old` into a buffer of `capacity` rows and let every sequence look
        at the copy, so that what was shared stays shared. `old` is freed with its last view."""
        holders = list(self._holders.get(old, ()))
        assert all(holder._writes_to() is not old for holder in holders), "moved while written"
        used = self.used_rows(old)
        new = self.pool.allocate(max(capacity, used), old.origin)
        new.copy_rows(old, 0, used, at=new.claim(used))
        for sequence in holders:
            sequence._repoint(old, new)
        return new

    def bytes_for(self, rows: int) -> int:
        """Bytes of a new buffer with room for `rows` rows."""
        return self.pool.layout.capacity_bytes(self.pool.capacity_for(rows))

    def tighten(self, buffer: KVBuffer) -> None:
        """Copy the rows in use to a buffer of their size if they are less than half of this one."""
        used = self.used_rows(buffer)
        promised = max((holder.reserved for holder in self._holders.get(buffer, ())), default=0)
        if 0 < used and self.pool.capacity_for(used + promised) < buffer.capacity / 2:
            self.move(buffer, used)

    def used_rows(self, buffer: KVBuffer) -> int:
        """How many rows of the buffer a sequence looks at, at most."""
        holders = self._holders.get(buffer, ())
        return max((q._rows_of(buffer) for q in holders), default=0)


class Sequence:
    """See the module. Implements `batch.LayerState`."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self.spans: list[Span] = []
        self.anchors: dict[int, Anchor] = {}  # by position
        self.dropped: set[int] = set()  # positions of anchors that gave way to others
        self._ids: Ids = np.empty(64, dtype=np.int32)
        self._length = 0
        self.reserved = 0  # rows still to come that have room already
        self._pending = 0  # rows of the pass under way
        self._write_at: tuple[KVBuffer, int] | None = None
        # The overwritten buffers at `length`; None where only rows are at hand.
        self._fixed: Fixed | None = spaces.zeros
        self._kept: dict[int, dict[int, tuple[torch.Tensor, ...]]] = {}  # rows -> layer -> buffers
        self._handed_over: dict[int, Fixed] = {}  # position -> buffers, of the last pass

    # -- what any thread may read

    @property
    def length(self) -> int:
        return self._length

    @property
    def ids(self) -> Ids:
        """The ids of the rows held. A view: later commits do not change it."""
        length = self._length
        return self._ids[:length]

    def restorable(self, limit: int) -> int:
        """The last position up to `limit` at which every layer's state is at hand."""
        layout, length = self._spaces.pool.layout, self._length
        if layout.sliceable:
            return min(limit, length)
        if limit >= length and self._fixed is not None:
            return length
        limit = min(limit, length)
        sliced = limit - limit % layout.step if layout.step else 0
        return max((p for p in list(self.anchors) if sliced < p <= limit), default=sliced)

    # -- a forward pass

    def room_needed(self, rows: int) -> int:
        """Bytes that `begin(rows)` would allocate."""
        needed = self._growth(rows)
        if needed and not self._at_mark() and len(self.spans) == MAX_SPANS:
            sizes = [span.rows for span in self.spans] + [rows]
            pairs = [a + b for a, b in zip(sizes, sizes[1:], strict=False)]
            needed += self._spaces.pool.capacity_for(min(pairs) + rows)
        return self._spaces.pool.layout.capacity_bytes(needed) if needed else 0

    def reserve(self, rows: int) -> None:
        """Make the next `begin`s of `rows` rows in all allocate at most once, now."""
        if self._growth(rows):
            self._make_tail(rows)
        self.reserved = rows

    def begin(self, rows: int) -> None:
        """Claim room for the rows of a pass. `commit` or `abort` ends it."""
        assert rows > 0 and self._pending == 0, (rows, self._pending)
        if self._growth(rows):
            self._make_tail(rows)
        buffer = self.spans[-1].buffer
        self._write_at = (buffer, buffer.claim(rows))
        self._pending = rows

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this pass's rows of a layer: k [n, H, Dk], v [n, H, Dv], where n is the number of
        its groups that close in this pass."""
        assert self._write_at is not None, "write outside begin and commit"
        buffer, start = self._write_at
        pair = buffer.layers[layer]
        assert pair is not None, layer
        first, last = buffer.local(layer, start, start + self._pending)
        assert k.shape[0] == last - first, (k.shape, first, last)
        pair[0][first:last].copy_(k)
        pair[1][first:last].copy_(v)

    def load(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Store the rows of this pass for all layers at once, from named tensors [L, n, H, D].
        Copied by numpy: the copies are short, and after each of them torch's threads would have to
        wait for one that a busy neighbour keeps off its core."""
        assert self._write_at is not None, "load outside begin and commit"
        buffer, start = self._write_at
        for name, target in buffer.rows(start, start + self._pending).items():
            np.copyto(target.view(torch.uint8).numpy(), rows[name].view(torch.uint8).numpy())

    def pieces(self, layer: int, *, new: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of a layer's rows in path order, each [S, H, D] with S >= 1; with `new` the last
        one ends with the rows of this pass. Valid until the next `begin`."""
        pieces = []
        last = len(self.spans) - 1
        for index, span in enumerate(self.spans):
            rows = span.rows + self._pending if new and index == last else span.rows
            pair = span.buffer.layers[layer]
            assert pair is not None, layer
            _, stop = span.buffer.local(layer, 0, rows)
            if stop:
                pieces.append((pair[0][:stop], pair[1][:stop]))
        return pieces

    def fixed(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The layer's overwritten buffers before this pass. Never change them in place."""
        assert self._fixed is not None, "rows without the state that goes with them"
        return self._fixed[layer]

    def keep(self, layer: int, rows: int, buffers: tuple[torch.Tensor, ...]) -> None:
        """The layer's overwritten buffers after `rows` rows of this pass."""
        assert 0 < rows <= self._pending, (rows, self._pending)
        self._kept.setdefault(rows, {})[layer] = buffers

    def fixed_at(self, position: int) -> Fixed:
        """The overwritten buffers at a position where the last pass handed them over, or where the
        sequence stands."""
        if not self._spaces.pool.layout.fixed_bytes:
            return self._spaces.zeros
        found = self._fixed if position == self._length else self._handed_over.get(position)
        assert found is not None, (position, self._length)
        return found

    def resume(self, fixed: Fixed) -> None:
        """Go on from rows that were loaded, with the overwritten buffers that belong there."""
        self._fixed = fixed

    def commit(self, ids: SequenceOf[int] | Ids) -> None:
        """Make the rows of this pass permanent, under their ids."""
        assert len(ids) == self._pending > 0, (len(ids), self._pending)
        self._append_ids(ids)
        last = self.spans[-1]
        self.spans[-1] = Span(last.buffer, last.rows + self._pending)
        self._handed_over = self._take_kept()
        self._length += self._pending
        if self._spaces.pool.layout.fixed_bytes:  # rows that were loaded leave it open
            self._fixed = self._handed_over.get(self._length)
        self.reserved = max(0, self.reserved - self._pending)
        self._pending, self._write_at = 0, None

    def abort(self) -> None:
        """Forget the pass under way; the rows it claimed are reused if nobody claimed more."""
        if self._write_at is not None:
            buffer, start = self._write_at
            if buffer.mark == start + self._pending:
                buffer.mark = start
        self._pending, self._write_at = 0, None
        self._kept = {}
        self._drop_empty()

    # -- views

    def fork(self, at: int | None = None) -> "Sequence":
        """A sequence of the first `at` rows (all by default) that shares every row. Where the
        state at `at` is not at hand (`restorable`), it must `resume` before it can grow."""
        at = self._length if at is None else at
        assert 0 <= at <= self._length and self._pending == 0, (at, self._length, self._pending)
        twin = Sequence(self._spaces)
        twin._ids = self._ids[:at].copy()
        twin._length = at
        twin.anchors = {p: anchor for p, anchor in self.anchors.items() if p <= at}
        twin.dropped = {p for p in self.dropped if p <= at}
        twin._fixed = self._state_at(at)
        twin.spans = cut(self.spans, at)
        for span in twin.spans:
            self._spaces.hold(span.buffer, twin)
        return twin

    def truncate(self, at: int) -> None:
        """Keep the first `at` rows, as `fork` would. Rows and anchors beyond are no longer this
        sequence's."""
        assert 0 <= at <= self._length and self._pending == 0, (at, self._length, self._pending)
        self._fixed = self._state_at(at)
        self._handed_over = {}
        self._set_spans(cut(self.spans, at))
        self._ids = self._ids[:at].copy()
        self._length = at
        self.anchors = {p: anchor for p, anchor in self.anchors.items() if p <= at}
        self.dropped = {p for p in self.dropped if p <= at}

    def shorten(self) -> None:
        """Let go of rows beyond the last position whose state is at hand, after rows were loaded
        without it."""
        at = self.restorable(self._length)
        if at < self._length or self._fixed is None:
            self.truncate(at)

    def view(self, at: int | None = None) -> PathView:
        """A frozen picture of the first `at` rows."""
        at = self._length if at is None else at
        return PathView(self.ids[:at], tuple(cut(self.spans, at)))

    def settle(self) -> None:
        """Give back what no sequence looks at: buffers used to less than half are copied tight."""
        self.reserved = 0
        self._drop_empty()
        for buffer in {id(span.buffer): span.buffer for span in self.spans}.values():
            self._spaces.tighten(buffer)

    def close(self) -> None:
        """Let go of every row."""
        self._set_spans([])
        self.anchors = {}
        self._ids, self._length = np.empty(0, dtype=np.int32), 0
        self._fixed, self._handed_over = None, {}

    @property
    def size_bytes(self) -> int:
        """Bytes of the allocations it looks at, whether shared or not."""
        return sum({id(s.buffer): s.buffer.size_bytes for s in self.spans}.values())

    # -- inside

    def _take_kept(self) -> dict[int, Fixed]:
        """What the mixers handed over in this pass, by position."""
        kept, self._kept = self._kept, {}
        layout = self._spaces.pool.layout
        taken = {}
        for rows, by_layer in kept.items():
            fixed = tuple(by_layer.get(layer, ()) for layer in range(layout.num_layers))
            shapes = tuple(tuple(tuple(t.shape) for t in buffers) for buffers in fixed)
            assert shapes == layout.fixed, (rows, shapes)
            taken[self._length + rows] = fixed
        return taken

    def _state_at(self, position: int) -> Fixed | None:
        """The overwritten buffers at a position, if they are at hand."""
        layout = self._spaces.pool.layout
        if position == self._length and self._fixed is not None:
            return self._fixed
        if position in self.anchors:
            return self.anchors[position].fixed
        sliced = position % layout.step == 0 if layout.step else position == 0
        return self._spaces.zeros if sliced else None

    def _writes_to(self) -> KVBuffer | None:
        return self._write_at[0] if self._write_at is not None else None

    def _at_mark(self) -> bool:
        return bool(self.spans) and self.spans[-1].rows == self.spans[-1].buffer.mark

    def _growth(self, rows: int) -> int:
        """Rows to allocate so that `rows` more fit in one run; 0 if they fit already."""
        if not self._at_mark():
            return self._spaces.pool.capacity_for(rows)
        buffer = self.spans[-1].buffer
        if buffer.room >= rows:
            return 0
        used = self._spaces.used_rows(buffer)
        return self._spaces.pool.capacity_for(used + max(rows, min(used, GROWTH_ROWS)))

    def _make_tail(self, rows: int) -> None:
        capacity = self._growth(rows)
        if self._at_mark():
            self._spaces.move(self.spans[-1].buffer, capacity)
            return
        tail = self._spaces.pool.allocate(capacity, self._length)
        self._set_spans([*self.spans, Span(tail, 0)])
        while len(self.spans) > MAX_SPANS:
            self._merge_shortest(rows)

    def _merge_shortest(self, rows: int) -> None:
        """Copy the two neighbours that hold the fewest rows into one buffer."""
        sizes = [a.rows + b.rows for a, b in zip(self.spans, self.spans[1:], strict=False)]
        index = sizes.index(min(sizes))
        first, second = self.spans[index : index + 2]
        spare = rows if index + 2 == len(self.spans) else 0
        merged = self._spaces.pool.allocate(first.rows + second.rows + spare, first.buffer.origin)
        for span in (first, second):
            merged.copy_rows(span.buffer, 0, span.rows, at=merged.claim(span.rows))
        new = Span(merged, merged.mark)
        self._set_spans([*self.spans[:index], new, *self.spans[index + 2 :]])

    def _set_spans(self, spans: list[Span]) -> None:
        before = {id(span.buffer): span.buffer for span in self.spans}
        self.spans = spans
        after = {id(span.buffer): span.buffer for span in spans}
        for key, buffer in after.items():
            if key not in before:
                self._spaces.hold(buffer, self)
        for key, buffer in before.items():
            if key not in after:
                self._spaces.drop(buffer, self)

    def _drop_empty(self) -> None:
        self._set_spans([span for span in self.spans if span.rows])

    def _rows_of(self, buffer: KVBuffer) -> int:
        return max((span.rows for span in self.spans if span.buffer is buffer), default=0)

    def _repoint(self, old: KVBuffer, new: KVBuffer) -> None:
        moved = [Span(new, s.rows) if s.buffer is old else s for s in self.spans]
        self._set_spans(moved)

    def _append_ids(self, ids: SequenceOf[int] | Ids) -> None:
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = ids

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

import numpy as np
import torch

from .anchors import Anchor
from .buffers import Fixed, KVBuffer
from .digest import Ids
from .spaces import Spaces
from .spans import PathView, Span, cut

MAX_SPANS = 4  # attention over more pieces costs more than copying the short ones
GROWTH_ROWS = 1024  # a tail doubles up to this many rows, then grows by them


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
        self.replay = 0  # rows to forward again before it can grow: volatile buffers are unknown
        self._replaying = 0  # rows of a replay under way

    # -- what any thread may read

    @property
    def length(self) -> int:
        """Rows held; during a replay, those before it."""
        return self._length - self._replaying

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

    def begin_replay(self) -> None:
        """Forward the last `replay` rows again. All that changes by it is the
        volatile buffers; what is written else is dropped. `commit` or `abort` ends it."""
        assert self.replay and self._pending == 0 and self._fixed is not None, self.replay
        self._fixed = self._spaces.pool.layout.joined(self._fixed, self._spaces.zeros)
        self._pending = self._replaying = self.replay

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this pass's rows of a layer: k [n, H, Dk], v [n, H, Dv], where n is the number of
        its groups that close in this pass."""
        if self._replaying:
            return
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
        spans = cut(self.spans, self.length) if self._replaying and not new else self.spans
        growing = new and not self._replaying
        for index, span in enumerate(spans):
            rows = span.rows + self._pending if growing and index == last else span.rows
            pair = span.buffer.layers[layer]
            assert pair is not None, layer
            _, stop = span.buffer.local(layer, 0, rows)
            if stop:
                pieces.append((pair[0][:stop], pair[1][:stop]))
        return pieces

    def fixed(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The layer's overwritten buffers before this pass. Never change them in place."""
        assert self._fixed is not None, "rows without the state that goes with them"
        assert not self.replay or self._replaying, "grown before the replay"
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

    def resume(self, anchor: Anchor) -> None:
        """Go on from rows that were loaded, with the anchor that belongs to their end."""
        self.anchors[self._length] = anchor
        self._fixed, self.replay = self._state_at(self._length)

    def replay_at(self, position: int) -> int:
        """Rows that a path restored at `position` has to forward again."""
        return self._state_at(position)[1]

    def commit(self, ids: SequenceOf[int] | Ids) -> None:
        """Make the rows of this pass permanent, under their ids."""
        assert len(ids) == self._pending > 0, (len(ids), self._pending)
        if self._replaying:
            self._end_replay()
            return
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
        self._pending, self._write_at, self._replaying = 0, None, 0
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
        twin._fixed, twin.replay = self._state_at(at)
        twin.spans = cut(self.spans, at)
        for span in twin.spans:
            self._spaces.hold(span.buffer, twin)
        return twin

    def truncate(self, at: int) -> None:
        """Keep the first `at` rows, as `fork` would. Rows and anchors beyond are no longer this
        sequence's."""
        assert 0 <= at <= self._length and self._pending == 0, (at, self._length, self._pending)
        self._fixed, self.replay = self._state_at(at)
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
        self._handed_over = {}
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

    def _end_replay(self) -> None:
        """Take up the volatile buffers, and nothing else."""
        assert self._fixed is not None, "rows without the state that goes with them"
        kept = self._kept[self._pending]
        self._kept, self._pending, self._replaying, self.replay = {}, 0, 0, 0
        layout = self._spaces.pool.layout
        filled = tuple(kept.get(layer, ()) for layer in range(layout.num_layers))
        self._fixed = layout.joined(self._fixed, filled)

    def _state_at(self, position: int) -> tuple[Fixed | None, int]:
        """The overwritten buffers at a position, if they are at hand, and the rows that have to be
        forwarded again to complete them."""
        layout = self._spaces.pool.layout
        replay = min(layout.replay_tokens, position)
        if position == self._length and self._fixed is not None:
            return self._fixed, self.replay
        anchor = self.anchors.get(position)
        if anchor is not None:
            return anchor.fixed, replay if anchor.stale else 0
        sliced = position % layout.step == 0 if layout.step else position == 0
        return (self._spaces.zeros, replay) if sliced else (None, 0)

    def writes_to(self) -> KVBuffer | None:
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

    def rows_of(self, buffer: KVBuffer) -> int:
        return max((span.rows for span in self.spans if span.buffer is buffer), default=0)

    def repoint(self, old: KVBuffer, new: KVBuffer) -> None:
        moved = [Span(new, s.rows) if s.buffer is old else s for s in self.spans]
        self._set_spans(moved)

    def _append_ids(self, ids: SequenceOf[int] | Ids) -> None:
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = ids

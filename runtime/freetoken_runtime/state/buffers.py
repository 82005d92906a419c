# SPDX-License-Identifier: Apache-2.0
"""The memory KV rows live in: append-only allocations, counted once.

One allocation holds, for every group of layers with equal row shape,

    k  [L, capacity, H, Dk]    v  [L, capacity, H, Dv]

token-major and stacked over the layers, so that a run of tokens of all layers is one strided
copy. Rows below `mark` never change; rows above it belong to whoever claims them. It does not know
whose rows these are (`sequence.py`) or when room must be made (`memory.py`).
"""

import math
import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

import torch

from .reserve import Reserve, map_private

ROW_ALIGN = 64  # capacities are multiples of a block, so that a block never straddles the end


@dataclass(frozen=True)
class RowShape:
    """The KV row of one layer: `heads` heads of `key_dim` keys and `value_dim` values."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class RowGroup:
    """The layers that share a row shape, in layer order."""

    shape: RowShape
    layers: tuple[int, ...]


class StateLayout:
    """How the sliceable layers of a model are laid out. Immutable.

    `rows[layer]` is the row shape of a layer, or None for a layer without KV rows.
    """

    def __init__(self, rows: Sequence[RowShape | None]) -> None:
        by_shape: dict[RowShape, list[int]] = {}
        for layer, shape in enumerate(rows):
            if shape is not None:
                by_shape.setdefault(shape, []).append(layer)
        self.groups = tuple(RowGroup(shape, tuple(layers)) for shape, layers in by_shape.items())
        self.token_bytes = sum(g.shape.size_bytes * len(g.layers) for g in self.groups)
        self.num_layers = len(rows)

    def buffer_sizes(self, rows: int) -> dict[str, int]:
        """Bytes of the named buffers (`k0 v0 k1 …`, one pair per group) that hold `rows` tokens."""
        sizes: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            per_head = rows * len(group.layers) * group.shape.heads * group.shape.dtype.itemsize
            sizes[f"k{index}"] = per_head * group.shape.key_dim
            sizes[f"v{index}"] = per_head * group.shape.value_dim
        return sizes


class Meter:
    """Counts the bytes of live allocations. Any thread may read it.

    Freed sizes arrive from finalizers, which may run in any thread and inside any statement; a
    deque takes them without a lock and the next reader folds them in.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._freed: deque[int] = deque()

    def take(self, size_bytes: int) -> None:
        """Called by the owner thread only."""
        self._taken += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._freed.append(size_bytes)

    @property
    def used_bytes(self) -> int:
        return self._taken - sum(self._freed.copy())

    def fold(self) -> None:
        """Shorten the list of freed sizes. Called by the owner thread only."""
        while self._freed:
            self._taken -= self._freed.popleft()


class KVBuffer:
    """One allocation. Mutable in one way: `claim` raises `mark`; rows below it are frozen.

    `arena`: the memory to use, of the right size; by default a mapping of its own.
    """

    __slots__ = ("__weakref__", "capacity", "keys", "layers", "mark", "size_bytes", "values")

    def __init__(self, layout: StateLayout, capacity: int, arena: mmap.mmap | None = None) -> None:
        self.capacity = capacity
        self.mark = 0
        self.size_bytes = max(layout.token_bytes * capacity, 1)
        if arena is None:
            arena = map_private(self.size_bytes)
        assert len(arena) == self.size_bytes, (len(arena), self.size_bytes)
        self.keys: list[torch.Tensor] = []  # per group [L, capacity, H, Dk]
        self.values: list[torch.Tensor] = []  # per group [L, capacity, H, Dv]
        self.layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layout.num_layers
        offset = 0
        for group in layout.groups:
            shape, depth = group.shape, len(group.layers)
            pair = []
            for dim in (shape.key_dim, shape.value_dim):
                dims = (depth, capacity, shape.heads, dim)
                count = math.prod(dims)
                flat = torch.frombuffer(arena, dtype=shape.dtype, count=count, offset=offset)
                pair.append(flat.view(dims))
                offset += count * shape.dtype.itemsize
            self.keys.append(pair[0])
            self.values.append(pair[1])
            for layer, k, v in zip(group.layers, pair[0].unbind(0), pair[1].unbind(0), strict=True):
                self.layers[layer] = (k, v)

    @property
    def room(self) -> int:
        return self.capacity - self.mark

    def claim(self, rows: int) -> int:
        """Take the next `rows` rows; returns where they start."""
        assert rows <= self.room, (rows, self.capacity, self.mark)
        start = self.mark
        self.mark += rows
        return start

    def copy_rows(self, source: "KVBuffer", start: int, stop: int, at: int) -> None:
        """Copy rows [start, stop) of `source`, all layers, to `at`."""
        end = at + stop - start
        for mine, theirs in zip(
            (*self.keys, *self.values), (*source.keys, *source.values), strict=True
        ):
            mine[:, at:end].copy_(theirs[:, start:stop])

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Named views of rows [start, stop), each [L, stop - start, H, D]."""
        views: dict[str, torch.Tensor] = {}
        for index, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            views[f"k{index}"] = k[:, start:stop]
            views[f"v{index}"] = v[:, start:stop]
        return views


class Pool:
    """Makes buffers of one layout and counts them. Owner thread only (but `meter`)."""

    def __init__(self, layout: StateLayout, *, poison: bool = False) -> None:
        self.layout = layout
        self.meter = Meter()
        self._poison = poison  # tests: a row that was never written is NaN, not zero
        self._reserve: Reserve | None = None

    def capacity_for(self, rows: int) -> int:
        return -(-max(rows, 1) // ROW_ALIGN) * ROW_ALIGN

    def adopt(self, reserve: Reserve) -> None:
        """Count a reserve, and give it to the first buffer that needs more than half of it."""
        self._reserve = reserve
        self.meter.take(reserve.size_bytes)

    def drop_reserve(self) -> bool:
        """Let go of the reserve; whether there was one."""
        reserve, self._reserve = self._reserve, None
        if reserve is None:
            return False
        self.meter.give_back(reserve.size_bytes)
        return True

    def allocate(self, rows: int) -> KVBuffer:
        """A buffer with room for at least `rows` rows."""
        reserve, capacity, arena = self._reserve, self.capacity_for(rows), None
        if reserve is not None and reserve.rows < 2 * capacity <= 2 * reserve.rows:
            self.drop_reserve()
            capacity, arena = reserve.rows, reserve.take()
        buffer = KVBuffer(self.layout, capacity, arena)
        if self._poison:
            for tensor in (*buffer.keys, *buffer.values):
                tensor.fill_(math.nan)
        self.meter.fold()
        self.meter.take(buffer.size_bytes)
        finalize(buffer, self.meter.give_back, buffer.size_bytes).atexit = False
        return buffer

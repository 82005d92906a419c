# SPDX-License-Identifier: Apache-2.0
"""The memory KV rows live in: append-only allocations, counted once.

One allocation holds, for every group of layers with equal row shape,

    k  [L, capacity, H, Dk]    v  [L, capacity, H, Dv]

token-major and stacked over the layers, so that a run of tokens of all layers is one strided
copy. Layers that keep one row per group of g tokens have capacity / g + 1 of them: the row of a
group lies at the token that closes it. Rows below `mark` never change; rows above it belong to
whoever claims them. It does not know whose rows these are (`sequence.py`) or when room must be made
(`memory.py`).
"""

import math
import mmap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import finalize

import torch

from ..spec import StateSpec
from .reserve import Reserve, map_private

ROW_ALIGN = 64  # capacities are multiples of a block, so that a block never straddles the end


@dataclass(frozen=True)
class RowShape:
    """The KV row of one layer: `heads` heads of `key_dim` keys and `value_dim` values (0: the layer
    keeps keys only), one per `granularity` tokens."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    granularity: int = 1

    @property
    def size_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of tokens [start, stop) of a path, counted from the path's start: those of the
        groups that close there."""
        return start // self.granularity, stop // self.granularity


@dataclass(frozen=True)
class RowGroup:
    """The layers that share a row shape, in layer order."""

    shape: RowShape
    layers: tuple[int, ...]

    def dims(self, rows: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """`k` and, if there are values, `v`, each with the shape [L, rows, H, D] of that many rows
        of its layers."""
        shape, depth = self.shape, len(self.layers)
        named = (("k", shape.key_dim), ("v", shape.value_dim))
        return tuple((name, (depth, rows, shape.heads, dim)) for name, dim in named if dim)


# Per layer, the buffers that every token overwrites; () for layers without any.
Fixed = tuple[tuple[torch.Tensor, ...], ...]
FixedShapes = tuple[tuple[tuple[int, ...], ...], ...]


class StateLayout:
    """How the state of a model is laid out. Immutable.

    `rows[layer]` is the row shape of a layer, or None for a layer without KV rows; `fixed[layer]`
    the shapes of the fp32 buffers that every token overwrites. `carried`: those hold nothing but
    the open groups of layers with a granularity, so that between groups they are zero. `volatile`:
    how many of a layer's buffers, the last ones, no store keeps: forwarding `replay_tokens` tokens
    again fills them.
    """

    def __init__(
        self,
        rows: Sequence[RowShape | None],
        fixed: FixedShapes = (),
        *,
        carried: bool = False,
        volatile: Mapping[int, int] | None = None,
        replay_tokens: int = 0,
    ) -> None:
        by_shape: dict[RowShape, list[int]] = {}
        for layer, shape in enumerate(rows):
            if shape is not None:
                by_shape.setdefault(shape, []).append(layer)
        self.groups = tuple(RowGroup(shape, tuple(layers)) for shape, layers in by_shape.items())
        self.token_bytes = sum(
            -(-g.shape.size_bytes * len(g.layers) // g.shape.granularity) for g in self.groups
        )
        self.num_layers = len(rows)
        self.rows = tuple(rows)
        self.fixed: FixedShapes = fixed or ((),) * len(rows)
        self.fixed_bytes = 4 * sum(math.prod(dims) for layer in self.fixed for dims in layer)
        self.volatile = dict(volatile or {})
        self.replay_tokens = replay_tokens
        coarse = [g.shape.granularity for g in self.groups]
        # Every prefix whose length is a multiple of it can be taken; 0: anchors only.
        self.step = math.lcm(*coarse) if carried or not self.fixed_bytes else 0

    @classmethod
    def of(cls, states: Sequence[StateSpec], dtype: torch.dtype) -> Self:
        """The layout of these states, one per layer, with KV rows of `dtype`."""
        return cls(
            [_row_shape(state, dtype) for state in states],
            tuple(tuple(buffer.shape for buffer in state.overwritten) for state in states),
            carried=not any(state.fixed for state in states),
            volatile={i: len(x.volatile) for i, x in enumerate(states) if x.volatile},
            replay_tokens=max((state.replay_tokens for state in states), default=0),
        )

    @property
    def sliceable(self) -> bool:
        """Whether any prefix can be taken."""
        return self.step == 1

    def zeros(self) -> Fixed:
        """The overwritten buffers at the start of a path."""
        return tuple(tuple(torch.zeros(dims) for dims in layer) for layer in self.fixed)

    def empty(self) -> Fixed:
        """Memory for the overwritten buffers; NaN, so that what is not filled shows."""
        return tuple(tuple(torch.full(dims, math.nan) for dims in layer) for layer in self.fixed)

    def stored(self, fixed: Fixed) -> Fixed:
        """Without the buffers that no store keeps."""
        return tuple(
            buffers[: len(buffers) - self.volatile.get(layer, 0)]
            for layer, buffers in enumerate(fixed)
        )

    def joined(self, stored: Fixed, volatile: Fixed) -> Fixed:
        """The buffers of one state with the volatile ones of another."""
        return tuple(
            (*kept[: len(kept) - count], *other[len(other) - count :])
            for kept, other, count in (
                (stored[layer], volatile[layer], self.volatile.get(layer, 0))
                for layer in range(self.num_layers)
            )
        )

    def capacity_bytes(self, capacity: int) -> int:
        """Bytes of an allocation with room for `capacity` tokens."""
        return sum(
            g.shape.size_bytes * len(g.layers) * _row_capacity(g.shape, capacity)
            for g in self.groups
        )

    def buffer_dims(self, start: int, stop: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the named buffers (`k0 v0 k1 …`) that hold tokens [start, stop) of a path;
        those without a row are left out."""
        dims: dict[str, tuple[int, ...]] = {}
        for index, group in enumerate(self.groups):
            first, last = group.shape.rows(start, stop)
            if first < last:
                dims |= {f"{name}{index}": shape for name, shape in group.dims(last - first)}
        return dims

    def cut(
        self, tensors: Mapping[str, torch.Tensor], origin: int, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Of named buffers that begin at token `origin` of a path, the rows of tokens
        [start, stop)."""
        parts: dict[str, torch.Tensor] = {}
        for name, rows in tensors.items():
            shape = self.groups[int(name[1:])].shape
            before, _ = shape.rows(origin, origin)
            first, last = shape.rows(start, stop)
            if first < last:
                parts[name] = rows[:, first - before : last - before]
        return parts

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a named buffer."""
        return self.groups[int(name[1:])].shape.dtype


def _row_shape(state: StateSpec, dtype: torch.dtype) -> RowShape | None:
    if not state.rows:
        return None
    keys, values = state.rows[0], state.rows[1] if len(state.rows) > 1 else None
    assert len(state.rows) <= 2 and (values is None or values.shape[0] == keys.shape[0]), state.rows
    value_dim = 0 if values is None else values.shape[1]
    return RowShape(keys.shape[0], keys.shape[1], value_dim, dtype, state.granularity)


def _row_capacity(shape: RowShape, capacity: int) -> int:
    """Rows for `capacity` tokens wherever the groups begin."""
    return capacity if shape.granularity == 1 else capacity // shape.granularity + 1


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

    `origin`: the position in its path of the token at row 0. `arena`: the memory to use, of the
    right size; by default a mapping of its own.
    """

    __slots__ = (
        "__weakref__",
        "_shapes",
        "capacity",
        "layers",
        "mark",
        "origin",
        "size_bytes",
        "stacks",
    )

    def __init__(
        self,
        layout: StateLayout,
        capacity: int,
        arena: mmap.mmap | None = None,
        *,
        origin: int = 0,
    ) -> None:
        self.capacity = capacity
        self.origin = origin
        self.mark = 0
        self.size_bytes = max(layout.capacity_bytes(capacity), 1)
        if arena is None:
            arena = map_private(self.size_bytes)
        assert len(arena) == self.size_bytes, (len(arena), self.size_bytes)
        # per group: its shape and [L, rows, H, D] tensors by name
        self.stacks: list[tuple[RowShape, dict[str, torch.Tensor]]] = []
        self._shapes = layout.rows
        self.layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layout.num_layers
        offset = 0
        for group in layout.groups:
            stack = {}
            for name, dims in group.dims(_row_capacity(group.shape, capacity)):
                count, dtype = math.prod(dims), group.shape.dtype
                flat = torch.frombuffer(arena, dtype=dtype, count=count, offset=offset)
                stack[name] = flat.view(dims)
                offset += count * dtype.itemsize
            self.stacks.append((group.shape, stack))
            keys = stack["k"]
            values = stack.get("v", keys[..., :0])
            for layer, k, v in zip(group.layers, keys.unbind(0), values.unbind(0), strict=True):
                self.layers[layer] = (k, v)

    @property
    def room(self) -> int:
        return self.capacity - self.mark

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of its memory."""
        return tuple(tensor for _, stack in self.stacks for tensor in stack.values())

    def claim(self, rows: int) -> int:
        """Take room for the next `rows` tokens; returns where they start."""
        assert rows <= self.room, (rows, self.capacity, self.mark)
        start = self.mark
        self.mark += rows
        return start

    def copy_rows(self, source: "KVBuffer", start: int, stop: int, at: int) -> None:
        """Copy the rows of tokens [start, stop) of `source`, all layers, to token `at`."""
        assert source.origin + start == self.origin + at, "a row keeps its place in the path"
        theirs = source.rows(start, stop)
        for name, mine in self.rows(at, at + stop - start).items():
            mine.copy_(theirs[name])

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Named views of the rows of tokens [start, stop), each [L, rows, H, D]; those without a
        row are left out."""
        views: dict[str, torch.Tensor] = {}
        for index, (shape, stack) in enumerate(self.stacks):
            first, last = self._local(shape, start, stop)
            if first < last:
                views |= {f"{name}{index}": rows[:, first:last] for name, rows in stack.items()}
        return views

    def local(self, layer: int, start: int, stop: int) -> tuple[int, int]:
        """Where the rows of tokens [start, stop) lie in a layer's tensors."""
        shape = self._shapes[layer]
        assert shape is not None, layer
        return self._local(shape, start, stop)

    def _local(self, shape: RowShape, start: int, stop: int) -> tuple[int, int]:
        if shape.granularity == 1:
            return start, stop
        before = self.origin // shape.granularity
        first, last = shape.rows(self.origin + start, self.origin + stop)
        return first - before, last - before


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

    def allocate(self, rows: int, origin: int = 0) -> KVBuffer:
        """A buffer with room for at least `rows` tokens from position `origin` of a path on."""
        reserve, capacity, arena = self._reserve, self.capacity_for(rows), None
        if reserve is not None and reserve.rows < 2 * capacity <= 2 * reserve.rows:
            self.drop_reserve()
            capacity, arena = reserve.rows, reserve.take()
        buffer = KVBuffer(self.layout, capacity, arena, origin=origin)
        if self._poison:
            for tensor in buffer.tensors:
                tensor.fill_(math.nan)
        self.meter.fold()
        self.meter.take(buffer.size_bytes)
        finalize(buffer, self.meter.give_back, buffer.size_bytes).atexit = False
        return buffer

# SPDX-License-Identifier: Apache-2.0
"""Sequences over shared buffers. Oracle: lists of ids, and rows computed from (path, layer)."""

import gc
import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freetoken_runtime.state.buffers import Pool, RowShape, StateLayout
from freetoken_runtime.state.sequence import MAX_SPANS, Sequence
from freetoken_runtime.state.spaces import Spaces

SHAPES = [
    RowShape(2, 3, 3, torch.float32),
    None,
    RowShape(1, 4, 2, torch.float32),
    RowShape(2, 3, 3, torch.float32),
]
LAYERS = [0, 2, 3]


def spaces() -> Spaces:
    return Spaces(Pool(StateLayout(SHAPES), poison=True))


def row(path: list[int], layer: int, shape: RowShape) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer would store for the last id of `path`: it depends on the whole path."""
    value = float(hash((tuple(path), layer)) % 65521)
    key = torch.full((shape.heads, shape.key_dim), value)
    return key, torch.full((shape.heads, shape.value_dim), value + 0.5)


def append(sequence: Sequence, path: list[int], ids: list[int], *, commit: bool = True) -> None:
    """One pass over `ids` after `path`, as a decoder makes it."""
    sequence.begin(len(ids))
    for layer in LAYERS:
        shape = SHAPES[layer]
        assert shape is not None
        rows = [row(path + ids[: i + 1], layer, shape) for i in range(len(ids))]
        k, v = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        before = sum(len(piece[0]) for piece in sequence.pieces(layer, new=False))
        assert before == len(path)
        sequence.write(layer, k, v)
        last_k, last_v = sequence.pieces(layer, new=True)[-1]
        assert torch.equal(last_k[-len(ids) :], k) and torch.equal(last_v[-len(ids) :], v)
    if commit:
        sequence.commit(ids)
    else:
        sequence.abort()


def check(sequence: Sequence, path: list[int]) -> None:
    """Ids and every row are what the path says."""
    assert sequence.ids.tolist() == path
    assert sequence.length == len(path)
    assert len(sequence.spans) <= MAX_SPANS
    assert all(span.rows for span in sequence.spans[:-1])
    for layer in LAYERS:
        shape = SHAPES[layer]
        assert shape is not None
        pieces = sequence.pieces(layer, new=True)
        if not path:
            assert pieces == []
            continue
        expected = [row(path[: i + 1], layer, shape) for i in range(len(path))]
        assert torch.equal(torch.cat([p[0] for p in pieces]), torch.stack([e[0] for e in expected]))
        assert torch.equal(torch.cat([p[1] for p in pieces]), torch.stack([e[1] for e in expected]))


class Programs(RuleBasedStateMachine):
    """Random appends, aborts, forks, truncations, settles and closes on a family of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.spaces = spaces()
        self.family: list[tuple[Sequence, list[int]]] = []

    @initialize()
    def start(self) -> None:
        self.family.append((Sequence(self.spaces), []))

    @rule(data=st.data(), count=st.sampled_from([1, 2, 3, 17, 63, 64, 65, 130]))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence, path = data.draw(st.sampled_from(self.family))
        ids = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        needed = sequence.room_needed(count)
        used = self.spaces.pool.meter.used_bytes
        append(sequence, path, ids)
        path += ids
        assert self.spaces.pool.meter.used_bytes - used <= needed

    @rule(data=st.data(), count=st.integers(1, 70))
    def abort(self, data: st.DataObject, count: int) -> None:
        sequence, path = data.draw(st.sampled_from(self.family))
        append(sequence, path, [1] * count, commit=False)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.family) < 6:
            sequence, path = data.draw(st.sampled_from(self.family))
            at = data.draw(st.integers(0, len(path)))
            used = self.spaces.pool.meter.used_bytes
            self.family.append((sequence.fork(at), path[:at]))
            assert self.spaces.pool.meter.used_bytes == used  # a view, never a copy

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence, path = data.draw(st.sampled_from(self.family))
        at = data.draw(st.integers(0, len(path)))
        sequence.truncate(at)
        del path[at:]

    @rule(data=st.data(), rows=st.integers(1, 200))
    def reserve(self, data: st.DataObject, rows: int) -> None:
        sequence, _ = data.draw(st.sampled_from(self.family))
        sequence.reserve(rows)
        assert sequence.room_needed(rows) == 0

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        sequence, _ = data.draw(st.sampled_from(self.family))
        sequence.settle()
        if len(self.family) == 1:
            for span in sequence.spans:
                used = self.spaces.pool.capacity_for(self.spaces.used_rows(span.buffer))
                assert used >= span.buffer.capacity / 2

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if len(self.family) > 1:
            index = data.draw(st.integers(0, len(self.family) - 1))
            self.family.pop(index)[0].close()

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        """A persister's picture stays what it was, whatever the sequence does next."""
        sequence, path = data.draw(st.sampled_from(self.family))
        if path:
            picture = sequence.view()
            sequence.truncate(len(path) - 1)
            append(sequence, path[:-1], [7])
            assert picture.ids.tolist() == path
            shape = SHAPES[0]
            assert shape is not None
            stored = picture.copy_rows(0, len(path))["k0"][0]
            expected = [row(path[: i + 1], 0, shape)[0] for i in range(len(path))]
            assert stored.tobytes() == torch.stack(expected).numpy().tobytes()
            path[-1] = 7

    @invariant()
    def every_row_is_right(self) -> None:
        for sequence, path in self.family:
            check(sequence, path)

    @invariant()
    def bytes_are_counted_once(self) -> None:
        buffers = {id(s.buffer): s.buffer for q, _ in self.family for s in q.spans}
        reserved = sum(b.size_bytes for b in buffers.values())
        assert self.spaces.pool.meter.used_bytes == reserved


Programs.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPrograms = Programs.TestCase


def test_forks_grow_apart_from_the_same_mark() -> None:
    """Two sequences end at one buffer's mark; both grow; neither sees the other's rows."""
    first = Sequence(spaces())
    append(first, [], [1, 2, 3])
    second = first.fork()
    append(first, [1, 2, 3], [4])
    append(second, [1, 2, 3], [5])
    append(first, [1, 2, 3, 4], [6, 7])
    check(first, [1, 2, 3, 4, 6, 7])
    check(second, [1, 2, 3, 5])
    assert first.spans[0].buffer is second.spans[0].buffer
    assert len(first.spans) == 1 and len(second.spans) == 2


def test_spans_are_compacted_short_neighbours_first() -> None:
    """A chain of forks never looks at more than four spans, and its long prefix is not copied."""
    rng = random.Random(3)
    home = spaces()
    sequence, path = Sequence(home), list[int]()
    long = [rng.randrange(10) for _ in range(500)]
    append(sequence, path, long)
    path = path + long
    prefix = sequence.spans[0].buffer
    others = []
    for _ in range(12):
        others.append(sequence)
        sequence = sequence.fork(len(path) - 1)
        path = path[:-1]
        append(sequence, path, [1, 2, 3])
        path = path + [1, 2, 3]
        check(sequence, path)
    assert sequence.spans[0].buffer is prefix


def test_growth_moves_every_holder_to_the_same_copy() -> None:
    """A full buffer that a fork shares grows without doubling what is shared."""
    home = spaces()
    sequence = Sequence(home)
    append(sequence, [], [1] * 64)
    twin = sequence.fork()
    append(sequence, [1] * 64, [2])
    assert sequence.spans[0].buffer is twin.spans[0].buffer
    check(twin, [1] * 64)
    gc.collect()
    assert home.pool.meter.used_bytes == sequence.spans[0].buffer.size_bytes


def test_an_aborted_pass_leaves_its_rows_to_the_next() -> None:
    """Rows claimed by a pass that failed are claimed again: the tail stays in one piece."""
    sequence = Sequence(spaces())
    append(sequence, [], [1, 2])
    append(sequence, [1, 2], [3, 4, 5], commit=False)
    append(sequence, [1, 2], [6])
    check(sequence, [1, 2, 6])
    assert len(sequence.spans) == 1 and sequence.spans[0].buffer.mark == 3


def test_a_small_view_of_a_large_buffer_is_copied() -> None:
    """When the long path goes, the short view of it does not keep the whole allocation."""
    home = spaces()
    sequence = Sequence(home)
    append(sequence, [], [1] * 1000)
    twin = sequence.fork(10)
    sequence.close()
    del sequence
    twin.settle()
    assert home.pool.meter.used_bytes == home.bytes_for(10)
    check(twin, [1] * 10)


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_freed_buffers_leave_the_process(rows: int) -> None:
    """The memory of a buffer is unmapped with its last view. Oracle: the kernel's own count."""
    home = Spaces(Pool(StateLayout([RowShape(8, 64, 64, torch.float32)] * 4)))
    before = _anonymous_bytes()
    sequence = Sequence(home)
    sequence.reserve(rows * 8)
    _fill(sequence)
    size = home.pool.meter.used_bytes
    assert _anonymous_bytes() - before > 0.9 * size - (1 << 20)
    sequence.close()
    assert home.pool.meter.used_bytes == 0
    assert _anonymous_bytes() - before < 0.1 * size + (1 << 20)


def _fill(sequence: Sequence) -> None:
    for tensor in sequence.spans[0].buffer.tensors:
        tensor.fill_(1.0)


def _anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

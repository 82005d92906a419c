# SPDX-License-Identifier: Apache-2.0
"""Slots on a device, on the CPU in its role. Oracles: a model of the slots as a plain list, and the
bytes that were written for each expert."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.device.accelerator import HostAccelerator
from freetoken_runtime.device.slots import DeviceSlot, DeviceSlots
from freetoken_runtime.errors import BudgetTooSmall

RECORD = 4096
LAYERS, EXPERTS = 2, 5
Key = tuple[int, int]


def slots_for(count: int, per_chunk: int = 1) -> DeviceSlots:
    slots = DeviceSlots(HostAccelerator(), RECORD, LAYERS, EXPERTS, per_chunk)
    slots.resize(count * RECORD)
    return slots


def fill(slots: DeviceSlots, key: Key, *, passing: bool = False) -> DeviceSlot | None:
    """As a pass does: ask, and claim what is not there."""
    slot = slots.ask(key) or slots.claim(key, passing=passing)
    if slot is not None:
        slot.memory.fill_(1 + key[0] * EXPERTS + key[1])
    return slot


def check(slots: DeviceSlots) -> None:
    """Every expert that is there lies where the table says, in a slot and with bytes of its own."""
    slots.publish()
    keys = list(slots.keys())
    assert len(keys) == len(set(keys)) <= len(slots)
    addresses = []
    for layer, row in enumerate(slots.table.tolist()):
        for expert, address in enumerate(row):
            slot = slots.find((layer, expert))
            assert address == (0 if slot is None else slot.address)
            if slot is not None:
                assert slot.key == (layer, expert) and slot.key in keys
                assert bool((slot.memory == 1 + layer * EXPERTS + expert).all())
                addresses.append(address)
    assert len(addresses) == len(set(addresses)) == len(keys)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    keys = st.tuples(st.sampled_from(["fill", "pass"]), st.integers(0, 1), st.integers(0, 4))
    sizes = st.tuples(st.just("resize"), st.integers(1, 5), st.just(0))
    return draw(st.lists(keys | sizes, min_size=1, max_size=60))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_what_is_there_lies_where_the_table_says(program: Sequence[tuple[str, int, int]]) -> None:
    """Any order of uses and sizes; with room, what is used last is there."""
    slots = slots_for(6, per_chunk=2)
    for what, first, second in program:
        if what == "resize":
            slots.resize(first * 2 * RECORD)
            assert slots.size_bytes == first * 2 * RECORD
        else:
            assert fill(slots, (first, second), passing=what == "pass") is not None
            assert slots.find((first, second)) is not None
        check(slots)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=60))
def test_the_least_recently_used_gives_way(keys: Sequence[Key]) -> None:
    """Oracle: a list in the order of use."""
    slots, order = slots_for(4), list[Key]()
    for key in keys:
        fill(slots, key)
        if key in order:
            order.remove(key)
        order = [*order, key][-4:]
        assert list(slots.keys()) == order


def test_what_passes_through_goes_first() -> None:
    """Oracle: the rule. A pass that is read once leaves alone what had settled."""
    slots = slots_for(3)
    for expert in range(2):
        fill(slots, (0, expert))
    for expert in range(5):
        fill(slots, (1, expert), passing=True)
    assert list(slots.keys()) == [(1, 4), (0, 0), (0, 1)]
    fill(slots, (1, 4))  # asked for again, it settles
    assert list(slots.keys()) == [(0, 0), (0, 1), (1, 4)]


def test_more_experts_than_slots_in_turn_hit_as_often_as_they_can() -> None:
    """Oracle: what plain LRU gives on five experts in turn through four slots, which is nothing."""
    slots, hits = slots_for(4), 0
    slots.demand = EXPERTS
    for _ in range(10):
        for expert in range(EXPERTS):
            hits += slots.find((0, expert)) is not None
            fill(slots, (0, expert))
    assert hits == 10 * 3 - 3


def test_what_is_held_stays() -> None:
    """Oracle: the rule; without a slot to give away there is None."""
    slots = slots_for(2)
    held = [fill(slots, (0, expert)) for expert in range(2)]
    for slot in held:
        assert slot is not None
        slot.held = True
    assert slots.claim((1, 0)) is None
    assert held[0] is not None
    held[0].held = False
    taken = slots.claim((1, 0))
    assert taken is held[0] and slots.find((0, 0)) is None


def test_shrinking_keeps_what_was_used_last_and_moves_it() -> None:
    """Oracle: the bytes, the order of use; what is kept lies in another chunk than before."""
    slots = slots_for(8, per_chunk=2)
    for expert in range(5):
        fill(slots, (0, expert))
    for expert in range(3):
        fill(slots, (1, expert))
    table = slots.table
    before = {key: slot.address for key in slots.keys() if (slot := slots.find(key))}
    slots.resize(4 * RECORD + RECORD // 2)
    assert slots.size_bytes == 4 * RECORD
    assert set(slots.keys()) == {(0, 4), (1, 0), (1, 1), (1, 2)}
    assert slots.table is table
    check(slots)
    after = {key: slot.address for key in slots.keys() if (slot := slots.find(key))}
    assert set(after.values()) <= set(before.values())
    slots.resize(8 * RECORD)
    check(slots)
    assert {key: slot.address for key in slots.keys() if (slot := slots.find(key))} == after


def test_a_budget_without_a_chunk_is_refused() -> None:
    """Oracle: the error, with value and limit; what was there stays."""
    slots = slots_for(4, per_chunk=2)
    fill(slots, (0, 0))
    with pytest.raises(BudgetTooSmall) as raised:
        slots.resize(2 * RECORD - 1)
    assert raised.value.value == 2 * RECORD - 1 and len(slots) == 4
    check(slots)


def test_a_row_of_addresses_knows_its_slots_only() -> None:
    """Oracle: the addresses of the tensors."""
    slots = slots_for(3)
    two = [slot for expert in (1, 3) if (slot := fill(slots, (0, expert)))]
    fill(slots, (0, 2))
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    expected[1], expected[3] = two[0].memory.data_ptr(), two[1].memory.data_ptr()
    assert torch.equal(slots.addresses(two), expected)

# SPDX-License-Identifier: Apache-2.0
"""The slots of one form by themselves. Oracles: an ordered dictionary; what may never go."""

from collections import OrderedDict
from concurrent.futures import Future

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.experts.slots import Key, Slot, SlotPool
from freetoken_runtime.specs.moe import ExpertSpec

FORM = ExpertForm.of(ExpertSpec(4), 4, None, torch.float32, 32)


def pool_of(count: int, demand: int = 0) -> SlotPool:
    pool = SlotPool(FORM)
    pool.demand = demand
    pool.resize(count)
    return pool


def use(pool: SlotPool, key: Key) -> bool:
    """Ask for an expert and bring it in; whether it was there."""
    if pool.ask(key) is not None:
        return True
    slot = pool.claim(key)
    assert slot is not None and slot.key == key
    return False


@settings(deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 8), max_size=60))
def test_where_a_pass_fits_the_least_recently_used_goes(count: int, asked: list[int]) -> None:
    """Oracle: an OrderedDict of that many entries."""
    pool = pool_of(count, demand=count)
    model: OrderedDict[int, None] = OrderedDict()
    evictions = 0
    for expert in asked:
        assert use(pool, (0, expert)) == (expert in model)
        model[expert] = None
        model.move_to_end(expert)
        if len(model) > count:
            model.popitem(last=False)
            evictions += 1
        there = {slot.key for slot in pool.slots()}
        assert there == {(0, e) for e in model}
        assert pool.evictions == evictions and len(pool) == count


def test_where_a_pass_does_not_fit_some_stay() -> None:
    """Oracle: arithmetic. Twelve experts in turn through nine slots: LRU would never hit; eight
    stay and the rest pass through the ninth, so that eight of twelve hit."""
    pool = pool_of(9, demand=12)
    rounds = [[use(pool, (0, e)) for e in range(12)] for _ in range(5)]
    assert not any(rounds[0])
    assert all(sum(hits) == 8 for hits in rounds[1:])


def test_what_is_asked_for_more_often_settles() -> None:
    """Oracle: the frequencies. An expert that each pass wants displaces one that came once."""
    pool = pool_of(4, demand=9)
    for expert in (0, 1, 2, 3):
        use(pool, (0, expert))
    hits = []
    for turn in range(12):
        hits.append(use(pool, (1, 7)))
        for other in range(3):
            use(pool, (2, 3 * turn + other))
    assert not hits[0] and all(hits[4:]), hits


@settings(deadline=None)
@given(st.data())
def test_what_is_held_or_being_filled_never_goes(data: st.DataObject) -> None:
    """Oracle: the list of what may not. Claims, crowded or not, passing or not, take others or
    nothing at all; and a slot has one expert, an expert one slot."""
    pool = pool_of(data.draw(st.integers(1, 5)), demand=data.draw(st.sampled_from([0, 99])))
    filling: dict[Key, Future[None]] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        key = (0, data.draw(st.integers(0, 9)))
        protected = [slot for slot in pool.slots() if not slot.evictable]
        kept = {slot.key: slot for slot in protected}
        slot = pool.ask(key)
        if slot is None:
            slot = pool.claim(key, passing=data.draw(st.booleans()))
            assert slot is not None or len(protected) == len(pool)
        assert all(pool.find(k) is s for k, s in kept.items() if k is not None)
        keys = [s.key for s in pool.slots()]
        assert len(keys) == len(set(keys)) <= len(pool)
        if slot is None:
            continue
        slot.held = data.draw(st.booleans())
        begins, ends = data.draw(st.booleans()), data.draw(st.booleans())
        if slot.filling is None and begins:
            slot.filling = filling[key] = Future()
        if filling and ends:
            filling.pop(next(iter(filling))).set_result(None)
        if data.draw(st.booleans()):
            for other in pool.slots():
                other.held = False


def test_a_slot_that_could_not_be_filled_is_free_again() -> None:
    """Oracle: the state after a failure: no expert, and room for the next."""
    pool = pool_of(1)
    slot = pool.claim((0, 1))
    assert slot is not None
    slot.filling = Future()
    slot.filling.set_exception(OSError("gone"))
    assert pool.ask((0, 1)) is None and list(pool.slots()) == []
    assert pool.claim((0, 2)) is slot
    slot.filling = Future()
    assert slot.filling.cancel()
    assert pool.find((0, 2)) is None and pool.claim((0, 2)) is slot


def test_sizes_change_while_experts_stay() -> None:
    """Oracle: the experts used last. Fewer slots keep them; more keep all; one that is being filled
    stays until it is done."""
    pool = pool_of(4, demand=4)
    for expert in (0, 1, 2, 3, 0):
        use(pool, (0, expert))
    pool.resize(2)
    assert {slot.key for slot in pool.slots()} == {(0, 3), (0, 0)}
    pool.resize(3)
    assert len(pool) == 3 and use(pool, (0, 3)) and use(pool, (0, 0))
    for slot in pool.slots():
        slot.filling = Future()
    pool.resize(1)
    assert len(pool) == 2
    for slot in list(pool.slots()):
        assert slot.filling is not None
        slot.filling.set_result(None)
    pool.resize(1)
    assert len(pool) == 1


def test_what_is_asked_for_most_stays_where_a_pass_will_not_fit() -> None:
    """Oracle: the counts of askings. Experts 0 and 5 were asked for more often than the others,
    though not last; two slots are fewer than the five that a pass wants."""
    pool = pool_of(6, demand=5)
    for expert in (0, 5, 0, 5, 0, 5, 1, 2, 3, 4):
        use(pool, (0, expert))
    pool.resize(4)
    assert {slot.key for slot in pool.slots()} == {(0, 0), (0, 5), (0, 3), (0, 4)}
    pool.resize(2)
    assert {slot.key for slot in pool.slots()} == {(0, 0), (0, 5)}
    assert pool.evictions == 4 and len(pool) == 2


def test_guesses_leave_room_where_a_pass_does_not_fit() -> None:
    """Oracle: the slots. What is free or has not settled can be had, but for `limit` of them; where
    a pass fits, so many of the least recently used as well."""
    pool = pool_of(4, demand=4)
    for expert in range(4):
        use(pool, (0, expert))
    assert pool.claim_guess((1, 0), 1) is not None
    assert pool.find((0, 0)) is None and pool.passing == 1
    for slot in pool.slots():
        slot.held = slot.key == (1, 0)
    assert pool.claim_guess((1, 1), 1) is None
    assert pool.claim_guess((1, 1), 2) is not None and pool.find((0, 1)) is None
    crowded = pool_of(4, demand=9)
    use(crowded, (0, 0))
    assert crowded.claim_guess((1, 0), 3) is None and crowded.evictions == 0
    assert crowded.claim_guess((1, 0), 2) is not None


def test_memory_is_a_slot_s_own() -> None:
    """Oracle: pages. Slots begin on page boundaries and are as large as is said."""
    pool = pool_of(3)
    slots: list[Slot] = list(pool._free)
    addresses = [pool.form.tensors(slot.memory)["gate up.weight"].data_ptr() for slot in slots]
    assert len(set(addresses)) == 3 and all(address % 4096 == 0 for address in addresses)
    assert all(len(slot.memory) == pool.slot_bytes for slot in slots)

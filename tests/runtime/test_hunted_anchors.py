# SPDX-License-Identifier: Apache-2.0
"""Anchors that are damaged, refused, asked for twice, or short of memory. Oracles: GOLD, positions
counted by hand, and what the garbage collector still finds."""

import gc
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_runtime.state.anchors import Rank
from freetoken_runtime.state.digest import anchor_digest, as_ids, chain, digest_at
from freetoken_storage import Database, MemoryDatabase, keys
from freetoken_storage.errors import StoreFull
from freetoken_storage.records import Snapshot
from freetoken_storage.snapshot_rows import load_record

CheckedMaker = Callable[..., CheckedEngine]
KINDS = ["gated_delta", "hybrid"]
pytestmark = pytest.mark.parametrize("kind", KINDS)


def name_of(engine: Engine, ids: list[int], position: int) -> bytes:
    """The digest of the anchor at a position."""
    path = as_ids(ids)
    names = chain(engine.fingerprint.digest, path)
    return anchor_digest(digest_at(names, path, position))


def flip(database: Database, digest: bytes) -> None:
    """Change the last byte of a snapshot's first chunk."""
    assert database._states is not None
    with database._states.write() as txn:
        stored = load_record(txn, digest)
        assert stored is not None
        key = keys.chunk(stored.blob, 0)
        value = txn.get(key)
        assert value is not None
        altered = bytearray(value)
        altered[-1] ^= 1
        txn.put(key, bytes(altered))


def ask(engine: CheckedEngine, ids: list[int]) -> int:
    """P, after GOLD; a difference from the plan has a name."""
    stream = engine.engine.generate(ids, SamplingParams(max_tokens=1))
    assert len(list(stream)) == 1
    usage = stream.usage
    assert usage.reused_tokens + usage.prefill_tokens == len(ids)
    assert (usage.changed is None) == (stream.plan.reused_tokens == usage.reused_tokens)
    assert close_to(engine.engine.logits(ids), engine.cold(ids, 1).logits)
    return usage.prefill_tokens


def test_a_damaged_anchor_costs_the_way_to_the_one_before(
    checked: CheckedMaker, tmp_path: Path
) -> None:
    """The blocks are healthy and so is the anchor before: nothing else is forwarded, and the
    damaged one is stored anew."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        engine = checked(database.snapshots)
        engine.warm(ids, [333])
        engine.restart()
        flip(database, name_of(engine.engine, ids, 600))
        flip(database, name_of(engine.engine, ids, 333))
        edited = [*ids[:620], 3 if ids[620] != 3 else 4]
        assert engine.engine.plan(edited).reused_tokens == 600
        assert ask(engine, edited) == 621 - 550
        assert ask(engine, [*ids[:340], 3 if ids[340] != 3 else 4]) == 341 - 300
        engine.engine.warm(ids[:630])
        engine.restart()
        assert engine.engine.plan(edited).prefill_tokens == 0
        engine.close()


def test_a_damaged_block_costs_the_way_to_the_anchor_before(
    checked: CheckedMaker, tmp_path: Path
) -> None:
    """The anchors are healthy, a block in the middle is not: the last anchor before it serves."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        engine = checked(database.snapshots)
        engine.warm(ids)
        engine.restart()
        flip(database, chain(engine.engine.fingerprint.digest, as_ids(ids))[7])  # 384 .. 448
        assert ask(engine, [*ids, 5]) == 641 - 350
        engine.restart()
        assert engine.engine.plan([*ids, 5]).prefill_tokens == 0
        engine.close()


@pytest.mark.parametrize("buffers", ["none", "short", "row"])
def test_a_record_without_a_state_is_no_anchor(checked: CheckedMaker, buffers: str) -> None:
    """Under an anchor's name there is something with a right checksum and no whole state: it never
    matches twice, GOLD, and the state is stored in its place."""
    ids = ids_of(1, 200)
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        engine.warm(ids, [170])
        name = name_of(engine.engine, ids, 170)
        engine.engine.flush()
        with database.snapshots.reader() as reader:
            info = reader.info(name)
        assert info is not None
        hidden = engine.model.spec.hidden_size
        parts = {"none": {}, "short": {"row": bytes(4)}, "row": {"row": bytes(4 * hidden)}}
        database.snapshots.remove([name])
        database.snapshots.put([Snapshot(name, info.parent, parts[buffers], info.meta)])
        engine.ledger.disk.clear()
        engine.restart()
        assert ask(engine, [*ids[:180], 3 if ids[180] != 3 else 4]) == 181 - 150
        engine.engine.warm(ids[:170])
        engine.engine.flush()
        engine.restart()
        with database.snapshots.reader() as reader:
            assert (found := reader.info(name)) is not None and found.sizes == info.sizes
        assert ask(engine, [*ids[:170], 9]) == 1
        engine.close()


def test_naming_an_anchor_again_makes_it_last(checked: CheckedMaker) -> None:
    """A position that was an interior or a named anchor becomes a lasting one when it is named so,
    without a forwarded row, and after a restart, too."""
    system, ids = ids_of(1, 100), ids_of(1, 100) + ids_of(2, 33)
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        engine.warm(ids, [77])
        for seed in (3, 4):  # from RAM, from disk
            path = [*system, *ids_of(seed, 10)]
            stream = engine.engine.generate(
                path, SamplingParams(max_tokens=1), lasting=[100], anchors=[50]
            )
            list(stream)
            assert stream.usage.prefill_tokens == 10
            ranks = [
                resident.sequence.anchors[100].rank
                for resident in engine.engine._index
                if 100 in resident.sequence.anchors
            ]
            assert Rank.LASTING in ranks
            engine.restart()
        engine.close()


def test_a_lasting_anchor_lasts_in_a_longer_path(checked: CheckedMaker) -> None:
    """Two requests pass a position at once, one names it as lasting and ends first: what remains of
    both is lasting."""
    engine = checked()
    ids = ids_of(1, 1200)
    longer = engine.engine.generate(ids, SamplingParams(max_tokens=1))
    shorter = engine.engine.generate(ids[:130], SamplingParams(max_tokens=1), lasting=[100])
    list(shorter)
    list(longer)
    (resident,) = engine.engine._index
    assert resident.sequence.length == 1200
    assert resident.sequence.anchors[100].rank is Rank.LASTING
    assert resident.sequence.anchors[150].rank is Rank.INTERIOR


def test_an_anchor_that_gave_way_gives_its_memory(checked: CheckedMaker) -> None:
    """Anchors go when memory is short: nothing holds their buffers any longer."""
    engine = checked(prefill_chunk=1024, anchor_interval=50)
    ids = ids_of(1, 1000)
    engine.warm(ids)
    (resident,) = engine.engine._index
    watched = {
        position: ref(tensor)
        for position, anchor in resident.sequence.anchors.items()
        for buffers in anchor.fixed
        for tensor in buffers[:1]
    }
    assert len(watched) == 20
    stats = engine.engine.stats()
    anchors = 4 * (sum(s.bytes_per_anchor() for s in engine.model.spec.states()) + 240)
    states = 1024 * engine.model.spec.bytes_per_token() + anchors
    engine.engine.set_budget(ram_bytes=stats.weights_bytes + stats.working_bytes + states)
    engine.engine.set_budget(ram_bytes=1 << 30)
    kept = {position for r in engine.engine._index for position in r.sequence.anchors}
    assert 1 <= len(kept) <= 4
    gc.collect()
    alive = {position for position, tensor in watched.items() if tensor() is not None}
    assert alive <= kept


def test_more_anchors_than_a_path_of_rows_may_have(checked: CheckedMaker) -> None:
    """While memory is left the interval holds, however many anchors that makes."""
    engine = checked(prefill_chunk=512, anchor_interval=3)
    ids = ids_of(1, 2400)
    engine.engine.warm(ids)
    for edit in (100, 700, 1300, 2000):
        plan = engine.engine.plan([*ids[:edit], 3 if ids[edit] != 3 else 4])
        assert edit - plan.reused_tokens < 3


def test_room_for_a_new_path_costs_the_oldest_path_first(checked: CheckedMaker) -> None:
    """Memory is full of an old path: its anchors, and then itself, go before those of others."""
    engine = checked(prefill_chunk=256, anchor_interval=200)
    old, newer = ids_of(1, 1500), ids_of(2, 1000)
    engine.warm(old)
    engine.warm(newer, list(range(80, 1000, 80)))  # has more anchors than the old path
    spec, stats = engine.model.spec, engine.engine.stats()
    added = 960 * spec.bytes_per_token() - 3 * sum(x.bytes_per_anchor() for x in spec.states())
    limit = stats.weights_bytes + stats.working_bytes + stats.state_bytes + added
    engine.engine.set_budget(ram_bytes=limit)
    anchors = list(engine.engine.anchors(newer))
    engine.engine.warm(ids_of(3, 900))
    assert len(engine.engine.anchors(old)) < 8
    assert list(engine.engine.anchors(newer)) == anchors and len(anchors) == 15


def test_the_anchor_a_path_begins_at_is_spared(checked: CheckedMaker) -> None:
    """Room is made for the rest of a path by thinning the very path that it begins in: the anchor
    in its middle stays until it is taken up."""
    engine = checked(prefill_chunk=256)
    ids = ids_of(1, 1000)
    engine.warm(ids)
    spec, stats = engine.model.spec, engine.engine.stats()
    added = 960 * spec.bytes_per_token() - 10 * sum(x.bytes_per_anchor() for x in spec.states())
    limit = stats.weights_bytes + stats.working_bytes + stats.state_bytes + added
    engine.engine.set_budget(ram_bytes=limit)
    path = [*ids[:451], *ids_of(2, 900)]
    assert engine.engine.plan(path).reused_tokens == 450
    assert ask(engine, path) == 901


def test_what_lies_before_a_forgotten_token_can_still_be_restored(checked: CheckedMaker) -> None:
    """An anchor before the point, in the same block: it is there afterwards, in RAM and after a
    restart, and nothing beyond it is."""
    ids = ids_of(1, 300)
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        engine.warm(ids, [205])
        engine.engine.flush()
        assert engine.engine.forget(ids, 210) > 0
        assert engine.engine.plan([*ids[:205], 7]).reused_tokens == 205
        engine.restart()
        assert engine.engine.plan([*ids[:205], 7]).reused_tokens == 205
        assert list(engine.engine.anchors(ids)) == [50, 100, 150, 200, 205]
        for position in (250, 300):
            assert not database.snapshots.contains(name_of(engine.engine, ids, position))
        assert ask(engine, ids) == 95
        engine.close()


class FullStore:
    """A store that has no room for anchors while `full`; blocks still fit."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.full = True

    def put(self, snapshots: list[Snapshot]) -> None:
        if self.full and any("row" in snapshot.buffers for snapshot in snapshots):
            raise StoreFull("the disk is full", value="injected")
        self._inner.put(snapshots)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_anchors_that_found_no_room_are_written_later(checked: CheckedMaker) -> None:
    """The blocks were written and the anchors were not: generation goes on, the report says it, and
    the next flush writes them, also those that another path has taken over."""
    ids = ids_of(1, 300)
    with MemoryDatabase() as database:
        store = FullStore(database.snapshots)
        engine = checked(store)
        engine.warm(ids)
        with pytest.raises(StoreFull):
            engine.engine.flush()
        store.full = False
        engine.engine.flush()
        store.full = True
        engine.warm([*ids[:222]])  # becomes a part of the longer path
        with pytest.raises(StoreFull):
            engine.engine.flush()
        store.full = False
        engine.engine.flush()
        engine.close()
        other = checked(database.snapshots)
        assert list(other.engine.anchors(ids)) == [50, 100, 150, 200, 222, 250, 300]
        other.close()


def test_a_budget_too_small_for_one_anchor(checked: CheckedMaker) -> None:
    """Ends and what is asked stay; nothing crashes, GOLD."""
    engine = checked()
    stats = engine.engine.stats()
    states = 192 * engine.model.spec.bytes_per_token()
    engine.engine.set_budget(ram_bytes=stats.weights_bytes + stats.working_bytes + states)
    ids = ids_of(1, 120)
    cold = engine.cold([*ids, 4], 1).logits
    for _ in range(3):
        assert close_to(engine.engine.logits([*ids, 4]), cold)
        list(engine.engine.generate(ids, SamplingParams(max_tokens=5)))
    assert torch.isfinite(cold).all()


def test_many_short_paths_stay_within_the_budget(checked: CheckedMaker) -> None:
    """Paths of 20 tokens, whose anchors are larger than their rows: after each, what is held is
    within the budget, and the newest is whole."""
    engine = checked()
    anchor_bytes = sum(state.bytes_per_anchor() for state in engine.model.spec.states())
    stats = engine.engine.stats()
    room = 10 * (anchor_bytes + 64 * engine.model.spec.bytes_per_token())
    limit = stats.weights_bytes + stats.working_bytes + room
    engine.engine.set_budget(ram_bytes=limit)
    for seed in range(30):
        ids = ids_of(seed, 20)
        list(engine.engine.generate(ids, SamplingParams(max_tokens=3), anchors=[7, 12]))
        stats = engine.engine.stats()
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        assert used <= limit, (seed, used - limit, anchor_bytes)
        assert engine.engine.plan(ids).prefill_tokens == 0
    assert 3 <= stats.resident_paths <= 10

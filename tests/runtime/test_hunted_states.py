# SPDX-License-Identifier: Apache-2.0
"""Stored states that are damaged, refused, or taken away under the engine's feet."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.reports import Usage
from freetoken_runtime.state.digest import anchor_digest
from freetoken_storage import Database, MemoryDatabase, keys
from freetoken_storage.errors import StoreFull, StoreReadOnly
from freetoken_storage.records import Snapshot
from freetoken_storage.snapshot_rows import load_record

EngineMaker = Callable[..., Engine]


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(count)]


def names_of(engine: Engine, ids: list[int]) -> tuple[bytes, ...]:
    disk = engine._lookup.disk
    assert disk is not None
    return disk.boundaries(np.array(ids, dtype="<i4"))


def flip(database: Database, digest: bytes, what: str) -> None:
    """Change the last byte of a snapshot's record or first chunk."""
    assert database._states is not None
    with database._states.write() as txn:
        key = keys.record(digest)
        if what == "chunk":
            stored = load_record(txn, digest)
            assert stored is not None
            key = keys.chunk(stored.blob, 0)
        value = txn.get(key)
        assert value is not None
        altered = bytearray(value)
        altered[-1] ^= 1
        txn.put(key, bytes(altered))


def ask(engine: Engine, ids: list[int]) -> Usage:
    stream = engine.generate(ids, SamplingParams(max_tokens=1))
    assert len(list(stream)) == 1
    usage = stream.usage
    assert usage.reused_tokens + usage.prefill_tokens == len(ids)
    assert (usage.changed is None) == (stream.plan.reused_tokens == usage.reused_tokens)
    warm, cold = engine.logits(ids), engine.logits(ids, reuse=False)
    assert float((warm - cold).abs().max()) <= 1e-4 * float(cold.max() - cold.min())
    return usage


@pytest.mark.parametrize("what", ["record", "chunk"])
@pytest.mark.parametrize("block", [1, 5, 10])
def test_a_damaged_block_is_named_and_written_anew(
    make_engine: EngineMaker, tmp_path: Path, what: str, block: int
) -> None:
    """Oracle: GOLD, a reason that says "damaged", and after the path was forwarded once more the
    store holds all of it again."""
    ids = ids_of(1, 640)
    longer = ids + ids_of(2, 30)
    with Database(tmp_path / "store") as database:
        first = make_engine(database.snapshots)
        first.warm(ids)
        first.close()
        flip(database, names_of_closed(first, ids)[block], what)
        second = make_engine(database.snapshots)
        plan = second.plan(longer)
        usage = ask(second, longer)
        assert usage.reused_tokens <= (block - 1) * 64
        reasons = [usage.changed or "", plan.miss.cause if plan.miss else ""]
        assert any("damaged" in reason for reason in reasons), reasons
        second.close()
        third = make_engine(database.snapshots)
        assert third.plan(longer).prefill_tokens == 0
        assert ask(third, longer).reused_tokens == len(longer)
        third.close()


def names_of_closed(engine: Engine, ids: list[int]) -> tuple[bytes, ...]:
    """The boundaries of a path, from the fingerprint alone."""
    from freetoken_runtime.state.digest import as_ids, chain

    return chain(engine.fingerprint.digest, as_ids(ids))


@pytest.mark.parametrize("what", ["record", "chunk"])
def test_a_damaged_row_is_written_anew(make_engine: EngineMaker, tmp_path: Path, what: str) -> None:
    """The hidden row of an anchor: P = 1 once, then 0 again."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        first = make_engine(database.snapshots)
        first.warm(ids)
        first.close()
        flip(database, anchor_digest(names_of_closed(first, ids)[10]), what)
        for prefilled in (1, 0):
            engine = make_engine(database.snapshots)
            usage = engine.warm(ids)
            assert usage.prefill_tokens == prefilled
            if usage.changed is not None:
                assert "damaged" in usage.changed
            engine.close()


def test_what_another_process_evicted_is_not_called_damaged(make_engine: EngineMaker) -> None:
    """A block that goes between the look-up and the restore: a loss with the right name, GOLD,
    and the path is stored as a whole again."""
    ids = ids_of(1, 640)
    with MemoryDatabase() as database:
        first = make_engine(database.snapshots)
        first.warm(ids)
        first.close()
        engine = make_engine(database.snapshots)
        disk = engine._lookup.disk
        assert disk is not None
        restore, gone = disk.restore, names_of(engine, ids)[5]

        def late(*arguments: Any) -> Any:
            database.snapshots.remove([gone])
            return restore(*arguments)

        disk.restore = late  # type: ignore[method-assign, assignment]
        stream = engine.generate([*ids, 7], SamplingParams(max_tokens=1))
        list(stream)
        assert stream.usage.reused_tokens == 256
        assert stream.usage.changed == "384 tokens were lost: evicted"
        disk.restore = restore  # type: ignore[method-assign]
        engine.close()
        again = make_engine(database.snapshots)
        assert again.plan([*ids, 7]).prefill_tokens == 0
        again.close()


def test_damage_in_a_store_that_cannot_be_written_is_met_once(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    """A damaged block stays in a read-only store; after the first surprise plans leave it out."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        first = make_engine(database.snapshots)
        first.warm(ids)
        first.close()
        flip(database, names_of_closed(first, ids)[5], "chunk")
    with Database(tmp_path / "store", read_only=True) as database:
        engine = make_engine(database.snapshots, ram_budget_bytes=1 << 30)
        assert ask(engine, [*ids, 7]).changed == "384 tokens were lost: damaged"
        engine._owner.call(engine._keeper.clear)  # RAM forgets
        usage = ask(engine, [*ids, 8])
        assert (usage.reused_tokens, usage.changed) == (256, None)
        engine.close()


def test_rows_that_could_not_be_written_are_tried_again(make_engine: EngineMaker) -> None:
    """Blocks fit, the anchor's row did not: the next flush writes it, so that P is 0."""
    ids = ids_of(1, 100)
    with MemoryDatabase() as database:
        engine = make_engine(database.snapshots)
        put = database.snapshots.put

        def full(snapshots: Sequence[Snapshot]) -> None:
            if any("row" in snapshot.buffers for snapshot in snapshots):
                raise StoreFull("no room for a row")
            put(snapshots)

        database.snapshots.put = full  # type: ignore[method-assign]
        engine.warm(ids)
        with pytest.raises(StoreFull):
            engine.flush()
        database.snapshots.put = put  # type: ignore[method-assign]
        engine.flush()
        engine.close()
        again = make_engine(database.snapshots)
        assert again.plan(ids).prefill_tokens == 0
        again.close()


def test_pins_that_the_store_refuses_are_reported_by_flush(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    """Pinning protects what is in RAM in any case; the caller's edit does not fail for it."""
    with Database(tmp_path / "store"):
        pass
    with Database(tmp_path / "store", read_only=True) as database:
        engine = make_engine(database.snapshots)
        engine.warm([4, 5, 6])
        with pytest.raises(StoreReadOnly):
            engine.flush()
        engine.pin("session", [[4, 5, 6]])
        assert engine.stats().store_error is not None
        with pytest.raises(StoreReadOnly):
            engine.flush()
        engine.close()


def test_forgetting_covers_every_model_and_damaged_records(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    """Ids that are forgotten must be in no record of the store: those that another quantisation
    of the model wrote, and those whose record is damaged, included. Oracle: the bytes of the
    files after compaction."""
    ids = ids_of(1, 200)
    canary = np.array(ids[100:110], dtype="<i4").tobytes()

    def found() -> bool:
        return any(canary in file.read_bytes() for file in (tmp_path / "store").rglob("data.mdb"))

    with Database(tmp_path / "store") as database:
        other = make_engine(database.snapshots, quant="int8")
        other.warm(ids)
        other.close()
        engine = make_engine(database.snapshots)
        engine.warm(ids)
        engine.flush()
        flip(database, names_of(engine, ids)[2], "record")
        assert found()
        engine._owner.call(engine._keeper.clear)  # RAM forgets, the damage is met on disk
        assert engine.forget(ids, 70) > 0
        assert database.compact()
        assert not found()
        engine.close()
        again = make_engine(database.snapshots, quant="int8")
        assert again.plan(ids).reused_tokens == 64  # the block before the point stays
        again.close()


def test_forks_make_room_for_what_they_copy(make_engine: EngineMaker) -> None:
    """A fork with four spans copies the shortest two when it grows: room is made before. Oracle:
    what is counted at each allocation of a prompt's rows never exceeds the budget."""
    engine = make_engine()
    fixed = engine.stats().weights_bytes + engine.stats().working_bytes
    engine.set_budget(ram_bytes=fixed + 1800 * engine._budget.plan.token_bytes)
    limit = engine._budget.plan.states_bytes
    pool, peaks = engine._pool, [0]
    allocate = pool.allocate

    def counted(rows: int, origin: int = 0) -> Any:
        buffer = allocate(rows, origin)
        peaks.append(engine._budget.states_bytes)
        return buffer

    pool.allocate = counted  # type: ignore[method-assign]
    path: list[int] = []
    for seed in range(8):
        path = path[:-10] + ids_of(seed, 200)
        engine.warm(path)
    assert len(path) == 1530
    assert max(peaks) <= limit, (max(peaks) - limit) // engine._budget.plan.token_bytes
    assert engine.stats().state_bytes <= limit


def test_rows_of_anchors_are_counted_once(make_engine: EngineMaker) -> None:
    """Forks share the hidden rows of their common anchors. Oracle: distinct tensors held."""
    engine = make_engine()
    stem = ids_of(1, 300)
    engine.warm(stem, anchors=list(range(1, 301)))
    for seed in range(2, 6):
        engine.warm(stem + ids_of(seed, 5))
    held = {
        id(anchor): anchor.size_bytes
        for resident in engine._index
        for anchor in resident.sequence.anchors.values()
    }
    assert len(engine._index) == 4
    assert engine._budget.anchors.used_bytes == sum(held.values()) == (300 + 4) * 60 * 4

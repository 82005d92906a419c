# SPDX-License-Identifier: Apache-2.0
"""Purged ids leave no state behind, on every kind of state. Oracles: the names of all states of a
path, looked up in the store one by one, and GOLD."""

from collections.abc import Callable

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_runtime.state.digest import anchor_digest, as_ids, chain, digest_at
from freetoken_storage import MemoryDatabase

CheckedMaker = Callable[..., CheckedEngine]


def names_after(engine: Engine, ids: list[int], start: int) -> list[bytes]:
    """Names of every state of the path after `start`, block, short block or anchor."""
    path = as_ids(ids)
    names = chain(engine.fingerprint.digest, path)
    states = [digest_at(names, path, p) for p in range(start + 1, len(ids) + 1)]
    return [*states, *(anchor_digest(state) for state in states)]


def test_forgetting_leaves_nothing_at_or_after_the_point(checked: CheckedMaker) -> None:
    """RAM and disk lose every path through the point; what lies before it stays; GOLD after."""
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        ids = ids_of(1, 300)
        other = ids[:100] + ids_of(2, 80)
        for path in (ids, other, ids[:210] + ids_of(3, 60)):
            engine.generate(path, 3)
        engine.engine.flush()
        assert engine.engine.forget(ids, 200) > 0
        assert engine.engine.plan(ids).reused_tokens == 200
        engine.restart()
        assert engine.engine.plan(ids).reused_tokens == 200
        assert engine.engine.plan(other).prefill_tokens == 0
        for digest in names_after(engine.engine, ids, 200):
            assert not database.snapshots.contains(digest)
        assert close_to(engine.engine.logits(ids), engine.cold(ids, 1).logits)
        assert engine.engine.forget(other, 0) > 0
        assert engine.engine.plan(other).reused_tokens == 0
        assert engine.engine.forget(other, 0) == 0
        engine.close()


def test_forgetting_what_only_the_store_holds(checked: CheckedMaker) -> None:
    """Nothing is in RAM: an anchor before the point, in the same block, can still be restored, also
    where the block of its own had given way to a longer one; nothing beyond is left."""
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        ids = ids_of(1, 300)
        engine.warm(ids[:205])
        engine.engine.flush()
        engine.warm(ids)
        engine.restart()
        assert engine.engine.forget(ids, 210) > 0
        kept = 210 if engine.sliceable else 205
        assert engine.engine.plan(ids).reused_tokens == kept
        for digest in names_after(engine.engine, ids, 210):
            assert not database.snapshots.contains(digest)
        assert close_to(engine.engine.logits(ids), engine.cold(ids, 1).logits)
        engine.restart()
        assert engine.engine.plan(ids).prefill_tokens == 0
        engine.close()


def test_forgetting_under_a_running_generation(checked: CheckedMaker) -> None:
    """A path that is being grown loses its tail when it ends, and is never written."""
    with MemoryDatabase() as database:
        engine = checked(database.snapshots).engine
        ids = ids_of(1, 150)
        stream = engine.generate(ids, SamplingParams(max_tokens=3000))
        output = [next(stream).id for _ in range(3)]
        engine.forget(ids, 100)
        stream.cancel()
        output += [token.id for token in stream]
        engine.flush()
        assert engine.plan(ids).reused_tokens <= 100
        for digest in names_after(engine, ids + output, 100):
            assert not database.snapshots.contains(digest)
        engine.close()

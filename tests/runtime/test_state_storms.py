# SPDX-License-Identifier: Apache-2.0
"""Everything at once on a hybrid: edits, forks of running paths, cancels, purges, budgets, pins and
stores that come and go, from several threads. Oracles: counts that add up, budgets that hold when
nobody runs, and GOLD for every path in the end."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_runtime.errors import BudgetTooSmall
from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import StoreFull
from freetoken_storage.records import Snapshots

CheckedMaker = Callable[..., CheckedEngine]
pytestmark = pytest.mark.parametrize("kind", ["hybrid", "mamba2"])


class Storm:
    """Threads that ask, and a thread that disturbs; the first error ends it."""

    def __init__(
        self, engine: Engine, stores: Sequence[Snapshots], seed: int, room_bytes: int
    ) -> None:
        self.engine = engine
        self._stores = stores
        self.heads = [ids_of(seed + i, 260) for i in range(4)]
        self.running = True
        self.errors: list[BaseException] = []
        self._seed = seed
        self._room_bytes = room_bytes

    def run(self, rounds: int) -> None:
        askers = [
            threading.Thread(target=self._guard, args=(self._ask, index, rounds))
            for index in range(4)
        ]
        disturber = threading.Thread(target=self._guard, args=(self._disturb, 9, rounds))
        for thread in (*askers, disturber):
            thread.start()
        for thread in askers:
            thread.join()
        self.running = False
        disturber.join()
        if self.errors:
            raise self.errors[0]

    def _guard(self, work: Callable[[random.Random, int, int], None], index: int, n: int) -> None:
        try:
            work(random.Random(self._seed * 31 + index), index, n)
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self.errors.append(error)

    def _ask(self, rng: random.Random, index: int, rounds: int) -> None:
        for _ in range(rounds):
            head = self.heads[rng.choice([index, index, rng.randrange(4)])]
            cut = rng.randrange(1, len(head))
            path = (head[:cut] + ids_of(rng.randrange(1 << 30), rng.choice([1, 63, 150])))[:480]
            named = sorted({rng.randrange(1, len(path) + 1) for _ in range(3)})
            stream = self.engine.generate(
                path,
                SamplingParams(max_tokens=rng.choice([1, 5, 60])),
                anchors=named,
                lasting=named[:1],
                anchor_after=set(ids_of(rng.randrange(1 << 30), 20)),
            )
            output = []
            leave_after = rng.choice([1, 3, 1000])
            for token in stream:
                output.append(token.id)
                if len(output) == leave_after:
                    stream.cancel()
            usage = stream.usage
            assert usage.unforwarded_tokens == 0
            assert usage.reused_tokens + usage.prefill_tokens == len(path)
            self.heads[index] = (path + output)[:500]

    def _disturb(self, rng: random.Random, _: int, __: int) -> None:
        stats = self.engine.stats()
        least = stats.weights_bytes + stats.working_bytes
        while self.running and not self.errors:
            head = rng.choice(self.heads)
            what = rng.randrange(8)
            if what == 0:
                self.engine.forget(head, rng.randrange(len(head)))
            elif what == 1:
                room = rng.choice([self._room_bytes, 2 * self._room_bytes])
                self.engine.set_budget(ram_bytes=least + room)
            elif what == 2:
                self.engine.pin("a", [head[:100]] if rng.random() < 0.5 else [])
            elif what == 3:
                self.engine.detach()
                self.engine.attach(rng.choice(self._stores))
            elif what == 4:
                with suppress(StoreFull):
                    self.engine.flush()
            elif what == 5:
                positions = list(self.engine.anchors(head))
                assert positions == sorted(set(positions)) and positions[-1:] <= [len(head)]
            else:
                plan = self.engine.plan(head)
                assert plan.reused_tokens + plan.prefill_tokens == len(head)


def storm(checked: CheckedMaker, folder: Path, seed: int, rounds: int) -> None:
    engine = checked(prefill_chunk=48, anchor_interval=40, max_batch=3)
    room = 2600 * engine.model.spec.bytes_per_token()
    room += 60 * sum(state.bytes_per_anchor() for state in engine.model.spec.states())
    with (
        MemoryDatabase() as roomy,
        Database(folder / "store", disk_budget_bytes=8 << 20) as tight,
    ):
        weather = Storm(engine.engine, [roomy.snapshots, tight.snapshots], seed, room)
        weather.run(rounds)
        check_calm(engine, weather)
        engine.close()


def check_calm(engine: CheckedEngine, weather: Storm) -> None:
    """Nothing runs, the budget holds, and what is kept of every path is right."""
    engine.engine.set_budget(ram_bytes=engine.engine.stats().ram_budget_bytes)
    stats = engine.engine.stats()
    used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
    assert used <= stats.ram_budget_bytes and stats.running == stats.waiting == 0
    for head in weather.heads:
        cold = engine.cold(head, 1).logits
        assert close_to(engine.engine.logits(head), cold)
        for position in list(engine.engine.anchors(head))[:-1][-3:]:
            path = [*head[:position], 7]
            assert close_to(engine.engine.logits(path), engine.cold(path, 1).logits), position


def test_a_storm(checked: CheckedMaker, tmp_path: Path) -> None:
    """One seed."""
    storm(checked, tmp_path, 1, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_longer_storm(checked: CheckedMaker, tmp_path: Path, seed: int) -> None:
    """Many seeds, many rounds."""
    storm(checked, tmp_path, seed, 60)


def test_two_engines_on_one_store(checked: CheckedMaker, tmp_path: Path) -> None:
    """One evicts, purges and writes while the other plans and restores: a loss has a name, every
    answer is GOLD, and what one computed the other finds."""
    with Database(tmp_path / "store") as database:
        first, second = checked(database.snapshots), checked(database.snapshots)
        ids = ids_of(1, 400)
        first.engine.warm(ids, anchors=[333])
        first.engine.flush()
        assert second.engine.plan([*ids, 4]).prefill_tokens == 1
        announced = second.engine.plan([*ids[:340], 4])
        assert announced.reused_tokens == 333
        assert first.engine.forget(ids, 320) > 0
        stream = second.engine.generate(
            [*ids[:340], 4], SamplingParams(max_tokens=2), announced=announced
        )
        assert len(list(stream)) == 2
        assert stream.usage.reused_tokens == 300
        assert "lost" in str(stream.usage.changed)
        for engine in (first, second):
            path = [*ids[:340], 4]
            assert close_to(engine.engine.logits(path), engine.cold(path, 1).logits)
        second.engine.warm(ids)
        second.engine.flush()
        assert first.engine.plan([*ids, 9]).prefill_tokens == 1
        assert close_to(first.engine.logits([*ids, 9]), first.cold([*ids, 9], 1).logits)
        first.close()
        second.close()


def test_a_fork_of_a_running_path(checked: CheckedMaker) -> None:
    """A request begins in the middle of a path that is being prefilled, and one at the end of one
    that decodes: both share what is there and are GOLD."""
    engine = checked()
    ids = ids_of(1, 700)
    forks: list[int] = []

    def fork(done: int, _: int) -> None:
        if done == 320:
            forks.append(engine.engine.plan([*ids[:310], 5]).reused_tokens)

    list(engine.engine.generate(ids, SamplingParams(max_tokens=1), on_progress=fork))
    assert forks == [300]
    stream = engine.engine.generate(ids, SamplingParams(max_tokens=2000))
    output = [next(stream).id for _ in range(5)]
    path = [*ids, *output[:4], 7, 7]
    other = engine.engine.generate(path, SamplingParams(max_tokens=3))
    assert len(list(other)) == 3
    assert other.usage.reused_tokens in (700, 704)  # anchors only, or where it stands just then
    stream.close()
    assert close_to(engine.engine.logits(path), engine.cold(path, 1).logits)


def test_eviction_between_plan_and_start(checked: CheckedMaker) -> None:
    """What was announced is gone when the request starts: usage names it, GOLD."""
    engine = checked()
    ids = ids_of(1, 300)
    engine.engine.warm(ids)
    announced = engine.engine.plan([*ids, 4])
    stats = engine.engine.stats()
    least = stats.weights_bytes + stats.working_bytes + 64 * engine.model.spec.bytes_per_token()
    engine.engine.set_budget(ram_bytes=least)
    with pytest.raises(BudgetTooSmall):
        engine.engine.warm(ids)
    engine.engine.set_budget(ram_bytes=1 << 30)
    stream = engine.engine.generate([*ids, 4], SamplingParams(max_tokens=1), announced=announced)
    list(stream)
    assert (stream.plan.reused_tokens, stream.usage.reused_tokens) == (300, 0)
    assert stream.usage.changed == "300 tokens were lost: evicted"
    assert close_to(engine.engine.logits([*ids, 4]), engine.cold([*ids, 4], 1).logits)


def test_a_store_that_comes_late_and_leaves(checked: CheckedMaker) -> None:
    """Attached after the anchors were taken, detached, another attached: each holds all of them."""
    engine = checked()
    ids = ids_of(1, 300)
    engine.engine.warm(ids, anchors=[77])
    with MemoryDatabase() as first, MemoryDatabase() as second:
        for database in (first, second):
            engine.engine.attach(database.snapshots)
            engine.engine.warm([*ids, *ids_of(2, 5)])
            engine.engine.detach()
            other = checked(database.snapshots)
            assert list(other.engine.anchors(ids)) == [50, 77, 100, 150, 200, 250, 300]
            path = [*ids[:80], 9]
            assert path != ids[:81] and other.engine.plan(path).reused_tokens == 77
            assert close_to(other.engine.logits(path), other.cold(path, 1).logits)
            other.close()
        engine.close()

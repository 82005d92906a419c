# SPDX-License-Identifier: Apache-2.0
"""Memory that moves between expert slots and states. Oracles: an engine with all weights in memory;
arithmetic on what an engine reports; the machine of `freetoken_runtime.engine_programs`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.balance import MissPrice
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.engine_cases import ids_of
from freetoken_runtime.engine_programs import DatabasePrograms, run_programs
from freetoken_runtime.errors import BudgetTooSmall
from freetoken_runtime.reports import EngineStats, Moves
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import LoadedModel, load
from freetoken_storage import MemoryDatabase

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EngineConfig(threads=1, prefill_chunk=64, anchor_interval=40, ram_budget_bytes=1 << 30)
Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 experts of which a row takes 2 in each of 4 layers; 640 bytes of rows per token."""
    folder = tmp_path_factory.mktemp("mixtral")
    build_checkpoint(folder, "mixtral")
    return folder


@pytest.fixture
def engines(mixture: Path) -> Iterator[Engines]:
    """`engines(**fields)`: experts on disk, free slots and fresh rows NaN."""
    made: list[Engine] = []

    def make(**fields: Any) -> Engine:
        config = resolve(replace(CONFIG, **{"offload": "disk", **fields}), read_host())
        made.append(Engine(load(mixture, offload=config.offload or "none"), config, poison=True))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def slot_bytes(stats: EngineStats) -> int:
    return stats.experts.slot_bytes // stats.experts.slots


def fixed_bytes(stats: EngineStats) -> int:
    """What is neither slots nor states."""
    return stats.weights_bytes - stats.experts.slot_bytes + stats.working_bytes


def with_room_for(engine: Engine, slots: int, tokens: int) -> int:
    """Set a budget for so many slots and tokens of rows together; returns it."""
    stats = engine.stats()
    room = slots * slot_bytes(stats) + tokens * engine._budget.plan.token_bytes
    engine.set_budget(ram_bytes=fixed_bytes(stats) + room)
    return fixed_bytes(stats) + room


def adds_up(engine: Engine) -> EngineStats:
    """Every byte of the budget is somebody's, the store has the slots that are counted, and nobody
    holds more than is theirs."""
    stats, plan = engine.stats(), engine._budget.plan
    parts = (plan.weights_bytes, plan.working_bytes, plan.slots_bytes, plan.states_bytes)
    assert sum(parts) == stats.ram_budget_bytes
    assert stats.experts.slots == sum(plan.slots)
    assert stats.experts.slot_bytes == plan.slots_bytes
    assert 0 <= stats.state_bytes <= stats.state_limit_bytes == plan.states_bytes
    return stats


def output(engine: Engine, ids: list[int], count: int = 8) -> list[int]:
    return [token.id for token in engine.generate(ids, SamplingParams(max_tokens=count))]


def test_a_path_that_runs_takes_slots_and_gives_them_back(engines: Engines) -> None:
    """A path longer than the planned part for states: slots go as far as it needs, to a row's two
    at most, and come back when it is forgotten. Its tokens are those of an engine in memory."""
    ids = ids_of(1, 2500)
    expected = output(engines(offload="none"), ids, 20)
    engine = engines()
    with_room_for(engine, 24, 3000)
    before = adds_up(engine)
    assert before.state_limit_bytes < 2500 * 640
    assert output(engine, ids, 20) == expected
    during = adds_up(engine)
    assert 2 <= during.experts.slots < before.experts.slots
    assert during.moves.count >= 1 and during.moves.size_bytes > 0
    assert during.moves.last is not None
    engine.forget(ids, 0)
    grown_until(engine, before.experts.slots)
    after = adds_up(engine)
    assert after.moves.last is not None and after.moves.last.startswith("slots took")


def grown_until(engine: Engine, slots: int) -> None:
    """Let work go on until there are so many slots: they wait a while after they gave way."""
    for number in range(60):
        output(engine, ids_of(number % 3, 20), 30)
        if engine.stats().experts.slots >= slots:
            return
    raise AssertionError(engine.stats())


def test_slots_take_no_more_than_is_free(engines: Engines) -> None:
    """States fill what was planned for them, and experts are missed: nobody gives, and nobody holds
    more than is theirs at any time."""
    engine = engines()
    with_room_for(engine, 24, 3300)
    planned = engine.stats()
    engine.warm(ids_of(1, planned.state_limit_bytes // 640 - 350))
    for number in range(12):
        output(engine, ids_of(2 + number % 2, 20), 30)
        assert adds_up(engine).experts.slots == planned.experts.slots
    assert engine.stats().experts.misses > planned.experts.misses + 10


def test_slots_that_were_asked_for_stay(engines: Engines) -> None:
    """`expert_slots=12`: not one is lent, whatever is needed; the path that does not fit beside
    them is refused."""
    engine = engines(expert_slots=12)
    with_room_for(engine, 12, 600)
    output(engine, ids_of(1, 400), 30)
    with pytest.raises(BudgetTooSmall):
        engine.warm(ids_of(2, 1500))
    stats = adds_up(engine)
    assert stats.experts.slots == 12 and stats.moves == Moves()


def test_a_budget_that_does_not_hold_what_is_pinned_is_refused(engines: Engines) -> None:
    """BudgetTooSmall names what is needed and changes nothing; exactly that much is accepted, and
    holds the pinned path."""
    engine = engines()
    pinned, idle = ids_of(1, 1000), ids_of(2, 1000)
    engine.warm(pinned)
    engine.warm(idle)
    engine.pin("me", [pinned])
    before = engine.stats()
    low = fixed_bytes(before) + 2 * slot_bytes(before) + 900 * 640
    with pytest.raises(BudgetTooSmall, match="running and pinned paths") as caught:
        engine.set_budget(ram_bytes=low)
    assert engine.stats() == before
    assert engine.plan(idle).prefill_tokens == 0
    needed = int(str(caught.value.limit).split()[2])
    with pytest.raises(BudgetTooSmall):
        engine.set_budget(ram_bytes=needed - 1)
    assert engine.stats() == before
    engine.set_budget(ram_bytes=needed)
    stats = adds_up(engine)
    assert stats.experts.slots == 2
    assert engine.plan(pinned).prefill_tokens == 0
    assert engine.plan(idle).reused_tokens == 0


def test_a_budget_that_does_not_hold_what_runs_is_refused(engines: Engines) -> None:
    """While a generation goes on: refused, and its tokens go on as they would have."""
    ids = ids_of(1, 800)
    expected = output(engines(offload="none"), ids, 60)
    engine = engines()
    stats = engine.stats()
    stream = engine.generate(ids, SamplingParams(max_tokens=60))
    tokens = [next(stream).id]
    with pytest.raises(BudgetTooSmall, match="change it when less runs"):
        engine.set_budget(ram_bytes=fixed_bytes(stats) + 2 * slot_bytes(stats) + 700 * 640)
    assert engine.stats().ram_budget_bytes == 1 << 30
    assert tokens + [token.id for token in stream] == expected


def test_what_fits_into_the_planned_part_is_never_lost(engines: Engines) -> None:
    """Slots that grew into room that nobody used give it back to the last path that was planned
    for, without one being evicted."""
    engine = engines()
    with_room_for(engine, 24, 3300)
    home = engine.stats()
    grown_until(engine, home.experts.slots + 1)
    grown = adds_up(engine)
    assert grown.state_limit_bytes < home.state_limit_bytes
    rows = (home.state_limit_bytes - grown.state_bytes) // 640
    paths = [ids_of(seed, rows // 2 - 70) for seed in (10, 11)]
    for path in paths:
        engine.warm(path)
    assert all(engine.plan(path).prefill_tokens == 0 for path in paths)
    stats = adds_up(engine)
    assert stats.evicted_paths == 0 and stats.state_bytes > grown.state_limit_bytes


@settings(deadline=None, max_examples=8)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["grow", "fork", "budget", "decode", "forget", "pin"]),
            st.integers(0, 3),
            st.integers(0, 1000),
        ),
        min_size=4,
        max_size=10,
    )
)
def test_m28_expert_and_kv_budgets_add_up_while_they_move(
    steps: list[tuple[str, int, int]], moving: tuple[LoadedModel, LoadedModel]
) -> None:
    """After each of any steps the parts add up to the budget and hold what they count. Tokens are
    those of an engine in memory, and what is pinned is there."""
    disk, memory = moving
    config = resolve(CONFIG, read_host())
    paths = {number: ids_of(number, 200) for number in range(4)}
    pinned: list[int] | None = None
    with Engine(disk, config, poison=True) as engine, Engine(memory, config) as whole:
        engine.attach(MemoryDatabase().snapshots)
        for step, number, amount in steps:
            path = paths[number]
            try:
                if step == "budget":
                    with_room_for(engine, 2 + amount % 40, 400 + 3 * amount)
                elif step == "decode":
                    assert output(engine, path, 24) == output(whole, path, 24)
                elif step == "forget":
                    half = len(path) // 2  # forgetting takes every path that begins like this one
                    if pinned is None or pinned[: half + 1] != path[: half + 1]:
                        engine.forget(path, half)
                elif step == "pin":
                    engine.warm(path)
                    engine.pin("me", [path])
                    pinned = path
                elif step == "fork":
                    paths[(number + 1) % 4] = [*path[: 1 + amount % len(path)], 9, 9]
                else:
                    paths[number] = [*path, *ids_of(amount, 1 + amount % 300)][-1200:]
                    engine.warm(paths[number])
            except BudgetTooSmall:
                pass
            adds_up(engine)
            if pinned is not None:
                assert engine.plan(pinned).prefill_tokens == 0


@pytest.fixture(scope="module")
def moving(mixture: Path) -> tuple[LoadedModel, LoadedModel]:
    return load(mixture, offload="disk"), load(mixture)


def test_programs_with_slots_that_move(tmp_path: Path) -> None:
    """Random edits, forks, rewinds, evictions, restarts, concurrent generations and budgets on a
    hybrid whose slots are many or few; GOLD, the ledger and the runner's rows."""
    build_checkpoint(tmp_path, "qwen3_next")
    run_programs(DatabasePrograms, load(tmp_path, offload="disk"), CONFIG, 4, 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "granitemoehybrid"])
def test_programs_with_slots_that_move_long(tmp_path: Path, family: str) -> None:
    """The same, 60 programs of 30 steps for each family."""
    build_checkpoint(tmp_path, family)
    run_programs(DatabasePrograms, load(tmp_path, offload="disk"), CONFIG, 60, 30)


def test_the_price_of_a_miss_follows_what_was_waited_for() -> None:
    """Oracle: arithmetic. A prior at first, then seconds per byte; a change is taken up."""
    price = MissPrice(1000.0)
    assert price.s_per_byte == pytest.approx(1e-9)
    assert price.look(10_000, 10.0) == 10_000
    assert price.s_per_byte == pytest.approx(1e-6, rel=0.01)
    price.look(20_000, 110.0)
    assert price.s_per_byte == pytest.approx(1e-5, rel=0.05)
    assert price.look(20_000, 110.0) == 0
    assert price.s_per_byte == pytest.approx(1e-5, rel=0.05)


def test_logits_do_not_depend_on_where_memory_is(engines: Engines) -> None:
    """Bit for bit those of an engine in memory, at every budget on the way down and up."""
    ids = ids_of(5, 300)
    expected = engines(offload="none").logits(ids, reuse=False)
    engine = engines()
    for slots in (48, 20, 6, 2, 12, 48):
        with_room_for(engine, slots, 2500)
        adds_up(engine)
        assert torch.equal(engine.logits(ids, reuse=False), expected)

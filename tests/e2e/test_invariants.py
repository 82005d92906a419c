# SPDX-License-Identifier: Apache-2.0
"""What must hold through all layers on real states: sharing, fingerprints, damage, no waiting."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken_agent import LocalModel, Store
from freetoken_agent.events import PrefillProgress
from freetoken_agent.proving.proofs import Gold
from freetoken_runtime import Engine, EngineConfig

INT8 = EngineConfig(quant="int8", threads=1)


@pytest.fixture
def int8_gold(tiny_folder: Path) -> Iterator[Gold]:
    with Engine.load(tiny_folder, INT8) as engine:
        yield Gold(engine)


def words(seed: int, count: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"{chance.randrange(10000):04}" for _ in range(count))


async def test_c02_a_turn_after_a_two_token_reply(tiny: LocalModel, tiny_gold: Gold) -> None:
    """Oracle: counting. 3,000 ids of prompt and a forced "OK" are reused but for the last sampled
    id; P = new + 1; GOLD."""
    with Store(":memory:") as store:
        session = store.create("s", tiny, system=words(1, 580))
        session.append("user", "Answer OK.")
        encode = tiny.tokenizer.encode_frame
        first = await session.reply(force=encode("OK<|im_end|>"), max_tokens=3)
        assert first.text == "OK" and first.usage.input_tokens > 2900
        before = len(session.ids())
        session.append("user", "And now?")
        plan = session.plan()
        reply = await session.reply(max_tokens=4)
        assert reply.usage.prefill_tokens == plan.prefill_tokens == plan.input_tokens - before
        tiny_gold.check(tiny.engine, session.ids(), num_tokens=16)


async def test_two_sessions_share_a_prefix(tiny: LocalModel, tiny_gold: Gold) -> None:
    """Oracle: counting: the second session forwards what differs, and its bytes are not doubled.
    Invariant 4."""
    system = words(2, 300)
    with Store(":memory:") as store:
        first = store.create("a", tiny, system=system)
        first.append("user", "One?")
        await first.reply(max_tokens=2)
        one = tiny.stats().state_bytes
        second = store.create("b", tiny, system=system)
        second.append("user", "Two?")
        plan = second.plan()
        shared = len(first.ids()) - sum(s.num_tokens for s in first.path()[1:])
        reply = await second.reply(max_tokens=2)
        assert reply.usage.prefill_tokens == plan.prefill_tokens < 60 < shared
        assert tiny.stats().state_bytes < 1.2 * one
        tiny_gold.check(tiny.engine, first.ids(), num_tokens=16)
        tiny_gold.check(tiny.engine, second.ids(), num_tokens=16)


async def test_another_quantisation_reuses_nothing_and_spoils_nothing(
    tiny: LocalModel, tiny_folder: Path, tiny_gold: Gold, int8_gold: Gold, tmp_path: Path
) -> None:
    """Oracles: cold prefills of either form; the states of the first are there afterwards.
    Invariant 5, rule 12."""
    with Store(tmp_path) as store:
        session = store.create("s", tiny, system=words(3, 60))
        session.append("user", "Hi")
        await session.reply(max_tokens=4)
        await session.warm()
        await store.flush()
        ids = session.ids()
    with LocalModel.load(tiny_folder, config=INT8) as model, Store(tmp_path) as store:
        session = store.open("s", model)
        assert session.binding.state == "cold"
        assert session.ids() == ids
        plan = model.plan(ids)
        assert (plan.source, plan.reused_tokens) == ("none", 0)
        assert plan.miss is not None and plan.miss.cause == "fingerprint:quantisation"
        int8_gold.check(model.engine, ids, num_tokens=16)
    with LocalModel.load(tiny_folder, config=EngineConfig(threads=1)) as model:
        with Store(tmp_path) as store:
            session = store.open("s", model)
            assert session.binding.state == "bound"
            plan = model.plan(ids)
            assert (plan.source, plan.prefill_tokens) == ("disk", 0)
            tiny_gold.check(model.engine, ids, num_tokens=16)


async def test_flipped_bytes_of_states_never_compute(
    tiny: LocalModel, tiny_folder: Path, tiny_gold: Gold, tmp_path: Path
) -> None:
    """Oracle: cold prefills after each flip. A damaged state is a miss, the session is whole.
    Invariant 7."""
    with Store(tmp_path) as store:
        session = store.create("s", tiny, system=words(4, 150))
        session.append("user", "Hi")
        await session.reply(max_tokens=4)
        await store.flush()
        ids = session.ids()
    [file] = (tmp_path / "states").glob("data*")
    whole, missed = file.read_bytes(), 0
    chance = random.Random(5)
    for _ in range(12):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[chance.randrange(8192, len(whole))] ^= 0x40
        file.write_bytes(damaged)
        with LocalModel.load(tiny_folder, config=EngineConfig(threads=1)) as model:
            with Store(tmp_path) as store:
                session = store.open("s", model)
                assert session.ids() == ids
                plan, usage = model.plan(ids), model.warm(ids)
                missed += usage.prefill_tokens > 1
                same = usage.prefill_tokens == plan.prefill_tokens
                assert same or usage.changed is not None, "a plan failed without a reason"
                tiny_gold.check(model.engine, ids, num_tokens=8)
    assert missed, "no flip hit a state: the test proves nothing"


async def test_rule11_plan_path_and_stats_never_wait_for_a_forward_pass(tiny: LocalModel) -> None:
    """Oracle: the engine's own thread, which is held inside a prefill meanwhile."""
    asked, answered = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        asked.set()
        assert answered.wait(20), "a reader waited for the engine's thread"

    with Store(":memory:") as store:
        session = store.create("s", tiny, system=words(6, 200))
        session.append("user", "Hi")
        other = session.fork(name="other")
        ids = session.ids()

        def read() -> None:
            asked.wait(20)
            assert session.path() and other.path()
            assert session.plan().input_tokens > len(ids)
            tiny.anchors(ids)
            tiny.stats()
            other.append("user", "an edit")
            answered.set()

        reader = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.to_thread(_generate_holding, tiny, ids, hold)
        await reader


def _generate_holding(model: LocalModel, ids: list[int], hold: object) -> None:
    from freetoken_agent.model import SamplingOptions

    stream = model.generate(ids, SamplingOptions(max_tokens=1), on_progress=hold)  # type: ignore[arg-type]
    assert len(list(stream)) == 1


async def test_prefill_progress_reaches_the_reader(tiny: LocalModel) -> None:
    """Oracle: the plan: progress grows to exactly its prefill."""
    with Store(":memory:") as store:
        session = store.create("s", tiny, system=words(7, 300))
        session.append("user", "Hi")
        plan = session.plan()
        events = [event async for event in session.generate(max_tokens=2)]
        progress = [event for event in events if isinstance(event, PrefillProgress)]
        done = [event.done_tokens for event in progress]
        assert done == sorted(set(done)) and len(done) > 1
        assert done[-1] == plan.prefill_tokens == progress[-1].total_tokens


FORGETFUL = """
import sys
from freetoken_agent import LocalModel, Store
from freetoken_runtime import EngineConfig

model = LocalModel.load(sys.argv[1], config=EngineConfig(threads=2))
store = Store(":memory:")
session = store.create("s", model)
session.append("user", "Hi")
session.generate_sync(max_tokens=3)
"""


def test_a_script_that_forgets_to_close_ends_well(tiny_folder: Path) -> None:
    """Oracle: the exit status and an empty stderr."""
    command = [sys.executable, "-c", FORGETFUL, str(tiny_folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # a team of threads that must end, too
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (child.returncode, child.stderr) == (0, "")

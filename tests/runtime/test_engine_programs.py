# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, forks, rewinds, evictions, restarts and concurrent generations.

Oracles: a cold prefill of the same ids (GOLD) for every logit; for reuse, a list of the paths that
were forwarded and the positions whose row was kept; for the counts, the runner's rows.
"""

import os
import random
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import LoadedModel, load
from freetoken_storage import Database, MemoryDatabase

VOCAB = 211
CONFIG = EngineConfig(threads=1, prefill_chunk=48, ram_budget_bytes=1 << 30)
MODELS: dict[str, LoadedModel] = {}


def tiny_model() -> LoadedModel:
    """One model for every program of the process."""
    if "llama" not in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            build_checkpoint(Path(folder), "llama")
            MODELS["llama"] = load(folder)
    return MODELS["llama"]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    return len(os.path.commonprefix([a, b]))


class Ledger:
    """What an engine knows, as plain tuples: forwarded paths and the ends whose row was kept."""

    def __init__(self) -> None:
        self.ram: set[tuple[int, ...]] = set()
        self.disk: set[tuple[int, ...]] = set()
        self.ram_rows: set[tuple[int, ...]] = set()
        self.disk_rows: set[tuple[int, ...]] = set()

    def reused(self, ids: tuple[int, ...]) -> int:
        best = max((common(path, ids) for path in self.ram | self.disk), default=0)
        whole = best == len(ids) and ids in self.ram_rows | self.disk_rows
        return best if whole else min(best, len(ids) - 1)

    def forwarded(self, path: tuple[int, ...], ends: set[int]) -> None:
        self.ram.add(path)
        self.ram_rows |= {path[:end] for end in ends}

    def written(self) -> None:
        """Everything in RAM is on disk too."""
        self.disk |= self.ram
        self.disk_rows |= self.ram_rows

    def lost_ram(self) -> None:
        self.ram, self.ram_rows = set(), set()


class Programs(RuleBasedStateMachine):
    """Heads are token paths; every rule is something a session does to one."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.ledger = Ledger()
        self.heads: list[tuple[int, ...]] = []
        self.open_store()
        self.open_engine()

    def open_store(self) -> None:
        self.database: Any = MemoryDatabase()

    def reopen_store(self) -> None:
        """What a new process would do."""

    def open_engine(self) -> None:
        config = resolve(CONFIG, read_host())
        self.engine = Engine(tiny_model(), config, poison=True)
        self.engine.attach(self.database.snapshots)

    def teardown(self) -> None:
        self.engine.close()
        self.database.close()
        self.stack.close()

    # -- oracles

    def check_gold(self, ids: tuple[int, ...]) -> None:
        """The same logits as a cold prefill, and P as predicted."""
        predicted = self.ledger.reused(ids)
        assert self.engine.plan(ids).reused_tokens == predicted
        warm = self.engine.logits(ids)
        self.ledger.forwarded(ids, {len(ids)})
        cold = self.engine.logits(ids, reuse=False)
        span = float(cold.max() - cold.min())
        assert torch.isfinite(warm).all()
        assert float((warm - cold).abs().max()) <= 1e-4 * span

    def generate(self, ids: tuple[int, ...], count: int, anchors: set[int]) -> tuple[int, ...]:
        """Generate alone: plan = ledger = usage = rows the runner forwarded."""
        expected = self.ledger.reused(ids)
        plan = self.engine.plan(ids)
        assert plan.reused_tokens == expected
        assert plan.reused_tokens + plan.prefill_tokens == plan.input_tokens == len(ids)
        assert (plan.miss is None) == (plan.prefill_tokens == 0)
        before = self.engine.stats().forward_rows
        stream = self.engine.generate(ids, SamplingParams(max_tokens=count), anchors=list(anchors))
        output = tuple(token.id for token in stream)
        usage = stream.usage
        assert usage.changed is None
        assert (usage.reused_tokens, usage.prefill_tokens) == (expected, len(ids) - expected)
        forwarded = self.engine.stats().forward_rows - before
        assert forwarded == usage.prefill_tokens + count - 1
        path = ids + output[:-1]
        kept = {end for end in anchors if end > expected}
        self.ledger.forwarded(path, kept | {len(ids), len(path)})
        for end in kept:
            assert self.engine.plan(ids[:end]).prefill_tokens == 0
        return output

    # -- rules

    @initialize(data=st.data())
    def first_head(self, data: st.DataObject) -> None:
        self.heads = [self.ids(data, 1, 150)]

    def ids(self, data: st.DataObject, low: int, high: int) -> tuple[int, ...]:
        rng = random.Random(data.draw(st.integers(0, 2**32)))
        count = data.draw(st.integers(low, high) | st.sampled_from([1, 63, 64, 65]))
        return tuple(rng.randrange(3, VOCAB) for _ in range(count))

    def head(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.heads) - 1))

    @rule(data=st.data(), count=st.integers(1, 5))
    def append_and_generate(self, data: st.DataObject, count: int) -> None:
        index = self.head(data)
        ids = self.heads[index] + self.ids(data, 1, 70)
        anchors = {data.draw(st.integers(1, len(ids)))}
        self.heads[index] = ids + self.generate(ids, count, anchors)

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        """Replace, delete or insert in the middle, then ask."""
        index = self.head(data)
        ids = self.heads[index]
        start = data.draw(st.integers(0, len(ids) - 1))
        stop = data.draw(st.integers(start, min(len(ids), start + 40)))
        fresh = self.ids(data, 1, 20) if data.draw(st.booleans()) else ()
        edited = ids[:start] + fresh + ids[stop:]
        if edited:
            self.heads[index] = edited + self.generate(edited, 2, set())

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        ids = self.heads[self.head(data)]
        if len(self.heads) < 5:
            self.heads.append(ids[: data.draw(st.integers(1, len(ids)))])

    @rule(data=st.data())
    def rewind_and_ask(self, data: st.DataObject) -> None:
        index = self.head(data)
        ids = self.heads[index]
        self.heads[index] = ids[: data.draw(st.integers(1, len(ids)))]
        self.check_gold(self.heads[index])

    @rule(data=st.data())
    def warm(self, data: st.DataObject) -> None:
        ids = self.heads[self.head(data)]
        expected = self.ledger.reused(ids)
        usage = self.engine.warm(ids)
        assert (usage.reused_tokens, usage.prefill_tokens) == (expected, len(ids) - expected)
        self.ledger.forwarded(ids, {len(ids)})
        assert self.engine.plan(ids).prefill_tokens == 0

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Leave after one token; what was forwarded is known, whatever it was. How much that is
        depends on the clock, so the head stays where it was."""
        ids = self.heads[self.head(data)]
        stream = self.engine.generate(ids, SamplingParams(max_tokens=30))
        output = [next(stream).id]
        stream.cancel()
        output += [token.id for token in stream]
        assert stream.finish_reason in ("cancelled", "length")
        assert stream.usage.output_tokens == len(output)
        rows = self.engine.plan(ids + tuple(output)).reused_tokens
        assert rows in (len(ids) + len(output) - 1, len(ids) + len(output))
        path = (ids + tuple(output))[:rows]
        self.ledger.forwarded(path, {len(ids), len(path)})

    @rule()
    def evict(self) -> None:
        stats = self.engine.stats()
        least = stats.weights_bytes + stats.working_bytes + (64 * 4 * 2 * 2 * 10 * 4)
        self.engine.set_budget(ram_bytes=least)
        assert self.engine.stats().state_bytes <= 64 * 4 * 2 * 2 * 10 * 4
        self.engine.set_budget(ram_bytes=1 << 30)
        if self.engine.stats().resident_paths == 0:
            self.ledger.written()
            self.ledger.lost_ram()
        else:  # a short path fits into the smallest budget
            self.engine.flush()
            self.ledger.written()

    @rule()
    def flush(self) -> None:
        self.engine.flush()
        self.ledger.written()

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.ledger.written()
        self.ledger.lost_ram()
        self.reopen_store()
        self.open_engine()

    @rule(data=st.data(), count=st.integers(2, 4))
    def concurrently(self, data: st.DataObject, count: int) -> None:
        """Several heads at once, from several threads: each ends where it would alone."""
        paths = [self.heads[self.head(data)] + self.ids(data, 1, 70) for _ in range(count)]
        before = self.engine.stats().forward_rows
        outputs: dict[int, tuple[int, ...]] = {}
        prefilled: dict[int, int] = {}

        def run(index: int) -> None:
            stream = self.engine.generate(paths[index], SamplingParams(max_tokens=4))
            outputs[index] = tuple(token.id for token in stream)
            usage = stream.usage
            assert usage.reused_tokens + usage.prefill_tokens == len(paths[index])
            prefilled[index] = usage.prefill_tokens

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(prefilled) == count
        rows = self.engine.stats().forward_rows - before
        assert rows == sum(prefilled.values()) + 3 * count
        for index, ids in enumerate(paths):
            path = ids + outputs[index][:-1]
            self.ledger.forwarded(path, {len(ids), len(path)})
        for index, ids in enumerate(paths):
            cold = self.engine.logits(ids, reuse=False)
            top = torch.topk(cold, 2).values
            span = float(cold.max() - cold.min())
            if float(top[0] - top[1]) > 2e-4 * span:
                assert int(cold.argmax()) == outputs[index][0]

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.check_gold(self.heads[self.head(data)])


class DatabasePrograms(Programs):
    """The same programs over a real store, reopened at every restart."""

    def open_store(self) -> None:
        self.path = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        self.database = Database(self.path)

    def reopen_store(self) -> None:
        self.database.close()
        self.database = Database(self.path)


def run_programs(machine: type[Programs], examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=checks,
        ),
    )


def test_programs_in_memory(one_thread: None) -> None:
    """GOLD, plans and counts over an in-memory store."""
    run_programs(Programs, 25, 12)


def test_programs_on_disk(one_thread: None) -> None:
    """GOLD, plans and counts over LMDB."""
    run_programs(DatabasePrograms, 15, 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Programs, DatabasePrograms])
def test_programs_long(machine: type[Programs], one_thread: None) -> None:
    """The same, 300 programs of 30 steps."""
    run_programs(machine, 150, 30)

# SPDX-License-Identifier: Apache-2.0
"""For tests: random programs of edits, forks, rewinds, evictions, restarts and concurrent
generations on an engine.

Oracles: a cold prefill of the same ids (GOLD) for every logit; for reuse, a list of the paths that
were forwarded and the positions that were kept; for the counts, the runner's rows.
"""

import math
import os
import random
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from freetoken_storage import Database, MemoryDatabase

from .config import EngineConfig, read_host, resolve
from .engine import Engine
from .sampler import SamplingParams
from .weights import LoadedModel

Ids = tuple[int, ...]
MIN_MARGIN = 3e-6  # of a router's logits or scores


def common(a: Ids, b: Ids) -> int:
    """Length of the common prefix."""
    return len(os.path.commonprefix([a, b]))


class Ledger:
    """What an engine knows, as plain tuples: forwarded paths and the ends that were kept, whose
    hidden row and overwritten buffers are there. `sliceable`: any prefix of a path can be restored;
    otherwise only what was kept can, and `interval` tells what is kept without being named."""

    def __init__(self, sliceable: bool, interval: int) -> None:
        self._interval = None if sliceable else interval
        self.ram: set[Ids] = set()
        self.disk: set[Ids] = set()
        self.ram_kept: set[Ids] = set()
        self.disk_kept: set[Ids] = set()

    def reused(self, ids: Ids) -> int:
        """Tokens of the path that are not forwarded."""
        kept = self.ram_kept | self.disk_kept
        if ids in kept:
            return len(ids)
        if self._interval is not None:
            return max((len(p) for p in kept if p == ids[: len(p)]), default=0)
        return min(max((common(p, ids) for p in self.ram | self.disk), default=0), len(ids) - 1)

    def forwarded(self, path: Ids, ends: set[int], start: int) -> None:
        """The path was forwarded from `start` on; these ends were kept."""
        if self._interval is not None:
            first = start - start % self._interval + self._interval
            ends = ends | set(range(first, len(path) + 1, self._interval))
        self.ram.add(path)
        self.ram_kept |= {path[:end] for end in ends}

    def written(self) -> None:
        """Everything in RAM is on disk too."""
        self.disk |= self.ram
        self.disk_kept |= self.ram_kept

    def lost_ram(self) -> None:
        self.ram, self.ram_kept = set(), set()


class Programs(RuleBasedStateMachine):
    """Heads are token paths; every rule is something a session does to one.
    `run_programs` says on which model."""

    model: LoadedModel
    config: EngineConfig
    sliceable: bool
    gold: "Gold"

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.ledger = Ledger(self.sliceable, self.config.anchor_interval)
        self.heads: list[Ids] = []
        self.gold.examples += 1
        self.open_store()
        self.open_engine()

    def open_store(self) -> None:
        self.database: Any = MemoryDatabase()

    def reopen_store(self) -> None:
        """What a new process would do."""

    def open_engine(self) -> None:
        self.engine = Engine(self.model, resolve(self.config, read_host()), poison=True)
        self.engine.attach(self.database.snapshots)

    def teardown(self) -> None:
        self.engine.close()
        self.database.close()
        self.stack.close()

    @property
    def moves(self) -> bool:
        """Whether memory moves between states and slots of experts."""
        return self.engine.stats().experts.slots > 0 and self.config.expert_slots is None

    # -- oracles

    def check_gold(self, ids: Ids) -> None:
        """The same logits as a cold prefill, and P as predicted."""
        predicted = self.ledger.reused(ids)
        assert self.engine.plan(ids).reused_tokens == predicted
        warm = self.engine.logits(ids)
        self.ledger.forwarded(ids, {len(ids)}, predicted)
        cold = self.gold.logits(self.engine, ids)
        span = float(cold.max() - cold.min())
        assert torch.isfinite(warm).all()
        assert float((warm - cold).abs().max()) <= 1e-4 * span

    def generate(self, ids: Ids, count: int, anchors: set[int]) -> Ids:
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
        self.ledger.forwarded(path, kept | {len(ids), len(path)}, expected)
        for end in kept:
            assert self.engine.plan(ids[:end]).prefill_tokens == 0
        return output

    # -- rules

    @initialize(data=st.data())
    def first_head(self, data: st.DataObject) -> None:
        self.heads = [self.ids(data, 1, 150)]

    def ids(self, data: st.DataObject, low: int, high: int) -> Ids:
        rng = random.Random(data.draw(st.integers(0, 2**32)))
        count = data.draw(st.integers(low, high) | st.sampled_from([1, 63, 64, 65]))
        return tuple(rng.randrange(3, self.model.spec.vocab_size) for _ in range(count))

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
        self.ledger.forwarded(ids, {len(ids)}, expected)
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
        self.ledger.forwarded(path, {len(ids), len(path)}, stream.usage.reused_tokens)

    @rule()
    def evict(self) -> None:
        stats = self.engine.stats()
        least = 64 * self.model.spec.bytes_per_token()
        if self.moves:  # slots give way first
            least += 8 * stats.experts.slot_bytes // stats.experts.slots - stats.experts.slot_bytes
        self.engine.set_budget(ram_bytes=stats.weights_bytes + stats.working_bytes + least)
        stats = self.engine.stats()
        assert stats.state_bytes <= stats.state_limit_bytes
        assert self.moves or stats.state_limit_bytes == least
        self.engine.set_budget(ram_bytes=1 << 30)
        if self.engine.stats().resident_paths == 0:
            self.ledger.written()
            self.ledger.lost_ram()
        else:  # a short path fits into the smallest budget
            self.engine.flush()
            self.ledger.written()

    @rule(data=st.data(), tokens=st.integers(0, 800))
    def budget(self, data: st.DataObject, tokens: int) -> None:
        """Less memory, with room for the states that are there and a few more in the part planned
        for them: nothing known is lost, whatever slots of experts do; a head is asked; then there
        is more again."""
        before = self.engine.stats()
        slots, anchors = before.experts, sum(s.bytes_per_anchor() for s in self.model.spec.states())
        # Twice: anchors may take half of it.
        room = 2 * before.state_bytes + 2 * (2048 + tokens) * self.model.spec.bytes_per_token()
        room += 2 * 40 * anchors
        if self.moves:  # of what is left, a quarter is theirs
            room = 4 * room + 8 * slots.slot_bytes // slots.slots - slots.slot_bytes
        needed = before.weights_bytes + before.working_bytes + room
        known = {head: self.ledger.reused(head) for head in self.heads}
        self.engine.set_budget(ram_bytes=needed)
        assert {head: self.engine.plan(head).reused_tokens for head in known} == known
        self.check_gold(self.heads[self.head(data)])
        stats = self.engine.stats()
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        assert used <= stats.ram_budget_bytes == needed
        assert stats.evicted_paths == before.evicted_paths
        self.engine.set_budget(ram_bytes=1 << 30)

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
        outputs: dict[int, Ids] = {}
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
            self.ledger.forwarded(path, {len(ids), len(path)}, len(ids) - prefilled[index])
        for index, ids in enumerate(paths):
            cold = self.gold.logits(self.engine, ids)
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


class Gold:
    """Cold prefills, and how close their routers came to choosing other experts. Below
    MIN_MARGIN rounding decides, so such an example proves nothing: it is rejected and counted."""

    def __init__(self, model: LoadedModel) -> None:
        self.examples = self.rejected = 0
        self._margin = math.inf
        self._watching = False
        model.decoder.observe_routing(self._observe)

    def _observe(self, margins: torch.Tensor) -> None:
        if self._watching:
            self._margin = min(self._margin, float(margins.min()))

    def logits(self, engine: Engine, ids: Ids) -> torch.Tensor:
        """[vocab] fp32 after the path."""
        self._margin, self._watching = math.inf, True
        try:
            cold = engine.logits(ids, reuse=False)
        finally:
            self._watching = False
        if self._margin < MIN_MARGIN:
            self.rejected += 1
            reject()
        return cold


def run_programs(
    base: type[Programs], model: LoadedModel, config: EngineConfig, examples: int, steps: int
) -> Gold:
    """Run random programs on a model; returns how many there were. Fails if more than 5 % had to
    be rejected."""
    gold = Gold(model)
    sliceable = all(state.sliceable for state in model.spec.states())
    fields = {"model": model, "config": config, "sliceable": sliceable, "gold": gold}
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        type("ProgramsOnModel", (base,), fields),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=checks,
        ),
    )
    assert gold.rejected <= 0.05 * gold.examples, (gold.rejected, gold.examples)
    return gold

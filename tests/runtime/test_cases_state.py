# SPDX-License-Identifier: Apache-2.0
"""Field cases about state, each on every kind of it. `CheckedEngine` compares every plan and every
count; GOLD is a cold prefill of identical ids in an engine of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_runtime.models.registry import FAMILIES
from freetoken_runtime.state.digest import anchor_digest, as_ids, chain, digest_at
from freetoken_runtime.testing import build_checkpoint
from freetoken_storage import MemoryDatabase

EngineMaker = Callable[..., Engine]
CheckedMaker = Callable[..., CheckedEngine]


@pytest.mark.parametrize(
    "size", [128, pytest.param(512, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_c22_insert_and_delete_in_a_repetitive_path(checked: CheckedMaker, size: int) -> None:
    """AAAABBBB becomes AAAACBBBB, then loses an A: P runs from the nearest anchor to the end."""
    a, b, c = (ids_of(seed, size) for seed in (1, 2, 3))
    engine = checked(prefill_chunk=256, anchor_interval=150)
    assert engine.warm(a * 4 + b * 4) == 8 * size
    inserted = a * 4 + c + b * 4
    shared = next(i for i in range(8 * size) if inserted[i] != (a * 4 + b * 4)[i])
    engine.check_gold(inserted, 9 * size - engine.nearest(shared))
    deleted = a * 3 + b * 4
    shared = next(i for i in range(7 * size) if deleted[i] != (a * 4 + b * 4)[i])
    engine.check_gold(deleted, 7 * size - engine.nearest(shared))


def test_c24_rewind_restores_nothing_beyond_the_point(checked: CheckedMaker) -> None:
    """Three turns, back to the first, ask again: the same answer as the first time."""
    engine = checked()
    path = ids_of(1, 90)
    answers, prompts = [], []
    for turn in range(3):
        path = path + ids_of(10 + turn, 40)
        prompts.append(list(path))
        output, _ = engine.generate(path, 30)
        answers.append(output)
        path = path + output
    for turn in (0, 1, 2, 0):
        assert engine.generate(prompts[turn], 30) == (answers[turn], 0)
        cold = engine.cold(prompts[turn], 1)
        assert close_to(engine.engine.logits(prompts[turn]), cold.logits)
    engine.check_gold([*prompts[0], 5, 6, 7], 3)
    between = prompts[1][:-17]  # anchors stand before it and beyond
    engine.check_gold(between, len(between) - engine.nearest(len(between) - 1, [130, 159]))
    engine.check_gold([*between[:120], 9, 9], 122 - engine.nearest(120))


def test_c28_the_same_prompt_twice_and_one_token(checked: CheckedMaker) -> None:
    """The second time P = 0; a prompt of one token works, twice."""
    engine = checked()
    ids = ids_of(1, 130)
    first, prefill = engine.generate(ids, 20)
    assert prefill == 130
    assert engine.generate(ids, 20) == (first, 0)
    engine.check_gold([5], 1)
    engine.check_gold([5], 0)
    engine.check_gold([ids[0]], 1)
    engine.check_gold([ids[0], 5], 1)


@pytest.mark.parametrize("restart", [False, True])
def test_c29_unequal_lengths_in_one_batch(checked: CheckedMaker, restart: bool) -> None:
    """37, 100 and 129 ids at once; each one's state is its own, in RAM and from disk."""
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        prompts = [ids_of(seed, count) for seed, count in ((1, 37), (2, 100), (3, 129))]
        parameters = SamplingParams(max_tokens=9)
        streams = [engine.engine.generate(prompt, parameters) for prompt in prompts]
        outputs = [[token.id for token in stream] for stream in streams]
        for prompt, output in zip(prompts, outputs, strict=True):
            ends = {len(prompt), len(prompt) + 8}
            engine.ledger.forwarded((*prompt, *output[:-1]), ends, 0)
        if restart:
            engine.restart()
        for prompt, output in zip(prompts, outputs, strict=True):
            engine.check_gold([*prompt, *output, 9], 2)
            engine.check_gold(prompt, 0)
            engine.check_gold(prompt[:30], 30 - engine.nearest(29))
        engine.close()


def test_c30_what_was_never_captured_is_absent(checked: CheckedMaker) -> None:
    """Between two anchors there is no state to be found, in RAM and on disk: none is listed, none
    is stored, and a path that ends there begins at the one before."""
    ids = ids_of(1, 160)
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        engine.warm(ids, [77])
        kept = range(1, 161) if engine.sliceable else [50, 77, 100, 150, 160]
        for _ in ("ram", "disk"):
            assert list(engine.engine.anchors(ids)) == list(kept)
            for position in (1, 49, 51, 63, 64, 76, 78, 128, 159):
                start = engine.nearest(position - 1, [77])
                assert engine.engine.plan(ids[:position]).reused_tokens == start
            engine.restart()
        names = chain(engine.engine.fingerprint.digest, as_ids(ids))
        stored = [
            position
            for position in range(1, 161)
            if database.snapshots.contains(anchor_digest(digest_at(names, as_ids(ids), position)))
        ]
        assert stored == ([77, 160] if engine.sliceable else list(kept))
        for position in (50, 78, 64, 149):
            engine.check_gold(
                ids[:position], position - engine.ledger.reused(tuple(ids[:position])), 4
            )
        engine.close()


def test_c31_anchor_in_ram_and_a_deeper_one_on_disk(checked: CheckedMaker) -> None:
    """Rows 0-99 are in RAM, 100-299 come from disk: one consistent state."""
    ids = ids_of(1, 300)
    with MemoryDatabase() as database:
        writer = checked(database.snapshots)
        writer.warm(ids, [70, 230])
        writer.close()
        engine = checked()
        engine.warm(ids[:100])
        engine.engine.attach(database.snapshots)
        engine.ledger.forwarded(tuple(ids), {70, 230, 300}, 0)
        plan = engine.engine.plan([*ids, 5])
        assert (plan.source, plan.anchor, plan.prefill_tokens) == ("disk", 300, 1)
        assert engine.engine.plan(ids[:100]).source == "ram"
        engine.check_gold([*ids, 5], 1)
        engine.check_gold(ids[:70], 0)
        engine.check_gold([*ids[:200], 3, *ids[201:]], 300 - 200)
        engine.check_gold([*ids[:247], 3, *ids[248:]], 300 - engine.nearest(247, [230]))
        engine.close()


def test_c34_appending_to_a_populated_state(checked: CheckedMaker) -> None:
    """1, 2, 63, 64, 65 and 257 ids, each behind the same state and all behind one another."""
    engine = checked()
    base = ids_of(1, 143)
    engine.warm(base)
    for count in (1, 2, 63, 64, 65, 257):
        engine.check_gold(base + ids_of(count, count), count, 8)
    path = base
    for count in (257, 65, 64, 63, 2, 1):
        path = path + ids_of(1000 + count, count)
        assert engine.warm(path) == count
        assert close_to(engine.engine.logits(path), engine.cold(path, 1).logits)


def test_c61_poisoned_buffers_never_show(checked: CheckedMaker) -> None:
    """Memory for rows and restored buffers is NaN at first: after restores, forks and rewinds every
    logit is finite, and so is every state that is kept. What a path starts from is still zero."""
    ids = ids_of(1, 250)
    with MemoryDatabase() as database:
        engine = checked(database.snapshots)
        engine.generate(ids, 5, [100, 192])
        engine.restart()
        fresh = engine.engine._pool.allocate(64)
        assert all(bool(t.isnan().all()) for t in fresh.tensors)
        empty = engine.engine._pool.layout.empty()
        assert all(bool(t.isnan().all()) for buffers in empty for t in buffers)
        for end in (250, 249, 193, 192, 191, 65, 64, 63, 1):
            engine.check_gold(ids[:end], end - engine.ledger.reused(tuple(ids[:end])), 2)
        assert all(not bool(t.any()) for buffers in engine.engine._spaces.zeros for t in buffers)
        for resident in engine.engine._index:
            for anchor in resident.sequence.anchors.values():
                assert bool(anchor.row.isfinite().all())
                assert all(bool(t.isfinite().all()) for buffers in anchor.fixed for t in buffers)
            for rows in resident.sequence.view().copy_rows(0, resident.sequence.length).values():
                assert bool(torch.from_numpy(rows.copy()).view(torch.float32).isfinite().all())
        engine.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_m22_prefill_equals_prefill_and_one_step(tmp_path: Path, family: str) -> None:
    """prefill(T) = prefill(T - 1) + one step, around a block's edge, on every family."""
    build_checkpoint(tmp_path, family)
    engine = CheckedEngine(tmp_path)
    for total in (63, 64, 65):
        ids = ids_of(total, total)
        engine.warm(ids[:-1])
        assert engine.warm(ids) == 1
        assert close_to(engine.engine.logits(ids), engine.cold(ids, 1).logits)
    engine.close()

# SPDX-License-Identifier: Apache-2.0
"""Field cases about long sessions, each on every kind of state. `CheckedEngine` compares plans and
counts; GOLD is a cold prefill of identical ids."""

from collections.abc import Callable
from pathlib import Path

import pytest

from freetoken_runtime.engine_cases import KINDS, CheckedEngine, close_to, ids_of
from freetoken_runtime.weights import load

CheckedMaker = Callable[..., CheckedEngine]


def a_long_session(engine: CheckedEngine, length: int, turns: int) -> None:
    """A session of `length` ids and a branch of it from its middle, then short turns, each with
    its ends named; at last edits at 30 % and beside the branch's own anchors."""
    base, interval = ids_of(1, length), engine.interval
    engine.engine.warm(base)
    branch = base[: length // 2] + ids_of(2, 3 * interval)
    engine.engine.warm(branch, anchors=[length // 2 + 11])
    path = base
    for turn in range(turns):
        path = path + ids_of(10 + turn, 40)
        named = [len(path) - 40, len(path) - 20, len(path)]
        stream = engine.engine.generate(path, anchors=named, anchor_after={5, 6, 7})
        path = path + [next(stream).id for _ in range(8)]
        stream.close()
    for ids, edit in ((path, 3 * length // 10), (branch, len(branch) - 7), (path, length - 5)):
        edited = [*ids[:edit], 3 if ids[edit] != 3 else 4, *ids[edit + 1 :]][: edit + 60]
        plan = engine.engine.plan(edited)
        assert plan.reused_tokens == engine.nearest(edit, [length // 2 + 11])
        assert edit - plan.reused_tokens < interval
        before = engine.engine.stats().forward_rows
        logits = engine.engine.logits(edited)
        assert engine.engine.stats().forward_rows - before == plan.prefill_tokens
        if len(edited) < 40_000:  # a cold prefill of more takes minutes
            assert close_to(logits, engine.cold(edited, 1).logits)
    assert engine.engine.plan(branch).prefill_tokens == 0


def test_c23_an_edit_in_a_long_session_finds_an_anchor(checked: CheckedMaker) -> None:
    """6,000 ids and ten short turns: an edit at 30 % costs at most an interval, and what belongs to
    another branch is still there."""
    a_long_session(checked(prefill_chunk=512, anchor_interval=100), 6000, 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind, interval", [("gated_delta", 1024), ("mamba2", 1024), ("mamba2", 128)]
)
def test_c23_100k_ids(tmp_path: Path, kind: str, interval: int) -> None:
    """The same with 100,000 ids, at the default interval and at one of many anchors."""
    KINDS[kind].build(tmp_path, max_position_embeddings=131_072)
    engine = CheckedEngine(
        load(tmp_path), prefill_chunk=1024, anchor_interval=interval, ram_budget_bytes=4 << 30
    )
    a_long_session(engine, 100_000, 10)
    engine.close()


def cycles(engine: CheckedEngine, count: int, appended: int) -> None:
    """The budget holds the base and two of the cycles' paths."""
    base = ids_of(1, 200)
    engine.engine.warm(base)
    first = engine.engine.logits([*base, 7])
    stats = engine.engine.stats()
    token_bytes = engine.model.spec.bytes_per_token()
    states = sum(state.bytes_per_anchor() for state in engine.model.spec.states())
    room = 2 * (appended + 1200) * token_bytes + 2 * 20 * states
    limit = stats.weights_bytes + stats.working_bytes + room
    engine.engine.set_budget(ram_bytes=limit)
    for cycle in range(count):
        usage = engine.engine.warm(base + ids_of(100 + cycle, appended))
        assert usage.reused_tokens + usage.prefill_tokens == 200 + appended
        assert close_to(engine.engine.logits([*base, 7]), first)
        stats = engine.engine.stats()
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        assert used <= limit, (cycle, used, limit)
    dropped = any(resident.sequence.dropped for resident in engine.engine._index)
    assert dropped or stats.evicted_paths
    assert close_to(engine.cold([*base, 7], 1).logits, first)


def test_c25_append_and_delete_in_cycles(checked: CheckedMaker) -> None:
    """Five cycles of 1,500 ids in a budget that holds two: the base's logits never change."""
    cycles(checked(prefill_chunk=512, anchor_interval=200), 5, 1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c25_append_and_delete_in_100_cycles(checked: CheckedMaker) -> None:
    """100 cycles of 3,100 ids."""
    cycles(checked(prefill_chunk=512, anchor_interval=200), 100, 3100)


def test_m23_512_steps_do_not_drift(checked: CheckedMaker) -> None:
    """512 tokens decoded one by one, with an anchor after every interval on the way; then the state
    at the end, and at an anchor in the middle, equals that of a prefill."""
    engine = checked(anchor_interval=200)
    ids = ids_of(1, 90)
    output, _ = engine.generate(ids, 512)
    path = ids + output
    engine.check_gold(path, 1, 16)
    engine.check_gold([*path[:400], 9, 10], 2, 16)
    engine.check_gold(path[:470], 470 - engine.nearest(469), 16)

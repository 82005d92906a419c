# SPDX-License-Identifier: Apache-2.0
"""Field cases about state. GOLD: a cold prefill of identical ids in an engine of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.testing import build_checkpoint
from freetoken_storage import MemoryDatabase

EngineMaker = Callable[..., Engine]
GREEDY_TOKENS = 64


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with room for 8,192 positions."""
    folder = tmp_path_factory.mktemp("long")
    build_checkpoint(folder, "llama", max_position_embeddings=8192)
    return folder


def ids_of(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 211, count)]


def close_to(warm: torch.Tensor, cold: torch.Tensor) -> bool:
    span = float(cold.max() - cold.min())
    return bool(torch.isfinite(warm).all()) and float((warm - cold).abs().max()) <= 1e-4 * span


def generate(engine: Engine, ids: list[int], count: int) -> tuple[list[int], int]:
    """Greedy ids, and P after checking R + P = input and P = rows forwarded."""
    before = engine.stats().forward_rows
    stream = engine.generate(ids, SamplingParams(max_tokens=count))
    output = [token.id for token in stream]
    usage = stream.usage
    assert usage.reused_tokens + usage.prefill_tokens == len(ids)
    assert engine.stats().forward_rows - before == usage.prefill_tokens + count - 1
    return output, usage.prefill_tokens


def check_gold(engine: Engine, reference: Engine, ids: list[int], expected_prefill: int) -> None:
    """The predicted P, the same 64 greedy tokens, the same logits."""
    plan = engine.plan(ids)
    output, prefill = generate(engine, ids, GREEDY_TOKENS)
    assert prefill == plan.prefill_tokens == expected_prefill
    assert output == generate(reference, ids, GREEDY_TOKENS)[0]
    assert close_to(engine.logits(ids), reference.logits(ids, reuse=False))


def test_c22_insert_and_delete_in_a_repetitive_path(
    make_engine: EngineMaker, long_llama: Path
) -> None:
    """AAAABBBB becomes AAAACBBBB, then loses an A: P runs from the change to the end."""
    a, b, c = (ids_of(seed, 512) for seed in (1, 2, 3))
    engine = make_engine(folder=long_llama, prefill_chunk=512)
    reference = make_engine(folder=long_llama, prefill_chunk=512)
    engine.warm(a * 4 + b * 4)
    check_gold(engine, reference, a * 4 + c + b * 4, 512 * 5)
    shared = next(i for i in range(512) if a[i] != b[i])
    check_gold(engine, reference, a * 3 + b * 4, 512 * 4 - shared)


def test_c24_rewind_restores_nothing_beyond_the_point(make_engine: EngineMaker) -> None:
    """Three turns, back to the first, ask again: the same answer as the first time."""
    engine, reference = make_engine(), make_engine()
    path = ids_of(1, 90)
    answers, prompts = [], []
    for turn in range(3):
        path = path + ids_of(10 + turn, 40)
        prompts.append(list(path))
        output, _ = generate(engine, path, 30)
        answers.append(output)
        path = path + output
    for turn in (0, 1, 2, 0):
        assert engine.plan(prompts[turn]).anchor == len(prompts[turn])
        assert generate(engine, prompts[turn], 30)[0] == answers[turn]
        assert close_to(engine.logits(prompts[turn]), reference.logits(prompts[turn], reuse=False))
    check_gold(engine, reference, [*prompts[0], 5, 6, 7], 3)


def cycles(engine: Engine, count: int) -> None:
    base = ids_of(1, 200)
    engine.warm(base)
    first = engine.logits([*base, 7])
    plan = engine.stats().ram_budget_bytes
    for cycle in range(count):
        path = base + ids_of(100 + cycle, 3100)
        usage = engine.warm(path)
        assert usage.reused_tokens + usage.prefill_tokens == 3300
        assert close_to(engine.logits([*base, 7]), first)
        stats = engine.stats()
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        assert used <= plan, (cycle, stats)


def test_c25_append_and_delete_in_cycles(make_engine: EngineMaker) -> None:
    """Ten cycles of 3,100 ids in a budget that holds two: the base's logits never change."""
    cycles(make_engine(prefill_chunk=512, ram_budget_bytes=43 << 20), 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_c25_append_and_delete_in_100_cycles(make_engine: EngineMaker) -> None:
    """The same, 100 cycles."""
    cycles(make_engine(prefill_chunk=512, ram_budget_bytes=43 << 20), 100)


def test_c28_the_same_prompt_twice_and_one_token(make_engine: EngineMaker) -> None:
    """The second time P <= 1; a prompt of one token works, twice."""
    engine, reference = make_engine(), make_engine()
    ids = ids_of(1, 130)
    first, _ = generate(engine, ids, 20)
    again, prefill = generate(engine, ids, 20)
    assert again == first and prefill <= 1
    check_gold(engine, reference, [5], 1)
    check_gold(engine, reference, [5], 0)
    check_gold(engine, reference, [ids[0]], 1)


@pytest.mark.parametrize("restart", [False, True])
def test_c29_unequal_lengths_in_one_batch(make_engine: EngineMaker, restart: bool) -> None:
    """37, 100 and 129 ids at once; each one's state is its own, in RAM and from disk."""
    database = MemoryDatabase()
    engine, reference = make_engine(database.snapshots), make_engine()
    prompts = [ids_of(seed, count) for seed, count in ((1, 37), (2, 100), (3, 129))]
    streams = [engine.generate(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
    outputs = [[token.id for token in stream] for stream in streams]
    if restart:
        engine.close()
        engine = make_engine(database.snapshots)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_gold(engine, reference, [*prompt, *output, 9], 2)
        check_gold(engine, reference, prompt, 0)
        check_gold(engine, reference, prompt[:30], 1)


def test_c31_anchor_in_ram_and_a_deeper_one_on_disk(make_engine: EngineMaker) -> None:
    """Rows 0-99 are in RAM, 100-299 come from disk: one consistent state."""
    database = MemoryDatabase()
    ids = ids_of(1, 300)
    writer = make_engine(database.snapshots)
    writer.warm(ids, anchors=[70])
    writer.close()
    engine, reference = make_engine(), make_engine()
    engine.warm(ids[:100])
    engine.attach(database.snapshots)
    plan = engine.plan([*ids, 5])
    assert (plan.source, plan.anchor, plan.prefill_tokens) == ("disk", 300, 1)
    assert engine.plan(ids[:100]).source == "ram"
    check_gold(engine, reference, [*ids, 5], 1)
    check_gold(engine, reference, ids[:70], 0)
    check_gold(engine, reference, ids[:200] + [3] + ids[201:], 100)


def test_c61_poisoned_buffers_never_show(make_engine: EngineMaker) -> None:
    """Fresh rows are NaN: after restores, forks and rewinds every logit is finite."""
    database = MemoryDatabase()
    engine = make_engine(database.snapshots)
    ids = ids_of(1, 250)
    generate(engine, ids, 5)
    engine.close()
    engine = make_engine(database.snapshots)
    reference = make_engine()
    buffer = engine._pool.allocate(64)
    assert all(bool(t.isnan().all()) for t in buffer.tensors)
    for end in (250, 249, 193, 192, 191, 65, 64, 63, 1):
        assert close_to(engine.logits(ids[:end]), reference.logits(ids[:end], reuse=False))
    for resident in engine._index:
        for layer in range(4):
            for keys, values in resident.sequence.pieces(layer, new=True):
                assert bool(keys.isfinite().all()) and bool(values.isfinite().all())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_m22_prefill_equals_prefill_and_one_step(
    make_engine: EngineMaker, tmp_path: Path, family: str
) -> None:
    """prefill(T) = prefill(T - 1) + one step, around a block's edge, on every family."""
    settings: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    build_checkpoint(tmp_path, family, **settings)
    engine, reference = make_engine(folder=tmp_path), make_engine(folder=tmp_path)
    for total in (63, 64, 65):
        ids = ids_of(total, total)
        engine.warm(ids[:-1])
        assert engine.plan(ids).prefill_tokens == 1
        assert close_to(engine.logits(ids), reference.logits(ids, reuse=False))


def test_forgetting_leaves_nothing_at_or_after_the_point(make_engine: EngineMaker) -> None:
    """RAM and disk lose every path through the point; what lies before it stays; GOLD after."""
    database = MemoryDatabase()
    engine, reference = make_engine(database.snapshots), make_engine()
    ids = ids_of(1, 300)
    other = ids[:100] + ids_of(2, 80)
    for path in (ids, other, ids[:210] + ids_of(3, 60)):
        generate(engine, path, 3)
    engine.flush()
    assert engine.forget(ids, 200) > 0
    assert engine.plan(ids).reused_tokens == 200
    engine.close()
    engine = make_engine(database.snapshots)
    assert 192 <= engine.plan(ids).reused_tokens <= 200
    assert engine.plan(other).prefill_tokens == 0
    for digest in engine_digests(engine, ids, 200):
        assert not database.snapshots.contains(digest)
    check_gold(engine, reference, ids, engine.plan(ids).prefill_tokens)
    assert engine.forget(other, 0) > 0
    assert engine.plan(other).reused_tokens == 0
    assert engine.forget(other, 0) == 0


def engine_digests(engine: Engine, ids: list[int], start: int) -> list[bytes]:
    """Names of every state of the path after `start`, block, short block or row."""
    from freetoken_runtime.state.digest import anchor_digest, as_ids, chain, digest_at

    path = as_ids(ids)
    names = chain(engine.fingerprint.digest, path)
    states = [digest_at(names, path, p) for p in range(start + 1, len(ids) + 1)]
    return [*states, *(anchor_digest(state) for state in states)]


def test_forgetting_under_a_running_generation(make_engine: EngineMaker) -> None:
    """A path that is being grown loses its tail when it ends, and is never written."""
    database = MemoryDatabase()
    engine = make_engine(database.snapshots)
    ids = ids_of(1, 150)
    stream = engine.generate(ids, SamplingParams(max_tokens=3000))
    output = [next(stream).id for _ in range(3)]
    engine.forget(ids, 100)
    stream.cancel()
    output += [token.id for token in stream]
    engine.flush()
    assert engine.plan(ids).reused_tokens <= 100
    for digest in engine_digests(engine, ids + output, 100):
        assert not database.snapshots.contains(digest)

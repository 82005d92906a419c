# SPDX-License-Identifier: Apache-2.0
"""Where anchors are taken, who shares them, which stay when memory is short, and what an edit costs
by them. Oracles: positions counted by hand, GOLD, and bytes per anchor from the spec."""

from collections.abc import Callable

import pytest

from freetoken_runtime import SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, ids_of
from freetoken_runtime.state.anchors import Rank

CheckedMaker = Callable[..., CheckedEngine]
RECURRENT = ["gated_delta", "mamba2", "convolution", "hybrid"]
recurrent = pytest.mark.parametrize("kind", RECURRENT)


def anchor_bytes(engine: CheckedEngine) -> int:
    """What one anchor holds: the overwritten buffers and a hidden row."""
    spec = engine.model.spec
    return sum(s.bytes_per_anchor() for s in spec.states()) + 4 * spec.hidden_size


def give_room(engine: CheckedEngine, anchors: int) -> None:
    """A budget in which that many anchors may stay: they may take half of what states may."""
    stats = engine.engine.stats()
    size_bytes = 2 * anchors * anchor_bytes(engine)
    engine.engine.set_budget(ram_bytes=stats.weights_bytes + stats.working_bytes + size_bytes)


def test_a_thought_is_dropped_and_its_answer_kept(checked: CheckedMaker) -> None:
    """System, question, thought, answer, result, follow-up: without the thought, P is the answer
    and what comes after it, from the anchor where the thought began."""
    sizes = {"system": 70, "question": 33, "thought": 91, "answer": 47, "result": 66}
    parts = {name: ids_of(seed, size) for seed, (name, size) in enumerate(sizes.items())}
    ends: list[int] = []
    path: list[int] = []
    engine = checked()
    for part in parts.values():
        path = path + part
        ends.append(len(path))
    engine.warm(path, ends)
    kept = [*parts["system"], *parts["question"], *parts["answer"], *parts["result"]]
    assert parts["answer"][0] != parts["thought"][0]
    plan = engine.engine.plan(kept)
    assert (plan.anchor, plan.prefill_tokens) == (70 + 33, 47 + 66)
    assert plan.miss is not None and (plan.miss.position, plan.miss.gap) == (103, 0)
    engine.check_gold(kept, 47 + 66, 16)
    engine.check_gold([*kept, *ids_of(9, 20)], 20, 16)
    engine.check_gold([*path, 7], 1, 16)  # the path with the thought is still there


def test_an_announced_thought_costs_its_gap_where_no_anchor_stands(checked: CheckedMaker) -> None:
    """The same with the thought's start not named: the plan says which tokens an anchor there would
    have saved."""
    engine = checked()
    path = ids_of(1, 240)
    engine.warm(path)
    kept = [*path[:112], *path[160:]]
    start = engine.nearest(112)
    plan = engine.engine.plan(kept)
    assert plan.miss is not None
    assert (plan.miss.position, plan.miss.cause) == (112, "different_ids")
    assert (plan.miss.gap, plan.miss.tokens) == (112 - start, len(kept) - start)
    engine.check_gold(kept, len(kept) - start, 16)


@recurrent
def test_anchors_are_taken_while_decoding(checked: CheckedMaker) -> None:
    """After every interval of the path, after chosen ids, and where the generation ended."""
    engine = checked().engine
    ids = ids_of(1, 83)
    first = [token.id for token in engine.generate(ids, SamplingParams(max_tokens=140))]
    path = ids + first[:-1]
    assert list(engine.anchors(path)) == [50, 83, 100, 150, 200, 222]
    chosen = {first[20], first[60]}
    again = checked()
    stream = again.engine.generate(
        ids, SamplingParams(max_tokens=140), anchor_after=chosen, lasting=[40], anchors=[83]
    )
    assert [token.id for token in stream] == first
    after = {83 + at + 1 for at, token in enumerate(first[:-1]) if token in chosen}
    assert list(again.engine.anchors(path)) == sorted({40, 50, 83, 100, 150, 200, 222} | after)
    for end in sorted(after)[:3]:
        again.ledger.forwarded(tuple(path), {40, 83, 222} | after, 0)
        again.check_gold([*path[:end], 5, 5], 2, 8)


@pytest.mark.parametrize("kind", ["full", *RECURRENT])
def test_a_cancelled_generation_ends_with_an_anchor(checked: CheckedMaker) -> None:
    """Left after a few tokens: going on from there costs the last id and what is new."""
    engine = checked()
    ids = ids_of(1, 83)
    stream = engine.engine.generate(ids, SamplingParams(max_tokens=3000))
    output = [next(stream).id for _ in range(20)]
    stream.cancel()
    output += [token.id for token in stream]
    assert stream.finish_reason == "cancelled"
    path = ids + output
    end = engine.engine.plan([*path, 9]).reused_tokens
    assert end in (len(path) - 1, len(path))
    assert end in engine.engine.anchors(path)
    engine.ledger.forwarded(tuple(path[:end]), {83, end}, 0)
    engine.check_gold([*path, 9, 9], len(path) + 2 - end, 8)
    engine.check_gold([*path[:83], 9], 1, 8)


@recurrent
def test_a_cancelled_prefill_keeps_the_anchors_it_passed(checked: CheckedMaker) -> None:
    """Cancelled between two chunks: what was forwarded is not forwarded again."""
    engine = checked()
    ids = ids_of(1, 700)
    done: list[int] = []
    stream = None

    def cancel(rows: int, _: int) -> None:
        done.append(rows)
        if len(done) == 3 and stream is not None:
            stream.cancel()

    blocker = engine.engine.generate(ids_of(2, 3000), SamplingParams(max_tokens=1))
    stream = engine.engine.generate(ids, SamplingParams(max_tokens=1), on_progress=cancel)
    assert list(stream) == [] and stream.finish_reason == "cancelled"
    blocker.close()
    assert done == [64, 128, 192]
    assert list(engine.engine.anchors(ids)) == [50, 100, 150, 192]
    engine.ledger.forwarded(tuple(ids[:192]), {192}, 0)
    engine.check_gold(ids, 700 - 192, 8)


@recurrent
def test_a_shared_system_prompt_has_one_anchor(checked: CheckedMaker) -> None:
    """Two sessions go on from one system prompt: the second forwards its own part only, both look
    at the same anchor, and its bytes count once."""
    engine = checked(anchor_interval=1000)
    system = ids_of(1, 120)
    for seed in (2, 3):
        path = system + ids_of(seed, 45)
        stream = engine.engine.generate(path, SamplingParams(max_tokens=1), lasting=[120])
        list(stream)
        assert stream.usage.prefill_tokens == (165 if seed == 2 else 45)
    first, second = [resident.sequence for resident in engine.engine._index]
    assert first.anchors[120] is second.anchors[120]
    assert first.anchors[120].rank is Rank.LASTING
    assert first.spans[0].buffer is second.spans[0].buffer
    rows = {id(s.buffer): s.buffer.size_bytes for s in [*first.spans, *second.spans]}
    expected = sum(rows.values()) + 3 * anchor_bytes(engine)
    assert engine.engine.stats().state_bytes == expected


@recurrent
def test_asking_again_takes_no_more_memory(checked: CheckedMaker) -> None:
    """The same path asked by many at once: one state, counted once."""
    engine = checked(anchor_interval=1000)
    ids = ids_of(1, 120)
    engine.warm(ids)
    before = engine.engine.stats().state_bytes
    streams = [engine.engine.generate(ids, SamplingParams(max_tokens=1)) for _ in range(6)]
    for stream in streams:
        list(stream)
    assert engine.engine.stats().state_bytes == before
    longer = ids + ids_of(2, 20)
    for _ in range(3):
        engine.engine.warm(longer)
        engine.engine.warm(ids)
    sequences = [resident.sequence for resident in engine.engine._index]
    tensors = {
        t.data_ptr(): t.nbytes
        for sequence in sequences
        for anchor in sequence.anchors.values()
        for t in (anchor.row, *(t for buffers in anchor.fixed for t in buffers))
    }
    buffers = {id(s.buffer): s.buffer.size_bytes for q in sequences for s in q.spans}
    counted = engine.engine.stats().state_bytes
    assert counted == sum(tensors.values()) + sum(buffers.values())


@recurrent
def test_what_an_anchor_holds_is_its_own_memory(checked: CheckedMaker) -> None:
    """No buffer of an anchor is a view of something larger, whatever form computed it."""
    engine = checked()
    ids = ids_of(1, 200)
    list(engine.engine.generate(ids, SamplingParams(max_tokens=70), anchors=[1, 3, 63, 64, 65]))
    (resident,) = engine.engine._index
    assert {1, 3, 63, 64, 65, 50, 200, 250, 269} <= resident.sequence.anchors.keys()
    for position, anchor in resident.sequence.anchors.items():
        for layer, buffers in enumerate(anchor.fixed):
            for tensor in buffers:
                held = tensor.untyped_storage().nbytes()
                assert held == tensor.nbytes, (position, layer, tuple(tensor.shape), held)


@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_lasting_anchors_and_pinned_paths_stay(checked: CheckedMaker) -> None:
    """Room for few of many anchors: the ends of system and tools stay through every turn, a pinned
    path keeps all of its anchors, and the plan names what gave way."""
    engine = checked(prefill_chunk=128, anchor_interval=10)
    pinned = ids_of(1, 60)
    engine.warm(pinned, [33])
    engine.engine.pin("keep", [pinned])
    give_room(engine, 24)
    system = ids_of(2, 75)
    path = system + ids_of(3, 900)
    stream = engine.engine.generate(path, SamplingParams(max_tokens=60), lasting=[68, 71, 75])
    assert len(list(stream)) == 60
    assert list(engine.engine.anchors(pinned)) == [10, 20, 30, 33, 40, 50, 60]
    (other,) = (r for r in engine.engine._index if not r.pinned_by)
    kept, dropped = set(other.sequence.anchors), other.sequence.dropped
    assert {68, 71, 75, 975, 1034} <= kept and len(kept) < 24 and kept.isdisjoint(dropped)
    budget = engine.engine._budget
    assert budget.anchors.used_bytes <= budget.anchor_limit_bytes
    gone = max(dropped & {*range(100, 900, 10)})
    edited = [*path[: gone + 3], *ids_of(9, 30)]
    edited[gone + 3] = 3 if path[gone + 3] != 3 else 4
    plan = engine.engine.plan(edited)
    start = max(p for p in kept if p <= gone + 3)
    assert (plan.anchor, plan.prefill_tokens) == (start, len(edited) - start)
    assert plan.miss is not None
    assert (plan.miss.position, plan.miss.gap) == (gone + 3, gone + 3 - start)
    assert plan.miss.dropped == gone
    for seed in range(4, 7):
        list(engine.engine.generate(system + ids_of(seed, 200), SamplingParams(max_tokens=3)))
        assert engine.engine.plan(system + ids_of(seed + 50, 9)).reused_tokens == 75
        assert engine.engine.plan([*system[:71], *ids_of(seed + 60, 9)]).reused_tokens == 71
    assert list(engine.engine.anchors(pinned)) == [10, 20, 30, 33, 40, 50, 60]


@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_a_long_path_thins_itself_and_not_its_neighbours(checked: CheckedMaker) -> None:
    """A short session's anchors are no collateral of a long one beside it."""
    engine = checked(prefill_chunk=256)
    short = ids_of(1, 200)
    engine.warm(short, [60])
    give_room(engine, 30)
    engine.engine.warm(ids_of(2, 1900))
    assert list(engine.engine.anchors(short)) == [50, 60, 100, 150, 200]
    dropped = [len(r.sequence.dropped) for r in engine.engine._index]
    assert dropped[0] == 0 and dropped[1] > 0


@recurrent
def test_anchors_at_the_edges_of_a_path(checked: CheckedMaker) -> None:
    """After the first token, after all of them, and at both sides of a chunk."""
    engine = checked(anchor_interval=64)
    ids = ids_of(1, 130)
    engine.warm(ids, [1, 2, 63, 64, 65, 128, 129, 130])
    expected = [1, 2, 63, 64, 65, 128, 129, 130]
    assert list(engine.engine.anchors(ids)) == expected
    for position in expected:
        engine.check_gold(ids[:position], 0, 4)
        engine.check_gold([*ids[:position], 3], 1, 4)

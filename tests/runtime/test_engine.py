# SPDX-License-Identifier: Apache-2.0
"""The engine's public face. Oracles: the same request run alone; a cold prefill; the runner."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from freetoken_runtime import Engine, EngineConfig, SamplingParams, Token
from freetoken_runtime.batch import Batch
from freetoken_runtime.errors import (
    ContextOverflow,
    EngineClosed,
    EngineFault,
    InvalidAnchors,
    InvalidConfig,
    InvalidIds,
    InvalidSampling,
)

EngineMaker = Callable[..., Engine]


def ids_of(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 211, count)]


def run(engine: Engine, ids: list[int], **sampling: Any) -> list[Token]:
    return list(engine.generate(ids, SamplingParams(**sampling)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 20 s"
        time.sleep(0.002)


def test_generated_tokens_are_the_greedy_ones_of_cold_prefills(make_engine: EngineMaker) -> None:
    """Each token is the arg-max of a cold prefill of everything before it."""
    engine = make_engine()
    ids = ids_of(1, 70)
    for token in run(engine, ids, max_tokens=12, logprobs=3):
        cold = engine.logits(ids, reuse=False)
        assert token.id == int(cold.argmax())
        expected = float(torch.log_softmax(cold.double(), 0)[token.id])
        assert token.logprob == pytest.approx(expected, abs=1e-4)
        assert [i for i, _ in token.top] == torch.topk(cold, 3).indices.tolist()
        ids.append(token.id)


@pytest.mark.parametrize(
    "dtype, quant",
    [("float32", None), ("bfloat16", None), ("float32", "int8"), ("float32", "int4")],
)
def test_same_seed_same_tokens_alone_and_in_a_batch_of_four(
    make_engine: EngineMaker, dtype: str, quant: str | None
) -> None:
    """Tokens and log-probabilities of a request are bit for bit those it has alone."""
    prompts = [ids_of(seed, count) for seed, count in ((1, 37), (2, 100), (3, 129), (4, 5))]
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 1.3, "top_p": 0.95, "logprobs": 4}
    alone = []
    for seed, prompt in enumerate(prompts):
        with make_engine(dtype=dtype, quant=quant) as engine:
            alone.append(run(engine, prompt, seed=seed, **sampling))
    engine = make_engine(dtype=dtype, quant=quant)
    streams = [
        engine.generate(prompt, SamplingParams(seed=seed, **sampling))
        for seed, prompt in enumerate(prompts)
    ]
    assert [list(stream) for stream in streams] == alone
    assert all(len(tokens) == 20 for tokens in alone)


def test_usage_counts_rows_that_were_forwarded(make_engine: EngineMaker) -> None:
    """R + P = input, P = the runner's rows; the last sampled id is forwarded by the next call."""
    engine = make_engine()
    ids = ids_of(1, 100)
    stream = engine.generate(ids, SamplingParams(max_tokens=5))
    path = ids + [token.id for token in stream]
    usage = stream.usage
    assert (usage.input_tokens, usage.reused_tokens, usage.prefill_tokens) == (100, 0, 100)
    assert usage.output_tokens == 5 and stream.finish_reason == "length"
    assert engine.stats().forward_rows == 104
    assert 0 < usage.ttft_s and 0 < usage.decode_s
    plan = engine.plan([*path, 7, 8])
    assert (plan.reused_tokens, plan.prefill_tokens, plan.source) == (104, 3, "ram")
    assert plan.predicted_s > 0
    assert engine.warm(path).prefill_tokens == 1
    assert engine.plan([*path, 7, 8]).prefill_tokens == 2
    assert engine.plan(path).miss is None


def test_misses_are_named(make_engine: EngineMaker) -> None:
    """Position, cause and tokens of what could not be reused."""
    engine = make_engine()
    ids = ids_of(1, 100)
    unknown = engine.plan(ids).miss
    assert unknown is not None
    assert (unknown.position, unknown.cause, unknown.tokens) == (0, "never_computed", 100)
    engine.warm(ids)
    edited = engine.plan([*ids[:40], 1, *ids[41:]]).miss
    assert edited is not None
    assert (edited.position, edited.cause, edited.tokens) == (40, "different_ids", 60)
    longer = engine.plan([*ids, 5, 6]).miss
    assert longer is not None
    assert (longer.position, longer.cause, longer.tokens) == (100, "never_computed", 2)
    inside = engine.plan(ids[:50]).miss
    assert inside is not None
    assert (inside.position, inside.cause, inside.tokens) == (49, "no_anchor", 1)


def test_anchors_keep_the_row_that_answers_without_a_forward(make_engine: EngineMaker) -> None:
    """Named positions, ids in `anchor_after`, prompt end and generation end cost nothing later."""
    engine = make_engine()
    ids = ids_of(1, 130)
    forced = [9, 10, 11, 10, 12]
    stream = engine.generate(
        ids,
        SamplingParams(max_tokens=5, force=forced),
        anchors=[1, 64, 65, 100],
        anchor_after={10},
    )
    assert [token.id for token in stream] == forced
    path = ids + forced
    free = {1, 64, 65, 100, 130, 132, 134}
    for end in range(1, len(path)):
        assert engine.plan(path[:end]).prefill_tokens == (0 if end in free else 1), end
    rows = engine.stats().forward_rows
    for end in sorted(free):
        warm, cold = engine.logits(path[:end]), engine.logits(path[:end], reuse=False)
        assert float((warm - cold).abs().max()) <= 1e-4 * float(cold.max() - cold.min())
        rows += end  # the cold run only
        assert engine.stats().forward_rows == rows
    assert list(engine.anchors([*path, 3])) == list(range(1, 135))


def test_stop_ids_are_delivered_and_not_forwarded(make_engine: EngineMaker) -> None:
    """The stop id ends the generation; the next call forwards it."""
    engine = make_engine()
    ids = ids_of(1, 20)
    sampling = SamplingParams(max_tokens=9, force=[5, 6, 7, 8], stop_ids=frozenset({7}))
    stream = engine.generate(ids, sampling)
    assert [token.id for token in stream] == [5, 6, 7]
    assert stream.finish_reason == "stop"
    assert engine.plan([*ids, 5, 6, 7, 4]).prefill_tokens == 2


def test_generation_ends_at_the_context_limit(make_engine: EngineMaker, tmp_path: Any) -> None:
    """Positions end with the context; a path that fills it still gets its one next token."""
    from freetoken_runtime.testing import build_checkpoint

    build_checkpoint(tmp_path / "short", "llama", max_position_embeddings=64)
    engine = make_engine(folder=tmp_path / "short")
    stream = engine.generate(ids_of(1, 60), SamplingParams(max_tokens=50))
    assert len(list(stream)) == 5 and stream.finish_reason == "length"
    assert len(run(engine, ids_of(2, 64), max_tokens=50)) == 1
    for call in (engine.plan, engine.warm, engine.generate, engine.logits):
        with pytest.raises(ContextOverflow, match=r"65 tokens.*64 tokens.*remedy") as caught:
            call(ids_of(2, 65))
        assert caught.value.code == "context_overflow"


@pytest.mark.parametrize("ids", [[], [[1, 2]], [1.5, 2.0], ["a"], [-1], [211], [3, 4, 1 << 40]])
def test_bad_ids_are_refused(make_engine: EngineMaker, ids: Any) -> None:
    """InvalidIds from every entry, and the engine goes on."""
    engine = make_engine()
    for call in (engine.plan, engine.warm, engine.generate, engine.logits):
        with pytest.raises(InvalidIds) as caught:
            call(ids)
        assert caught.value.code == "invalid_ids"
    assert len(run(engine, [5], max_tokens=1)) == 1


@pytest.mark.parametrize("anchors", [[0], [-1], [4], [1, 99]])
def test_bad_anchors_are_refused(make_engine: EngineMaker, anchors: list[int]) -> None:
    """An anchor beyond the path is an error, not a state."""
    engine = make_engine()
    for call in (engine.generate, engine.warm):
        with pytest.raises(InvalidAnchors, match="1 to 3"):
            call([5, 6, 7], anchors=anchors)


def test_bad_sampling_ids_are_refused(make_engine: EngineMaker) -> None:
    """Ids that the model does not have are refused before anything is forwarded."""
    engine = make_engine()
    with pytest.raises(InvalidSampling):
        engine.generate([5], SamplingParams(force=[211]))
    assert engine.stats().forward_rows == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp8"},
        {"quant": "int3"},
        {"threads": 0},
        {"threads": True},
        {"threads": 1.5},
        {"ram_budget_bytes": 0},
        {"prefill_chunk": 0},
        {"prefill_chunk": -1},
        {"prefill_chunk": 10**9},
        {"max_batch": 0},
        {"anchor_interval": -5},
    ],
)
def test_bad_configuration_is_refused(fields: dict[str, Any]) -> None:
    """InvalidConfig names the field (chunk sizes 0, -1 and huge among them)."""
    with pytest.raises(InvalidConfig, match=next(iter(fields))) as caught:
        EngineConfig(**fields)
    assert caught.value.code == "invalid_config"


def test_unknown_settings_are_refused() -> None:
    """A misspelt setting is an error, not a default."""
    with pytest.raises(TypeError, match="prefil_chunk"):
        EngineConfig(prefil_chunk=3)  # type: ignore[call-arg]


def test_progress_counts_prefilled_rows(make_engine: EngineMaker) -> None:
    """`on_progress` sees each chunk and ends at the total, for the missing rows only."""
    engine = make_engine(prefill_chunk=50)
    ids = ids_of(1, 180)
    engine.warm(ids[:30])
    seen: list[tuple[int, int]] = []
    stream = engine.generate(
        ids,
        SamplingParams(max_tokens=1),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    list(stream)
    assert seen == [(50, 150), (100, 150), (150, 150)]


def test_cancel_between_steps_keeps_what_was_sampled(make_engine: EngineMaker) -> None:
    """After `cancel` the sampled ids still arrive; the state reached is an anchor."""
    engine = make_engine()
    ids = ids_of(1, 50)
    stream = engine.generate(ids, SamplingParams(max_tokens=3000))
    output = [next(stream).id, next(stream).id]
    stream.cancel()
    stream.cancel()
    output += [token.id for token in stream]
    assert stream.finish_reason == "cancelled"
    assert stream.usage.output_tokens == len(output) < 3000
    assert engine.plan(ids + output[:-1]).prefill_tokens == 0
    assert output == [token.id for token in run(engine, ids, max_tokens=len(output))]


def test_cancel_while_prefilling_and_while_waiting(make_engine: EngineMaker) -> None:
    """A request that has not sampled yet ends without tokens; rows already forwarded are kept."""
    engine = make_engine(prefill_chunk=16)
    started = threading.Event()
    go_on = threading.Event()

    def progress(done: int, total: int) -> None:
        started.set()
        assert go_on.wait(20)

    ids = ids_of(1, 200)
    stream = engine.generate(ids, SamplingParams(), on_progress=progress)
    queued = engine.generate(ids_of(2, 30), SamplingParams())
    assert started.wait(20)
    stream.cancel()
    queued.cancel()
    go_on.set()
    assert list(stream) == [] and list(queued) == []
    assert stream.finish_reason == queued.finish_reason == "cancelled"
    assert stream.usage.prefill_tokens == 16
    assert engine.plan(ids).reused_tokens == 16
    assert engine.plan(ids[:16]).prefill_tokens == 0


def test_leaving_the_loop_cancels(make_engine: EngineMaker) -> None:
    """`break`, `close` and dropping the object all end the request."""
    engine = make_engine()
    stream = engine.generate(ids_of(1, 10), SamplingParams(max_tokens=3000))
    for _ in stream:
        break
    wait_until(lambda: stream.finish_reason == "cancelled")
    closed = engine.generate(ids_of(2, 10), SamplingParams(max_tokens=3000))
    closed.close()
    assert closed.finish_reason == "cancelled" and list(closed) == []
    dropped = engine.generate(ids_of(3, 10), SamplingParams(max_tokens=3000))
    next(dropped)
    del dropped
    wait_until(lambda: engine.stats().running == 0)


def test_a_slow_consumer_stalls_nobody_else(make_engine: EngineMaker) -> None:
    """A stream that is not read stops after a few tokens; its neighbour runs to the end."""
    engine = make_engine()
    slow = engine.generate(ids_of(1, 20), SamplingParams(max_tokens=200))
    wait_until(lambda: slow.usage.output_tokens >= 1)
    fast = run(engine, ids_of(2, 20), max_tokens=200)
    assert len(fast) == 200
    assert slow.usage.output_tokens <= 32
    alone = [token.id for token in slow]
    assert len(alone) == 200
    assert alone == [token.id for token in run(make_engine(), ids_of(1, 20), max_tokens=200)]


def test_a_failing_request_reaches_its_caller_only(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside a batched pass: the neighbours' tokens are what they are alone, bit for
    bit, the culprit gets EngineFault, and the engine goes on."""
    prompts = [ids_of(seed, 40) for seed in range(3)]
    alone = [run(make_engine(), prompt, max_tokens=30, logprobs=2) for prompt in prompts]
    engine = make_engine()
    decoder = engine._model.decoder
    forward = decoder.forward

    def failing(batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        if 210 in batch.ids.tolist():
            raise RuntimeError("a fault in a kernel")
        return forward(batch, rows)

    monkeypatch.setattr(decoder, "forward", failing)
    streams = [engine.generate(p, SamplingParams(max_tokens=30, logprobs=2)) for p in prompts]
    bad = engine.generate(
        [5, 6, 7], SamplingParams(max_tokens=30, force=[8, 9, 210, 11, 12], logprobs=2)
    )
    seen = []
    with pytest.raises(EngineFault, match="a fault in a kernel") as caught:
        for token in bad:
            seen.append(token.id)
    assert seen == [8, 9, 210]
    assert caught.value.code == "engine_fault"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [list(stream) for stream in streams] == alone
    assert bad.finish_reason is None
    monkeypatch.undo()
    warm, cold = engine.logits([5, 6, 7, 8, 9]), engine.logits([5, 6, 7, 8, 9], reuse=False)
    assert float((warm - cold).abs().max()) <= 1e-4 * float(cold.max() - cold.min())


def test_a_failing_callback_reaches_its_caller_only(make_engine: EngineMaker) -> None:
    """An `on_progress` that raises ends its own request."""
    engine = make_engine()

    def progress(done: int, total: int) -> None:
        raise ValueError("a fault of the caller")

    bad = engine.generate(ids_of(1, 30), SamplingParams(), on_progress=progress)
    good = engine.generate(ids_of(2, 30), SamplingParams(max_tokens=4))
    with pytest.raises(EngineFault, match="a fault of the caller"):
        list(bad)
    assert len(list(good)) == 4


def test_plans_never_wait_for_the_owner_thread(make_engine: EngineMaker) -> None:
    """While the owner is held up, plan, anchors and stats answer."""
    engine = make_engine()
    ids = ids_of(1, 3000)
    engine.warm(ids[:100])
    held, release = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        held.set()
        assert release.wait(20)

    stream = engine.generate(ids_of(2, 30), SamplingParams(max_tokens=1), on_progress=progress)
    try:
        assert held.wait(20)
        assert engine.plan(ids).reused_tokens == 100
        assert engine.anchors(ids)[-1] == 100
        assert engine.stats().running == 1
    finally:
        release.set()
    assert len(list(stream)) == 1


def test_many_threads_generate_at_once(make_engine: EngineMaker) -> None:
    """Twelve threads, more requests than a batch holds: each gets its own tokens."""
    engine = make_engine(max_batch=3)
    prompts = [ids_of(seed, 10 + 7 * seed) for seed in range(12)]
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = [token.id for token in run(engine, prompts[index], max_tokens=15)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = make_engine()
    for index, prompt in enumerate(prompts):
        assert results[index] == [t.id for t in run(reference, prompt, max_tokens=15)]


def test_close_ends_everything(make_engine: EngineMaker) -> None:
    """Running and queued requests end as cancelled; later calls say that the engine is closed."""
    engine = make_engine()
    streams = [engine.generate(ids_of(s, 20), SamplingParams(max_tokens=3000)) for s in range(3)]
    next(streams[0])
    engine.close()
    engine.close()
    for stream in streams:
        list(stream)
        assert stream.finish_reason == "cancelled"
    for call in (engine.warm, engine.generate, engine.logits):
        with pytest.raises(EngineClosed) as caught:
            call([5])
        assert caught.value.code == "engine_closed"


def test_what_ran_in_between_is_named(make_engine: EngineMaker) -> None:
    """Two requests for one new path: the second's usage says why it cost less than planned."""
    engine = make_engine()
    ids = ids_of(1, 100)
    held, release = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        held.set()
        assert release.wait(20)

    blocker = engine.generate(ids_of(2, 5), SamplingParams(max_tokens=1), on_progress=progress)
    assert held.wait(20)
    first = engine.generate(ids, SamplingParams(max_tokens=1))
    longer = engine.generate([*ids, 5], SamplingParams(max_tokens=1))
    assert longer.plan.reused_tokens == 0
    release.set()
    for stream in (blocker, first, longer):
        list(stream)
    total = first.usage.prefill_tokens + longer.usage.prefill_tokens
    assert longer.usage.reused_tokens + longer.usage.prefill_tokens == 101
    if longer.usage.reused_tokens:
        assert total == 101 and "another request" in str(longer.usage.changed)
    else:
        assert longer.usage.changed is None
    assert first.usage.changed is None


def test_public_names() -> None:
    """`freetoken_runtime.__all__` resolves, and nothing else does."""
    import freetoken_runtime

    for name in freetoken_runtime.__all__:
        assert getattr(freetoken_runtime, name) is not None
    assert set(freetoken_runtime.__all__) <= set(dir(freetoken_runtime))
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        freetoken_runtime.Nope  # noqa: B018

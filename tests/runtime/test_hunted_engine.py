# SPDX-License-Identifier: Apache-2.0
"""Faults that were found by attacking the engine. Each test names its oracle."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.errors import (
    EngineClosed,
    EngineFault,
    InvalidAnchors,
    InvalidConfig,
    InvalidIds,
    WrongThread,
)

EngineMaker = Callable[..., Engine]


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(count)]


def in_time(action: Callable[[], Any], seconds: float = 30) -> Any:
    """The action's result, or its error; a hang is a failure of the test, not of the suite."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(action())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert box, "it hangs"
    return box[0]


@pytest.mark.parametrize("call", ["warm", "logits", "close", "detach", "set_budget", "iterate"])
def test_callbacks_that_wait_for_the_engine_are_refused(
    make_engine: EngineMaker, call: str
) -> None:
    """A callback runs in the engine's thread: waiting for that thread there is an error, not a
    deadlock, and the engine goes on."""
    engine = make_engine()
    actions: dict[str, Callable[[], Any]] = {
        "warm": lambda: engine.warm([4, 5]),
        "logits": lambda: engine.logits([4, 5]),
        "close": engine.close,
        "detach": engine.detach,
        "set_budget": lambda: engine.set_budget(ram_bytes=1 << 30),
        "iterate": lambda: list(engine.generate([4, 5], SamplingParams(max_tokens=1))),
    }
    stream = engine.generate(ids_of(1, 30), on_progress=lambda done, total: actions[call]())
    error = in_time(lambda: list(stream))
    assert isinstance(error, WrongThread)
    assert error.code == "wrong_thread"
    assert in_time(lambda: engine.warm([4, 5])).input_tokens == 2


def test_a_callback_that_raises_no_exception_reaches_its_caller_only(
    make_engine: EngineMaker,
) -> None:
    """KeyboardInterrupt, CancelledError and the like end the request, not the engine's thread."""
    engine = make_engine()

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt("in a callback")

    error = in_time(lambda: list(engine.generate(ids_of(1, 30), on_progress=progress)))
    assert isinstance(error, EngineFault)
    assert "in a callback" in str(error)
    assert in_time(lambda: engine.warm([4, 5])).input_tokens == 2


def test_nobody_waits_for_a_thread_that_has_ended(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the owner thread dies of a fault of our own, running and later requests and commands are
    told; none hangs, and `close` returns."""
    engine = make_engine()
    stream = engine.generate(ids_of(1, 30), SamplingParams(max_tokens=4000))
    assert in_time(lambda: next(stream)).id >= 0

    def broken(*args: object) -> None:
        raise RuntimeError("a broken scheduler")

    monkeypatch.setattr(engine._worker._scheduler, "next_rows", broken)
    error = in_time(lambda: list(stream))
    assert isinstance(error, EngineFault)
    assert "a broken scheduler" in str(error)
    assert isinstance(in_time(lambda: engine.warm([4, 5])), EngineClosed)
    assert isinstance(in_time(lambda: engine.set_budget(ram_bytes=1 << 30)), EngineClosed)
    assert in_time(engine.close) is None


def test_requests_that_arrive_with_the_closing_are_cancelled(
    make_engine: EngineMaker,
) -> None:
    """A request that is queued behind the closing is never started: oracle, no row is forwarded
    and no token comes out."""
    engine = make_engine()
    held, release = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        held.set()
        assert release.wait(30)

    first = engine.generate(ids_of(1, 30), SamplingParams(max_tokens=1), on_progress=progress)
    assert held.wait(30)
    late = engine.generate(ids_of(2, 30), SamplingParams(max_tokens=4000))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._owner._commands:
        time.sleep(0.001)
    release.set()
    closing.join(30)
    assert in_time(lambda: list(late)) == []
    assert late.finish_reason == "cancelled"
    assert first.finish_reason in ("cancelled", "length")


def test_a_forked_child_is_told(make_engine: EngineMaker) -> None:
    """The engine's thread does not survive fork(): every call in the child is an error at once,
    closing costs nothing, and the parent goes on."""
    engine = make_engine()
    stream = engine.generate(ids_of(1, 30), SamplingParams(max_tokens=200))
    next(stream)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends with a signal
        told = 0
        calls: list[Callable[[], Any]] = [
            lambda: engine.warm([4, 5]),
            lambda: engine.generate([4, 5]),
            lambda: engine.set_budget(ram_bytes=1 << 30),
            lambda: [None for _ in stream],
        ]
        for call in calls:
            try:
                call()
            except EngineClosed:
                told += 1
        stream.cancel()
        engine.close()
        os._exit(told)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), f"signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 4
    assert len(list(stream)) == 199


def test_misshapen_arguments_are_refused_by_name(make_engine: EngineMaker) -> None:
    """Ragged ids, positions that are no numbers, budgets that are no bytes: our own errors, from
    the caller's thread, and the engine goes on."""
    engine = make_engine()
    ragged: Any = [[4], [5, 6]]
    with pytest.raises(InvalidIds):
        engine.plan(ragged)
    wrong: list[Any] = [["x"], [1.0], [None], None, 5]
    for value in wrong:
        with pytest.raises(InvalidAnchors, match="anchors are not"):
            engine.warm([4, 5], anchors=value)
        with pytest.raises(InvalidAnchors, match="anchor_after are not"):
            engine.generate([4, 5], anchor_after=value)
    budgets: list[Any] = ["x", 0, -1, True, 1e9, float("nan")]
    for budget in budgets:
        with pytest.raises(InvalidConfig, match="ram_budget_bytes"):
            engine.set_budget(ram_bytes=budget)
    caches: list[Any] = ["a string", 5]
    for cache in caches:
        with pytest.raises(InvalidConfig, match="hash_cache"):
            EngineConfig(hash_cache=cache)
    assert engine.warm([4, 5], anchors=[1]).input_tokens == 2

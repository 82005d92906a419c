# SPDX-License-Identifier: Apache-2.0
"""Ids that a constraint leaves no choice about are forwarded together."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.engine_cases import close_to, hybrid_model, ids_of
from freetoken_runtime.weights import load

EngineMaker = Callable[[], Engine]


@pytest.fixture(params=["llama", "hybrid"])
def engines(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[EngineMaker]:
    """Engines whose fresh KV rows are NaN; closed at the end of the test."""
    config = EngineConfig(threads=1, prefill_chunk=64, anchor_interval=16, ram_budget_bytes=1 << 30)
    made: list[Engine] = []

    def make() -> Engine:
        model = load(tiny_llama) if request.param == "llama" else hybrid_model()
        made.append(Engine(model, resolve(config, read_host()), poison=True))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Spelled:
    """Forces a text of ids in runs, with a free id between two of them."""

    def __init__(self, runs: Sequence[Sequence[int]], at: int = 0, inside: int = 0) -> None:
        self.runs, self.at, self.inside = runs, at, inside

    @property
    def accepting(self) -> bool:
        return self.at >= len(self.runs)

    def mask(self, row: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        row[0] = -np.inf

    def accept(self, token_id: int) -> None:
        left = self.forced()
        assert not left or left[0] == token_id
        self.at, self.inside = (self.at, self.inside + 1) if left else (self.at + 1, 0)

    def forced(self) -> Sequence[int]:
        return self.runs[self.at][self.inside :] if self.at < len(self.runs) else ()

    def copy(self) -> "Spelled":
        return Spelled(self.runs, self.at, self.inside)


def test_what_a_constraint_forces_is_forwarded_at_once(engines: EngineMaker) -> None:
    """Oracle: the same ids fed one by one with `force`: logprobs agree, anchors are where they
    would be, and the rows of the forced ids cost no pass of their own."""
    runs = [[9, 8, 7, 6, 5], [44, 45], [50] * 40]
    constraint = Spelled(runs)
    engine = engines()
    stream = engine.generate(
        ids_of(3, 30), SamplingParams(max_tokens=60, constraint=constraint), anchor_after={7}
    )
    passes = count_passes(engine)
    tokens = list(stream)
    ids = [token.id for token in tokens]
    assert [ids[:5], ids[6:8], ids[9:49]] == runs and len(ids) == 60
    assert constraint.at == 0, "the one passed in is not advanced"
    assert passes() < 30
    other = engines()
    expected = list(
        other.generate(ids_of(3, 30), SamplingParams(max_tokens=60, force=ids), anchor_after={7})
    )
    for token, one in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(one.logprob, abs=1e-4)
    path = [*ids_of(3, 30), *ids]
    assert list(engine.anchors(path)) == list(other.anchors(path))
    assert close_to(engine.logits(path), engine.logits(path, reuse=False))


def test_a_stop_id_among_forced_ids_ends_the_request_there(engines: EngineMaker) -> None:
    """Oracle: the ids up to the stop id, by hand; the state behind them is exact."""
    engine = engines()
    constraint = Spelled([[9, 8, 7, 6]])
    params = SamplingParams(max_tokens=60, constraint=constraint, stop_ids=frozenset([7]))
    stream = engine.generate(ids_of(3, 30), params)
    assert [token.id for token in stream] == [9, 8, 7] and stream.finish_reason == "stop"
    path = [*ids_of(3, 30), 9, 8, 7]
    assert close_to(engine.logits(path), engine.logits(path, reuse=False))


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_forced_ids_respect_the_limit(engines: EngineMaker, most: int) -> None:
    """Oracle: the count."""
    engine = engines()
    params = SamplingParams(max_tokens=most, constraint=Spelled([[9, 8, 7, 6, 5]]))
    stream = engine.generate(ids_of(3, 30), params)
    assert [token.id for token in stream] == [9, 8, 7, 6, 5][:most]
    assert stream.finish_reason == "length"


def count_passes(engine: Engine) -> Callable[[], int]:
    """How many passes it makes from now on."""
    made: list[int] = []
    forward = engine._runner.forward

    def counted(works: Any) -> Any:
        made.append(1)
        return forward(works)

    engine._runner.forward = counted  # type: ignore[method-assign]
    return lambda: len(made)

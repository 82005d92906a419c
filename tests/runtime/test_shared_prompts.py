# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive together and begin alike: what they share is forwarded once."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.generation import Generation
from freetoken_runtime.testing import build_checkpoint

EngineMaker = Callable[..., Engine]
GREEDY = SamplingParams(max_tokens=8)


def ids_of(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 211, count)]


def together(
    engine: Engine, prompts: Sequence[list[int]], anchors: Sequence[int] = ()
) -> list[Generation]:
    """Requests that the engine finds in its queue at once. The owner thread is held meanwhile."""
    free, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait(20)

    holder = threading.Thread(target=engine._owner.call, args=(hold,))
    holder.start()
    held.wait(20)
    made = [engine.generate(prompt, GREEDY, anchors=anchors) for prompt in prompts]
    free.set()
    holder.join()
    return made


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_prompts_that_begin_alike_forward_their_beginning_once(
    make_engine: EngineMaker, tmp_path: Path, family: str
) -> None:
    """Oracles: the runner's rows; the greedy tokens of each prompt alone."""
    shared = ids_of(1, 300)
    prompts = [shared + ids_of(seed, 20) for seed in (2, 3, 4)]
    anchors = [len(shared)]
    build_checkpoint(tmp_path, family)
    alone = []
    for prompt in prompts:
        with make_engine(folder=tmp_path) as engine:
            alone.append([token.id for token in engine.generate(prompt, GREEDY, anchors=anchors)])
    engine = make_engine(folder=tmp_path)
    before = engine.stats().forward_rows
    made = together(engine, prompts, anchors)
    assert [[token.id for token in one] for one in made] == alone
    prefilled = sorted(one.usage.prefill_tokens for one in made)
    assert prefilled == [20, 20, len(shared) + 20]
    decoded = sum(one.usage.output_tokens - 1 for one in made)
    assert engine.stats().forward_rows - before == sum(prefilled) + decoded
    assert sum(one.usage.changed is not None for one in made) == 2, "what came between is named"


def test_the_same_prompt_three_times_at_once(make_engine: EngineMaker) -> None:
    """Oracle: the runner: all but one forward at most their last row."""
    engine = make_engine()
    made = together(engine, [ids_of(1, 200)] * 3)
    first, *others = [[token.id for token in one] for one in made]
    assert others == [first, first]
    assert sorted(one.usage.prefill_tokens for one in made)[:2] in ([0, 0], [0, 1], [1, 1])


def test_prompts_that_share_little_do_not_wait(make_engine: EngineMaker) -> None:
    """Oracle: each forwards all of itself, and the engine runs them side by side."""
    engine = make_engine()
    prompts = [ids_of(1, 30) + ids_of(seed, 200) for seed in (2, 3)]
    made = together(engine, prompts)
    for one, prompt in zip(made, prompts, strict=True):
        list(one)
        assert one.usage.prefill_tokens == len(prompt)


def test_who_waits_goes_on_when_the_other_one_is_cancelled(make_engine: EngineMaker) -> None:
    """Oracle: the tokens of a run alone; a cancelled waiter ends."""
    shared = ids_of(1, 2000)
    prompts = [shared + ids_of(seed, 9) for seed in (2, 3, 4)]
    with make_engine(prefill_chunk=16) as engine:
        alone = [token.id for token in engine.generate(prompts[2], GREEDY)]
    engine = make_engine(prefill_chunk=16)
    first, second, third = together(engine, prompts)
    second.cancel()
    assert list(second) == []
    first.cancel()
    assert [token.id for token in third] == alone
    assert list(first) == []
    reused, prefilled = third.usage.reused_tokens, third.usage.prefill_tokens
    assert reused + prefilled == len(prompts[2])

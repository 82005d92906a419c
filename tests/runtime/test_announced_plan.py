# SPDX-License-Identifier: Apache-2.0
"""A plan that was shown before the request: what happened is said against it."""

from collections.abc import Callable

import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.errors import InvalidIds

EngineMaker = Callable[..., Engine]
ONE = SamplingParams(max_tokens=1)


def test_an_announced_plan_is_the_one_that_is_kept_or_explained(make_engine: EngineMaker) -> None:
    """Oracle: counting by hand. What another request did after the plan is named; a plan made now
    would have hidden it."""
    ids = [*range(3, 203)]
    with make_engine() as engine:
        cold = engine.plan(ids)
        engine.warm(ids[:150])
        stream = engine.generate(ids, ONE, announced=cold)
        assert stream.plan is cold
        list(stream)
        assert (stream.usage.reused_tokens, stream.usage.prefill_tokens) == (150, 50)
        assert stream.usage.changed == "another request computed 150 tokens of the path"
        warm = engine.plan(ids)
        engine.forget(ids, 100)
        stream = engine.generate(ids, ONE, announced=warm)
        list(stream)
        assert (warm.reused_tokens, stream.usage.reused_tokens) == (200, 100)
        assert str(stream.usage.changed).startswith("100 tokens were lost")
        again = engine.plan(ids)
        stream = engine.generate(ids, ONE, announced=again)
        list(stream)
        assert stream.usage.reused_tokens == again.reused_tokens and stream.usage.changed is None


def test_a_plan_of_another_path_is_refused(make_engine: EngineMaker) -> None:
    """Oracle: the error's code; the engine goes on."""
    with make_engine() as engine:
        with pytest.raises(InvalidIds, match="another path") as caught:
            engine.generate([1, 2, 3], ONE, announced=engine.plan([1, 2]))
        assert caught.value.code == "invalid_ids"
        assert len(list(engine.generate([1, 2, 3], ONE))) == 1

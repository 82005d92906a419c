# SPDX-License-Identifier: Apache-2.0
"""Extreme but valid sampling settings. Oracle: what the setting means in exact arithmetic."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from freetoken_runtime import SamplingParams
from freetoken_runtime.errors import InvalidSampling
from freetoken_runtime.sampler import Sampler

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, -math.inf])


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-45, 1e-40, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_the_coldest_temperatures_choose_the_best(
    temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, **filters)
    assert Sampler(params, 5, []).sample(LOGITS).id == 1


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-40, 1000.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1000.0])
def test_extreme_penalties_keep_scores_usable(penalty: float, temperature: float) -> None:
    """Below 1 a penalty favours what was seen: the only seen id with a positive logit wins. Far
    above 1 it may choose any id but the impossible one."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=1)
    chosen = Sampler(params, 5, [0, 2]).sample(LOGITS).id
    assert chosen == 0 if penalty < 1 else chosen in (0, 1, 2, 3)


def test_ids_may_come_from_arrays_and_iterators() -> None:
    array: Any = np.array([3, 1])
    stops: Any = [1, 2]
    once: Any = iter([3, 1])
    for force in (array, once):
        params = SamplingParams(force=force, stop_ids=stops)
        sampler = Sampler(params, 5, [])
        assert [sampler.sample(LOGITS).id for _ in range(3)] == [3, 1, 1]
        assert sampler.is_stop(1)


@pytest.mark.parametrize("field", ["force", "stop_ids"])
@pytest.mark.parametrize("value", [5, "ab", [1.5], [None]])
def test_ids_that_are_none_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidSampling, match=field):
        SamplingParams(**{field: value})

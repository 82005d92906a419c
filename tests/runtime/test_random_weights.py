# SPDX-License-Identifier: Apache-2.0
"""Random models. Oracle: the same call again, and other seeds."""

import pytest
import torch

from freetoken_runtime.engine_cases import hybrid_spec
from freetoken_runtime.random_weights import RandomWeights


def weights(seed: int) -> dict[str, torch.Tensor]:
    source = RandomWeights(hybrid_spec(), seed)
    source.check()
    return {name: source.read(name) for name in hybrid_spec().parameter_shapes()}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_names_its_weights(seed: int) -> None:
    """Equal for equal seeds, all different for others and among parameters of one shape."""
    first, again, other = weights(seed), weights(seed), weights(seed + 1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    experts = [first[f"layers.0.experts.{index}.gate"] for index in range(12)]
    assert all(not torch.equal(experts[0], expert) for expert in experts[1:])
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())

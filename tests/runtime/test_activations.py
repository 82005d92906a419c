# SPDX-License-Identifier: Apache-2.0
"""Activations: values of torch's in fp64, and bits that do not depend on the place in memory."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from freetoken_runtime.kernels.activations import (
    gelu_tanh,
    relu_squared,
    sigmoid,
    silu,
    softplus,
)

Activation = Callable[[torch.Tensor], torch.Tensor]

ORACLES: dict[str, tuple[Activation, Activation]] = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, functional.silu),
    "relu²": (relu_squared, lambda x: functional.relu(x) ** 2),
    "gelu": (gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    "softplus": (softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
}


@pytest.fixture(params=ORACLES)
def pair(request: pytest.FixtureRequest) -> tuple[Activation, Activation]:
    return ORACLES[request.param]


def test_values_equal_torch_in_fp64(pair: tuple[Activation, Activation]) -> None:
    """Oracle: torch's function in fp64, 1e-6 of the value or of 1; the ends of the range too."""
    ours, oracle = pair
    x = torch.cat((torch.randn(3000) * 6, torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4])))
    expected = oracle(x.double())
    assert bool(((ours(x) - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all())


def test_bits_do_not_depend_on_the_place_in_memory(pair: tuple[Activation, Activation]) -> None:
    """Oracle: the same numbers one by one, in rows, in columns and from another offset."""
    ours, _ = pair
    x = torch.randn(60, 333) * 5
    whole = ours(x)
    assert torch.equal(torch.cat([ours(row) for row in torch.split(x, 1)]), whole)
    assert torch.equal(torch.cat([ours(column) for column in torch.split(x, 1, 1)], 1), whole)
    assert torch.equal(ours(torch.cat((x, x), 1)[:, :333]), whole)
    assert torch.equal(ours(x.flatten()[7:].clone()), whole.flatten()[7:])


def test_the_input_is_kept(pair: tuple[Activation, Activation]) -> None:
    """Oracle: a copy."""
    x = torch.randn(50)
    kept = x.clone()
    pair[0](x)
    assert torch.equal(x, kept)


def test_torchs_own_functions_do_depend_on_it() -> None:
    """Oracle: torch itself: the reason for this module. If it fails, torch has changed, and
    silu and sigmoid can be used again."""
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("seen with vector instructions of x86 only")
    x = torch.randn(4096) * 4
    for function in (torch.sigmoid, functional.silu):
        single = torch.cat([function(one) for one in torch.split(x, 1)])
        assert not torch.equal(function(x), single)

# SPDX-License-Identifier: Apache-2.0
"""The short convolution between gates against its formula; against transformers' in
`test_recurrent_mixers`."""

from dataclasses import dataclass

import pytest
import torch

from freetoken_runtime.batch import Batch, Form, RowGroup, SequenceRows
from freetoken_runtime.layers.linear import DenseLinear
from freetoken_runtime.layers.short_conv import ShortConv
from freetoken_runtime.specs.convolution import ShortConvSpec
from freetoken_runtime.testing import ListState

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, CHANNELS = 14, 10


@dataclass(frozen=True)
class Weights:
    matrix_in: torch.Tensor
    matrix_out: torch.Tensor
    conv: torch.Tensor  # [C, 1, K]
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


def random_weights(kernel: int, bias: bool) -> Weights:
    torch.manual_seed(kernel)
    biases = (torch.randn(3 * CHANNELS), torch.randn(HIDDEN), torch.randn(CHANNELS))
    return Weights(
        torch.randn(3 * CHANNELS, HIDDEN),
        torch.randn(HIDDEN, CHANNELS),
        torch.randn(CHANNELS, 1, kernel),
        biases if bias else None,
    )


def mixer_of(weights: Weights) -> ShortConv:
    of_in, of_out, of_conv = weights.biases or (None, None, None)
    return ShortConv(
        input=DenseLinear(weights.matrix_in, of_in),
        output=DenseLinear(weights.matrix_out, of_out),
        taps=weights.conv.squeeze(1).t().contiguous(),
        conv_bias=of_conv,
    )


def by_formula(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """out(c_t · (Σ_k w_k · b_{t-k} x_{t-k} + bias)) in fp64, row by row."""
    kernel = weights.conv.shape[2]
    of_in, of_out, of_conv = (
        [bias.double() for bias in weights.biases]
        if weights.biases
        else [torch.zeros(1, dtype=torch.float64)] * 3
    )
    b, c, inner = (x.double() @ weights.matrix_in.double().t() + of_in).chunk(3, 1)
    gated = b * inner
    outs = []
    for row in range(len(x)):
        mixed = torch.zeros(CHANNELS, dtype=torch.float64)
        for back in range(min(kernel, row + 1)):
            mixed += weights.conv[:, 0, kernel - 1 - back].double() * gated[row - back]
        outs.append(c[row] * (mixed + of_conv))
    return torch.stack(outs) @ weights.matrix_out.double().t() + of_out


def run(
    mixer: ShortConv, state: ListState, x: torch.Tensor, cuts: tuple[int, ...] = ()
) -> torch.Tensor:
    form = Form.FEW if len(x) < 16 else Form.MANY
    nothing = torch.zeros(len(x), dtype=torch.long)
    rows = [SequenceRows(state, 0, len(x), cuts)]
    out = mixer(x, Batch(nothing, nothing, rows, [RowGroup(0, len(x), form)]), 0, None)
    state.commit([0] * len(x))
    return out


def new_state(kernel: int) -> ListState:
    return ListState([ShortConvSpec(CHANNELS, kernel).state()])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("passes", [[1], [2], [40], [1, 1, 1, 1, 30], [20, 3, 1, 17]], ids=str)
def test_a_sequence_in_passes_equals_the_formula(
    passes: list[int], kernel: int, bias: bool
) -> None:
    """Oracle: the formula in fp64 over the whole sequence; passes shorter than the kernel too."""
    weights, state = random_weights(kernel, bias), new_state(kernel)
    x = torch.randn(sum(passes), HIDDEN)
    ours = torch.cat([run(mixer_of(weights), state, part) for part in torch.split(x, passes)])
    expected = by_formula(x, weights)
    difference = (ours.double() - expected).abs().max() / (expected.max() - expected.min())
    assert float(difference) < 1e-6


def test_the_state_is_the_gated_rows_before() -> None:
    """Oracle: b · x of the last K - 1 rows, at a cut and at the end; zeros before the first row."""
    weights, state = random_weights(4, False), new_state(4)
    x = torch.randn(20, HIDDEN)
    run(mixer_of(weights), state, x, (2, 9))
    b, _, inner = (x @ weights.matrix_in.t()).chunk(3, 1)
    gated = torch.cat((torch.zeros(3, CHANNELS), b * inner))
    for rows in (2, 9, 20):
        (tail,) = state.cut(rows).fixed(0)
        torch.testing.assert_close(tail, gated[rows : rows + 3], rtol=1e-5, atol=1e-5)


def test_the_spec_knows_its_weights_and_its_state() -> None:
    """Oracle: the shapes written out by hand."""
    spec = ShortConvSpec(channels=10, kernel=3, bias=True)
    assert spec.parameter_shapes(14) == {
        "in": (30, 14),
        "in.bias": (30,),
        "conv": (10, 1, 3),
        "conv.bias": (10,),
        "out": (14, 10),
        "out.bias": (14,),
    }
    assert spec.rope is None
    assert spec.state().bytes_per_token() == 0
    assert spec.state().bytes_per_anchor() == 4 * 2 * 10
    assert not spec.state().sliceable

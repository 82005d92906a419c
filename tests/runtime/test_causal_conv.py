# SPDX-License-Identifier: Apache-2.0
"""The causal depthwise convolution against its reference and against torch's."""

import pytest
import torch

from freetoken_runtime.kernels.causal_conv import cpu, reference

LENGTHS = [1, 2, 3, 4, 63, 64, 65, 257]


def draw(
    rows: int, channels: int, width: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, tail, taps and bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    taps = normal(channels, width).t().contiguous()
    return normal(rows, channels), normal(width - 1, channels), taps, normal(channels)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", LENGTHS)
def test_equals_the_reference(rows: int, width: int) -> None:
    """Oracle: sums written out in fp64; the tail is bit for bit."""
    x, tail, taps, bias = draw(rows, 37, width)
    for with_bias in (None, bias):
        expected, expected_tail = reference.convolve(x, tail, taps, with_bias)
        out, after = cpu.convolve(x, tail, taps, with_bias)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
        assert torch.equal(after, expected_tail)


@pytest.mark.parametrize("rows", LENGTHS)
def test_the_reference_equals_torch(rows: int) -> None:
    """Oracle: `conv1d` of torch with the tail in front, groups = channels, a checkpoint's
    [C, 1, K] weight."""
    x, tail, taps, bias = draw(rows, 20, 4)
    weight = taps.t()[:, None].double()
    signal = torch.cat((tail, x)).t()[None].double()
    expected = torch.nn.functional.conv1d(signal, weight, bias.double(), groups=20)[0].t()
    out, _ = reference.convolve(x, tail, taps, bias)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 12, [2, 1, 3, 5, 1], [11, 1], [1, 11], [64, 1, 63, 65]])
def test_cut_anywhere(sizes: list[int]) -> None:
    """Oracle: one pass, bit for bit: rows are sums of the same products in the same order."""
    x, tail, taps, bias = draw(sum(sizes), 37, 4, seed=1)
    whole, last = cpu.convolve(x, tail, taps, bias)
    outs = []
    for part in torch.split(x, sizes):
        out, tail = cpu.convolve(part, tail, taps, bias)
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(tail, last)


def test_columns_of_a_wider_projection_and_owned_results() -> None:
    """Oracle: a contiguous copy. Neither result shares memory with an argument or is a view of
    something larger, and no argument is changed."""
    wide, tail, taps, bias = draw(9, 50, 4)
    x, tail, taps, bias = wide[:, 7:27], tail[:, 7:27], taps[:, :20].contiguous(), bias[:20]
    before = [t.clone() for t in (x, tail, taps, bias)]
    out, after = cpu.convolve(x, tail, taps, bias)
    plain, _ = cpu.convolve(x.clone(), tail.clone(), taps, bias)
    assert torch.equal(out, plain)
    for result in (out, after):
        assert result.untyped_storage().nbytes() == result.nbytes
    assert all(torch.equal(a, b) for a, b in zip(before, (x, tail, taps, bias), strict=True))


def test_a_kernel_of_another_width_is_our_own_error() -> None:
    """Oracle: the docstring: K - 1 carried rows for K taps, at least one row."""
    x, tail, taps, _ = draw(5, 6, 4)
    with pytest.raises(AssertionError):
        cpu.convolve(x, tail[1:], taps)
    with pytest.raises(AssertionError):
        cpu.convolve(x[:0], tail, taps)

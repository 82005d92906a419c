# SPDX-License-Identifier: Apache-2.0
"""Integer weights as values, before any kernel packs them.

Scales and zeros are bfloat16 from here on, rounded once: every kernel form computes with the same
weights and only activations are rounded differently.
"""

from dataclasses import dataclass

import torch

_SLICE_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Int8Values:
    """w[n, k] = values[n, k] · scales[n]."""

    values: torch.Tensor  # [N, K] int8, -127..127
    scales: torch.Tensor  # [N] bf16


@dataclass(frozen=True)
class Int4Values:
    """w[n, k] = (values[n, k] - 8) · scales[n, k // size] + zeros[n, k // size].

    K is padded to whole groups; `inputs` is the K of the model."""

    values: torch.Tensor  # [N, K padded] uint8, 0..15
    scales: torch.Tensor  # [N, K padded / size] bf16
    zeros: torch.Tensor  # [N, K padded / size] bf16
    size: int
    inputs: int


def quantise_int8(weight: torch.Tensor) -> Int8Values:
    """Symmetric, one scale per output row, nearest. weight [N, K], finite."""
    return stack_int8([_int8_slice(rows) for rows in _slices(weight)])


def _int8_slice(weight: torch.Tensor) -> Int8Values:
    steps = weight.to(torch.float32, copy=True)
    largest = torch.maximum(steps.amax(1).abs(), steps.amin(1).abs())
    scales = (largest / 127).bfloat16()
    divisors = torch.where(scales > 0, scales, 1.0).float()
    values = steps.div_(divisors[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Values(values, scales)


def quantise_int4(weight: torch.Tensor, size: int) -> Int4Values:
    """Asymmetric, one scale and zero per `size` weights of a row, nearest. weight [N, K], finite.
    A last group that K does not fill is padded with zeros."""
    return stack_int4([_int4_slice(rows, size) for rows in _slices(weight)])


def _int4_slice(weight: torch.Tensor, size: int) -> Int4Values:
    outputs, inputs = weight.shape
    steps = torch.zeros(outputs, -(-inputs // size), size)
    steps.view(outputs, -1)[:, :inputs] = weight
    low, high = steps.amin(-1), steps.amax(-1)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    divisors = torch.where(scales > 0, scales, 1.0).float()
    steps.sub_(zeros.float()[..., None]).div_(divisors[..., None])
    values = steps.round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return Int4Values(values.view(outputs, -1), scales, zeros, size, inputs)


def _slices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows in slices, so that temporaries stay small beside a large matrix."""
    return torch.split(weight, max(1, _SLICE_ELEMENTS // weight.shape[1]))


def int4_from_groups(
    values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, size: int
) -> Int4Values:
    """Integers of a file kept as they are: w = q · scale + minimum, so zero = minimum + 8 scale.
    values [N, K] uint8, scales and minimums [N, K / size] fp32."""
    zeros = (minimums + 8 * scales).bfloat16()
    return Int4Values(values, scales.bfloat16(), zeros, size, values.shape[1])


def stack_int8(parts: list[Int8Values]) -> Int8Values:
    """Matrices with equal K, stacked along their outputs."""
    if len(parts) == 1:
        return parts[0]
    return Int8Values(
        torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    )


def stack_int4(parts: list[Int4Values]) -> Int4Values:
    """Matrices with equal K and group size, stacked along their outputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all((part.size, part.inputs) == (first.size, first.inputs) for part in parts)
    return Int4Values(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
        first.size,
        first.inputs,
    )

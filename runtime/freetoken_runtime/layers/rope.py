# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: tables of cos and sin, grown as positions come, and their application."""

import math

import torch

from ..specs.rope import FactorScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

_FIRST_ROWS = 1024


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] fp32, rounded as transformers rounds them: angles reach thousands of radians, so
    another rounding of a frequency would show in the logits."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    powers = spec.theta**exponents
    scaling = spec.scaling
    if isinstance(scaling, YarnScaling):
        return _yarn(spec, scaling, powers)
    inverse = 1.0 / powers
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, FactorScaling):
        return inverse / torch.tensor(scaling.factors, dtype=torch.float32)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(scaling, inverse)
    return inverse


def _llama3(scaling: Llama3Scaling, inverse: torch.Tensor) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_context
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > context / low, inverse / scaling.factor, inverse)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, smoothed, scaled)


def _yarn(spec: RopeSpec, scaling: YarnScaling, powers: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        turns = math.log(scaling.original_context / (rotations * 2 * math.pi))
        return spec.dim * turns / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    steps = torch.arange(spec.dim // 2, dtype=torch.float32)
    keep = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep


class RopeTable:
    """cos and sin of every position up to the largest one asked for. Mutable: it grows by doubling
    on the owner thread."""

    def __init__(self, spec: RopeSpec) -> None:
        self._inverse = inverse_frequencies(spec)
        scaling = spec.scaling
        self._factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        self._cos = self._sin = torch.empty(0, 1, spec.dim)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] int64 -> cos, sin [T, 1, dim] fp32; the first half of sin is negated, as
        `rotate` needs it."""
        self._grow(int(positions.max()) + 1)
        return self._cos[positions], self._sin[positions]

    def _grow(self, rows: int) -> None:
        have = len(self._cos)
        if rows <= have:
            return
        count = max(rows, 2 * have, _FIRST_ROWS)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * self._inverse
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), -1)[:, None]
        self._sin = torch.cat((-sin, sin), -1)[:, None]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, heads, D] -> copy, in `out` if given, whose first `dim` dimensions are rotated; cos and
    sin from `RopeTable.rows`."""
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin, out=out)
    return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), -1, out=out)

# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: which dimensions turn, how fast, and how a longer context slows them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin."""

    factor: float
    attention_factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class FactorScaling:
    """One divisor per frequency, as GGUF files store Llama 3 scaling (`rope_freqs`)."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions over the first `dim` dimensions of a head, halves paired (dimension i with
    i + dim / 2). A checkpoint that pairs neighbours has its rows reordered when it is loaded."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None

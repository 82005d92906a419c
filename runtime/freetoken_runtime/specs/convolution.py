# SPDX-License-Identifier: Apache-2.0
"""A short convolution between two gates, as in LFM2."""

from dataclasses import dataclass

from ..spec import BufferSpec, StateSpec


@dataclass(frozen=True)
class ShortConvSpec:
    """b, c, x = in h; out(c · conv(b · x)). `channels` each; the convolution sees `kernel` rows.
    `bias`: of both matrices and of the convolution."""

    channels: int
    kernel: int
    bias: bool = False

    @property
    def rope(self) -> None:
        return None

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]."""
        shapes: dict[str, tuple[int, ...]] = {
            "in": (3 * self.channels, hidden_size),
            "conv": (self.channels, 1, self.kernel),
            "out": (hidden_size, self.channels),
        }
        if self.bias:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
        return shapes

    def state(self) -> StateSpec:
        return StateSpec(fixed=(BufferSpec("conv", (self.kernel - 1, self.channels)),))

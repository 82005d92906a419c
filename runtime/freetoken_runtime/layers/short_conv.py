# SPDX-License-Identifier: Apache-2.0
"""The short convolution between two gates. Its state is the convolution's last rows."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..kernels.causal_conv.cpu import convolve
from ..specs.convolution import ShortConvSpec
from .linear import Linear
from .parts import Parts, Rope
from .recurrent import Buffers, scan_sequences


@dataclass(frozen=True)
class ShortConv:
    """The mixer of one layer. `input` yields b, c and x side by side."""

    input: Linear
    output: Linear
    taps: torch.Tensor  # [kernel, channels] fp32
    conv_bias: torch.Tensor | None  # [channels] fp32

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; hands the state of each sequence on."""
        rows = self.input(x, batch.groups).float()
        return self.output(scan_sequences(rows, batch, layer, self._piece), batch.groups)

    def _piece(self, rows: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """Projected rows [n, 3 channels] and (tail,) -> [n, channels] and the next tail."""
        b, c, x = rows.chunk(3, 1)
        out, tail = convolve(b * x, buffers[0], self.taps, self.conv_bias)
        return out.mul_(c), (tail,)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.conv_bias is None else self.conv_bias.nbytes
        return self.taps.nbytes + bias + self.input.size_bytes + self.output.size_bytes


def build(spec: ShortConvSpec, parts: Parts) -> ShortConv:
    return ShortConv(
        input=parts.linear("in"),
        output=parts.linear("out"),
        taps=parts.tensor("conv").squeeze(1).t().contiguous(),
        conv_bias=parts.tensor("conv.bias") if spec.bias else None,
    )

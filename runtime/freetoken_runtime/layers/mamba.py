# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer. Its state is the convolution's last rows and one matrix per head."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..kernels.activations import silu
from ..kernels.causal_conv.cpu import convolve
from ..kernels.mamba2 import cpu as mamba2
from ..kernels.mamba2.parameters import ScanParameters
from ..specs.mamba import Mamba2Spec
from .linear import Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .recurrent import Buffers, scan_sequences


@dataclass(frozen=True)
class Mamba2:
    """The mixer of one layer. `input` yields z, x, B, C and dt side by side."""

    spec: Mamba2Spec
    input: Linear
    output: Linear
    taps: torch.Tensor  # [kernel, channels] fp32
    conv_bias: torch.Tensor | None  # [channels] fp32
    scan: ScanParameters
    norm: RmsNorm | None
    multipliers: torch.Tensor | None  # one per output of `input`, fp32

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; hands the state of each sequence on."""
        rows = self.input(x, batch.groups).float()
        if self.multipliers is not None:
            rows = rows * self.multipliers
        return self.output(scan_sequences(rows, batch, layer, self._piece), batch.groups)

    def _piece(self, rows: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """Projected rows [n, ·] and (tail, state) -> gated rows [n, width] and the next two."""
        spec, count = self.spec, len(rows)
        tail, state = buffers
        width, _, keys, _, heads = spec.part_widths
        z, mixed, dt = torch.split(rows, [width, spec.channels, heads], 1)
        convolved, tail = convolve(mixed, tail, self.taps, self.conv_bias)
        x, b, c = torch.split(silu(convolved), [width, keys, keys], 1)
        y, state = mamba2.scan(
            x.reshape(count, heads, spec.head_dim),
            dt,
            b.reshape(count, spec.num_groups, spec.state_size),
            c.reshape(count, spec.num_groups, spec.state_size),
            state,
            self.scan,
        )
        return self._gate(y.reshape(count, width), z), (tail, state)

    def _gate(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y and z [n, width] -> [n, width]; norms are over each group by itself."""
        gate = silu(z)
        if self.norm is None:
            return gate.mul_(y)
        if self.spec.norm == "of_gated":
            return self._normed(gate.mul_(y))
        return self._normed(y).mul_(gate)

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None
        size = self.spec.width // self.spec.num_groups
        grouped = y.view(len(y), self.spec.num_groups, size)
        return torch.rms_norm(grouped, (size,), None, self.norm.eps).view_as(y) * self.norm.weight

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    @property
    def size_bytes(self) -> int:
        scan = self.scan
        small = (self.taps, self.conv_bias, self.multipliers, scan.rates, scan.skip, scan.dt_bias)
        total = sum(tensor.nbytes for tensor in small if tensor is not None)
        norm = 0 if self.norm is None else self.norm.size_bytes
        return total + norm + self.input.size_bytes + self.output.size_bytes


def build(spec: Mamba2Spec, parts: Parts) -> Mamba2:
    multipliers = None
    if spec.multipliers is not None:
        sizes = zip(spec.multipliers, spec.part_widths, strict=True)
        multipliers = torch.cat([torch.full((size,), value) for value, size in sizes])
    return Mamba2(
        spec=spec,
        input=parts.linear("in"),
        output=parts.linear("out"),
        taps=parts.tensor("conv").squeeze(1).t().contiguous(),
        conv_bias=parts.tensor("conv.bias") if spec.conv_bias else None,
        scan=ScanParameters(
            rates=-parts.tensor("a_log").exp(),
            skip=parts.tensor("skip"),
            dt_bias=parts.tensor("dt_bias"),
            dt_min=spec.dt_min,
            dt_max=spec.dt_max,
        ),
        norm=None if spec.norm is None else parts.norm("gate_norm", offset=0.0),
        multipliers=multipliers,
    )

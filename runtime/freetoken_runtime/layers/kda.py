# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention. Its state is the convolution's last rows and one matrix per head."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..kernels.activations import sigmoid, silu, softplus
from ..kernels.causal_conv.cpu import convolve
from ..kernels.kda import cpu as kda
from ..specs.gated_delta import KdaSpec
from .gated_delta import DeltaRows, unit
from .linear import DenseLinear, Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .recurrent import Buffers, scan_sequences


@dataclass(frozen=True)
class Kda:
    """The mixer of one layer. `input` yields q, k, v and what `gate` widens, side by side.
    `control` yields what `decay` widens, and b; both are fp32 whatever the quantisation: their
    errors would be multiplied up over all later rows."""

    spec: KdaSpec
    input: Linear
    gate: Linear
    control: DenseLinear
    decay: DenseLinear
    output: Linear
    taps: torch.Tensor  # [kernel, 3 · width] fp32
    rates: torch.Tensor  # [H, 1] fp32: -exp(a_log)
    dt_bias: torch.Tensor  # [width] fp32
    norm: RmsNorm

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; hands the state of each sequence on."""
        width, dim, heads = self.spec.width, self.spec.head_dim, self.spec.num_heads
        rows = self.input(x, batch.groups).float()
        mixed, narrow = torch.split(rows, [3 * width, dim], 1)
        a, b = torch.split(self.control(x, batch.groups), [dim, heads], 1)
        strengths = sigmoid(b)
        wide = self.decay(a, batch.groups) + self.dt_bias
        decays = softplus(wide).view(len(x), heads, dim).mul_(self.rates)
        y = scan_sequences(DeltaRows(mixed, decays, strengths), batch, layer, self._piece)
        z = self.gate(narrow, batch.groups).float()
        gated = self.norm(y).mul_(sigmoid(z).view_as(y))
        return self.output(gated.view(len(x), width), batch.groups)

    def _piece(self, rows: DeltaRows, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """Rows of one sequence and (tail, state) -> [n, H, D] and the next two."""
        tail, state = buffers
        convolved, tail = convolve(rows.mixed, tail, self.taps)
        heads = silu(convolved).view(len(rows), 3, self.spec.num_heads, self.spec.head_dim)
        q, k, v = heads.unbind(1)
        y, state = kda.scan(
            unit(q, self.spec.head_dim**-0.5), unit(k), v, rows.decays, rows.strengths, state
        )
        return y, (tail, state)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.gate, self.control, self.decay, self.output

    @property
    def size_bytes(self) -> int:
        small = sum(tensor.nbytes for tensor in (self.taps, self.rates, self.dt_bias))
        return small + self.norm.size_bytes + sum(linear.size_bytes for linear in self.linears)


def build(spec: KdaSpec, parts: Parts) -> Kda:
    parts = parts.within("delta")
    return Kda(
        spec=spec,
        input=parts.linear("q", "k", "v", "z_down"),
        gate=parts.linear("z_up"),
        control=DenseLinear(torch.cat((parts.tensor("a_down"), parts.tensor("b")))),
        decay=DenseLinear(parts.tensor("a_up")),
        output=parts.linear("o"),
        taps=parts.tensor("conv").squeeze(1).t().contiguous(),
        rates=-parts.tensor("a_log").exp()[:, None],
        dt_bias=parts.tensor("dt_bias"),
        norm=parts.norm("gate_norm", offset=0.0),
    )

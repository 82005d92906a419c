# SPDX-License-Identifier: Apache-2.0
"""The gated delta net. Its state is the convolution's last rows and one matrix per head."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..kernels.activations import sigmoid, silu, softplus
from ..kernels.causal_conv.cpu import convolve
from ..kernels.gated_delta import dispatch as gated_delta
from ..specs.gated_delta import GatedDeltaSpec
from .linear import DenseLinear, Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .recurrent import Buffers, scan_sequences


@dataclass(frozen=True)
class DeltaRows:
    """What a delta rule sees of n rows."""

    mixed: torch.Tensor  # [n, channels]: q, k and v before their convolution
    decays: torch.Tensor  # [n, Hv] or, per channel of a key, [n, H, Dk]: log
    strengths: torch.Tensor  # [n, Hv]

    def __len__(self) -> int:
        return len(self.mixed)

    def __getitem__(self, part: slice) -> "DeltaRows":
        return DeltaRows(self.mixed[part], self.decays[part], self.strengths[part])


@dataclass(frozen=True)
class GatedDelta:
    """The mixer of one layer. `input` yields q, k, v and z side by side. `control` yields b and a;
    it is fp32 whatever the quantisation: its errors would be multiplied up over all later rows."""

    spec: GatedDeltaSpec
    input: Linear
    control: DenseLinear
    output: Linear
    taps: torch.Tensor  # [kernel, channels] fp32
    rates: torch.Tensor  # [Hv] fp32: -exp(a_log)
    dt_bias: torch.Tensor  # [Hv] fp32
    norm: RmsNorm

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; hands the state of each sequence on."""
        spec = self.spec
        rows = self.input(x, batch.groups).float()
        mixed, z = torch.split(rows, [spec.channels, spec.width], 1)
        b, a = self.control(x, batch.groups).chunk(2, 1)
        strengths = sigmoid(b)
        decays = softplus(a + self.dt_bias).mul_(self.rates)
        y = scan_sequences(DeltaRows(mixed, decays, strengths), batch, layer, self._piece)
        gated = self.norm(y).mul_(silu(z).view_as(y))
        return self.output(gated.view(len(x), spec.width), batch.groups)

    def _piece(self, rows: DeltaRows, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """Rows of one sequence and (tail, state) -> [n, Hv, Dv] and the next two."""
        spec, count = self.spec, len(rows)
        tail, state = buffers
        convolved, tail = convolve(rows.mixed, tail, self.taps)
        q, k, v = torch.split(silu(convolved), [spec.key_width, spec.key_width, spec.width], 1)
        y, state = gated_delta.scan(
            unit(q.view(count, spec.num_key_heads, spec.key_dim), spec.key_dim**-0.5),
            unit(k.view(count, spec.num_key_heads, spec.key_dim)),
            v.view(count, spec.num_heads, spec.head_dim),
            rows.decays,
            rows.strengths,
            state,
        )
        return y, (tail, state)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.control, self.output

    @property
    def size_bytes(self) -> int:
        small = sum(tensor.nbytes for tensor in (self.taps, self.rates, self.dt_bias))
        return small + self.norm.size_bytes + sum(linear.size_bytes for linear in self.linears)


def unit(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of length `scale` along the last dimension; x / √(|x|² + 1e-6), as models train it."""
    return x * (x * x).sum(-1, keepdim=True).add_(1e-6).rsqrt_().mul_(scale)


def build(spec: GatedDeltaSpec, parts: Parts) -> GatedDelta:
    parts = parts.within("delta")
    return GatedDelta(
        spec=spec,
        input=parts.linear("q", "k", "v", "z"),
        control=DenseLinear(torch.cat((parts.tensor("b"), parts.tensor("a")))),
        output=parts.linear("o"),
        taps=parts.tensor("conv").squeeze(1).t().contiguous(),
        rates=-parts.tensor("a_log").exp(),
        dt_bias=parts.tensor("dt_bias"),
        norm=parts.norm("gate_norm", offset=0.0),
    )

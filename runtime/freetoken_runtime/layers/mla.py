# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: what is kept of a token is one latent row for all heads."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..kernels.latent_attention.cpu import Heads, attend_latent
from ..specs.attention import MlaSpec
from .linear import Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .rope import rotate


@dataclass(frozen=True)
class LatentAttention:
    """The mixer of one layer. `inputs` yields [q_down,] latent and k_rope side by side; `queries`
    the parts of all heads that meet the latent, then those that turn."""

    spec: MlaSpec
    inputs: Linear
    queries: Linear
    output: Linear
    q_norm: RmsNorm | None
    latent_norm: RmsNorm
    heads: Heads

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; writes this pass's latent rows into each sequence's
        state."""
        spec = self.spec
        made = self.inputs(x, batch.groups).float()
        sizes = [made.shape[1] - spec.kv_rank - spec.rope_dim, spec.kv_rank, spec.rope_dim]
        q_down, latent, shared = torch.split(made, sizes, 1)
        if self.q_norm is not None:
            x = self.q_norm(q_down)
        q = self.queries(x, batch.groups).float()
        sizes = [spec.num_heads * spec.nope_dim, spec.num_heads * spec.rope_dim]
        nope, turning = (y.view(len(x), spec.num_heads, -1) for y in torch.split(q, sizes, 1))
        shared = shared[:, None]
        if rope is not None:
            turning, shared = rotate(turning, *rope), rotate(shared, *rope)
        rows = torch.cat((self.latent_norm(latent)[:, None], shared), -1)  # [T, 1, rank + Dr] fp32
        parts = []
        for sequence in batch.sequences:
            new = slice(sequence.start, sequence.stop)
            sequence.state.write(layer, rows[new], rows[new, :, :0])
            past = [kept for kept, _ in sequence.state.pieces(layer, new=False)]
            asked = (nope[new], turning[new])
            parts.append(attend_latent(asked, past, rows[new], self.heads, scale=spec.scale))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.output(mixed.reshape(len(x), -1), batch.groups)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inputs, self.queries, self.output

    @property
    def size_bytes(self) -> int:
        norms = sum(x.size_bytes for x in (self.q_norm, self.latent_norm) if x is not None)
        linears = sum(linear.size_bytes for linear in self.linears)
        return linears + norms + self.heads.k_up.nbytes + self.heads.v_up.nbytes


def build(spec: MlaSpec, parts: Parts) -> LatentAttention:
    down = ("q_down",) if spec.q_rank is not None else ()
    count, rank = spec.num_heads, spec.kv_rank
    return LatentAttention(
        spec=spec,
        inputs=parts.linear(*down, "latent", "k_rope"),
        queries=parts.linear("q_nope", "q_rope"),
        output=parts.linear("o"),
        q_norm=parts.norm("q_down_norm", eps=spec.latent_eps) if down else None,
        latent_norm=parts.norm("latent_norm", eps=spec.latent_eps),
        heads=Heads(
            k_up=parts.tensor("k_up").view(count, spec.nope_dim, rank),
            v_up=parts.tensor("v_up").view(count, spec.value_dim, rank),
        ),
    )

# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm in fp32."""

from dataclasses import dataclass

import torch

from ..kernels.working_memory import empty

_CACHED = 256 << 10  # numbers


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    weight: torch.Tensor  # [H] fp32
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ..., H]. Some rows at a time, so that torch's five steps stay in the cache."""
        rows = max(1, _CACHED * len(x) // max(1, x.numel()))
        if len(x) <= rows:
            return self._normed(x)
        out = empty(*x.shape)
        for start in range(0, len(x), rows):
            out[start : start + rows] = self._normed(x[start : start + rows])
        return out

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

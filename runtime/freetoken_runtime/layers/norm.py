# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm in fp32."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    weight: torch.Tensor  # [H] fp32
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

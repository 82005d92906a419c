# SPDX-License-Identifier: Apache-2.0
"""Linear layers: one weight value, a kernel form for many rows and one for few."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn import functional

from ..batch import Form, RowGroup


class Linear(ABC):
    """y = x Wᵀ + b. Immutable. `few_rows_batch`: in the FEW form a row's result is the same bits
    whatever rows stand beside it, so rows of several sequences may share a group."""

    few_rows_batch: bool
    outputs: int
    inputs: int

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32 -> [n, N] fp32, activations unrounded."""

    @abstractmethod
    def few(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32 -> [n, N] fp32, for few rows."""

    @abstractmethod
    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W (without bias) as fp32 [len(rows), K]: the embedding of a tied head."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, K] fp32, its rows covered by `groups` in order -> [T, N] fp32."""
        if len(groups) == 1:
            return self._form(groups[0].form, x)
        parts = [self._form(group.form, x[group.start : group.stop]) for group in groups]
        return torch.cat(parts)

    def _form(self, form: Form, x: torch.Tensor) -> torch.Tensor:
        return self.many(x) if form is Form.MANY else self.few(x)


class DenseLinear(Linear):
    """Weights kept as fp32."""

    few_rows_batch = False  # fp32 GEMM is bitwise row-invariant only from 16 rows on

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight, self._bias = weight, bias

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    few = many

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self._weight[rows]

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

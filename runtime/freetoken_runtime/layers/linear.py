# SPDX-License-Identifier: Apache-2.0
"""Linear layers: one weight value, a kernel form for many rows and one for few."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..batch import Form, RowGroup
from ..kernels.dense_linear.cpu import is_row_invariant, linear, linear_from_two
from ..kernels.int4_linear import cpu as int4
from ..kernels.int8_linear import cpu as int8

# Dequantised weights live for one GEMM; larger matrices are taken in slices of this many elements.
_SLICE_ELEMENTS = 4 << 20


class Linear(ABC):
    """y = x Wᵀ + b. Immutable.

    `few_rows_batch`: in the FEW form a row's result is the same bits whatever rows stand beside
    it, so rows of several sequences may share a group. `format`: for reports, how weights are held.
    """

    outputs: int
    inputs: int
    format: str

    @property
    @abstractmethod
    def few_rows_batch(self) -> bool: ...

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32 -> [n, N], n >= 16."""

    @abstractmethod
    def few(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32 -> [n, N] fp32 or bf16."""

    @abstractmethod
    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W (without bias) as fp32 [len(rows), K]: the embedding of a tied head."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, K] fp32, its rows covered by `groups` in order -> [T, N] fp32 or bf16."""
        if len(groups) == 1:
            return self._form(groups[0].form, x)
        return torch.cat([self._form(g.form, x[g.start : g.stop]) for g in groups])

    def _form(self, form: Form, x: torch.Tensor) -> torch.Tensor:
        return self.many(x) if form is Form.MANY else self.few(x)


class DenseLinear(Linear):
    """Weights as fp32 or bf16. bf16 weights meet bf16 activations in both forms."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.contiguous()
        self.outputs, self.inputs = weight.shape
        self.format = str(weight.dtype).removeprefix("torch.")
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    @property
    def few_rows_batch(self) -> bool:
        return is_row_invariant(self.outputs, self.inputs, self._weight.dtype)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self._weight.dtype), self._weight, self._bias)

    def few(self, x: torch.Tensor) -> torch.Tensor:
        return linear_from_two(x.to(self._weight.dtype), self._weight, self._bias)

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self._weight[rows].float()

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)


class IntegerLinear(Linear):
    """Weights as packed integers: a packed op with bf16 activations for few rows, dequantising and
    an fp32 GEMM with fp32 activations for many."""

    few_rows_batch = True  # each output is one dot product in a fixed order

    def __init__(
        self, weight: int8.PackedInt8 | int4.PackedInt4, bias: torch.Tensor | None = None
    ) -> None:
        self._weight, self._bias = weight, bias
        self.inputs = weight.inputs
        if isinstance(weight, int8.PackedInt8):
            self.outputs, self.format = len(weight.values), "int8"
        else:
            self.outputs, self.format = weight.outputs, f"int4 in groups of {weight.size}"

    def few(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self._weight, int8.PackedInt8):
            out = int8.few(x, self._weight)
        else:
            out = int4.few(x, self._weight)
        return out if self._bias is None else out + self._bias

    def many(self, x: torch.Tensor) -> torch.Tensor:
        step = max(64, _SLICE_ELEMENTS // self.inputs // 64 * 64)
        parts = []
        for start in range(0, self.outputs, step):
            rows = slice(start, min(start + step, self.outputs))
            bias = None if self._bias is None else self._bias[rows]
            parts.append(linear(x, self._dequantise(rows), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _dequantise(self, rows: slice) -> torch.Tensor:
        if isinstance(self._weight, int8.PackedInt8):
            return int8.dequantise(self._weight, rows)
        return int4.dequantise(self._weight, rows)

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._weight, int8.PackedInt8), "a tied head is never int4"
        return int8.rows_of(self._weight, rows)

    @property
    def size_bytes(self) -> int:
        return self._weight.size_bytes + (0 if self._bias is None else self._bias.nbytes)

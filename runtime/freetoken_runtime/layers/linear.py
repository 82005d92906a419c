# SPDX-License-Identifier: Apache-2.0
"""Linear layers: one weight value, a kernel form for many rows and one for few."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from ..batch import Form, RowGroup
from ..kernels.dense_linear.cpu import is_row_invariant, linear, linear_from_two
from ..kernels.int4_linear import cpu as int4
from ..kernels.int8_linear import cpu as int8
from .rows import PickedRows, Rows

# Parts of int8 that make a number of the rows, in the forms that have such.
PARTS: Mapping[Form, int] = {Form.MANY_INT8: 1, Form.MANY_INT16: 2}
# Dequantised weights live for one GEMM; larger matrices are taken in slices of this many elements.
_SLICE_ELEMENTS = 4 << 20


class Linear(ABC):
    """y = x Wᵀ + b. Immutable.

    `few_rows_batch`: in the FEW form a row's result is the same bits whatever rows stand beside
    it, so rows of several sequences may share a group; `few_dtype`: what that form rounds rows to.
    `format`: for reports, how weights are held.
    `has_integer_forms`: whether `many_integers` is a form of its own, for any number of rows.
    """

    outputs: int
    inputs: int
    format: str
    few_dtype: torch.dtype
    has_integer_forms: bool = False

    @property
    @abstractmethod
    def few_rows_batch(self) -> bool: ...

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32 -> [n, N], n >= 16."""

    def many_rounded(self, x: torch.Tensor) -> torch.Tensor:
        """`many` with activations in bf16, where that is a form of its own."""
        return self.many(x)

    def many_integers(self, rows: PickedRows, parts: int) -> torch.Tensor:
        """`many` with rows in `parts` parts of int8, where that is a form of its own."""
        return self.many(rows.plain())

    @abstractmethod
    def few(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] fp32, or rounded to `few_dtype` -> [n, N] fp32 or bf16."""

    @abstractmethod
    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W (without bias) as fp32 [len(rows), K]: the embedding of a tied head."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, K] fp32, its rows covered by `groups` in order -> [T, N] fp32 or bf16."""
        if len(groups) == 1:
            return self.apply(groups[0].form, x)
        return torch.cat([self.apply(g.form, x[g.start : g.stop]) for g in groups])

    def apply(self, form: Form, x: torch.Tensor) -> torch.Tensor:
        """One group: x [n, K] fp32 -> [n, N] fp32 or bf16; n >= 16 in every form but FEW."""
        match form:
            case Form.FEW:
                return self.few(x)
            case Form.MANY:
                return self.many(x)
            case Form.MANY_ROUNDED:
                return self.many_rounded(x)
            case Form.MANY_INT16 | Form.MANY_INT8:
                return self.many_integers(Rows(x).pick(None), PARTS[form])


class DenseLinear(Linear):
    """Weights as fp32 or bf16. bf16 weights meet bf16 activations in both forms."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.contiguous()
        self.outputs, self.inputs = weight.shape
        self.format = str(weight.dtype).removeprefix("torch.")
        self.few_dtype = weight.dtype
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
    an fp32 GEMM with fp32 activations for many. Rounded forms for many are for those who ask."""

    few_rows_batch = True  # each output is one dot product in a fixed order
    few_dtype = torch.bfloat16

    def __init__(
        self, weight: int8.PackedInt8 | int4.PackedInt4, bias: torch.Tensor | None = None
    ) -> None:
        self._weight, self._bias = weight, bias
        self.inputs = weight.inputs
        if isinstance(weight, int8.PackedInt8):
            self.outputs, self.format = len(weight.values), "int8"
            self.has_integer_forms = True
        else:
            self.outputs, self.format = weight.outputs, f"int4 in groups of {weight.size}"

    def few(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self._weight, int8.PackedInt8):
            out = int8.few(x, self._weight)
        else:
            out = int4.few(x, self._weight)
        return out if self._bias is None else out + self._bias

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_slices(lambda rows: linear(x, self._dequantise(rows)))

    def many_rounded(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if isinstance(weight, int8.PackedInt8):  # among matrices of int4, a head
            return self.many(x)
        rounded = x.bfloat16()
        return self._in_slices(lambda rows: int4.many_rounded(rounded, weight, rows))

    def many_integers(self, rows: PickedRows, parts: int) -> torch.Tensor:
        assert isinstance(self._weight, int8.PackedInt8), "refused by the configuration"
        out = int8.many_integers(rows.integers(parts), self._weight)
        return out if self._bias is None else out.add_(self._bias)

    def _in_slices(self, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """[n, N] fp32 from some outputs at a time."""
        step = max(64, _SLICE_ELEMENTS // self.inputs // 64 * 64)
        starts = range(0, self.outputs, step)
        parts = [compute(slice(start, min(start + step, self.outputs))) for start in starts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return whole if self._bias is None else whole.add_(self._bias)

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

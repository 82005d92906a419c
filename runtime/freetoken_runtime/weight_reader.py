# SPDX-License-Identifier: Apache-2.0
"""Parameters of a source as they are computed with: checked, and quantised some rows at a time, so
that beside the result only a slice of a matrix is in memory, however large it is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from .errors import WeightsDamaged
from .kernels.int4_linear import cpu as int4
from .kernels.int4_linear.cpu import PackedInt4
from .kernels.int8_linear import cpu as int8
from .kernels.int8_linear.cpu import PackedInt8
from .kernels.integers import (
    Int4Values,
    Int8Values,
    int4_from_groups,
    quantise_int4,
    quantise_int8,
    stack_int4,
)
from .losses import Losses
from .weight_memory import WeightMemory
from .weight_source import SLICE_ELEMENTS, WeightSource


@dataclass(frozen=True)
class WeightReader:
    """Reads each parameter once. WeightsDamaged for what is not finite, which integers would hide.
    `group`: of int4."""

    source: WeightSource
    losses: Losses
    group: int
    memory: WeightMemory = field(default_factory=WeightMemory)  # of whole matrices

    def read(self, name: str) -> torch.Tensor:
        """A parameter in fp32, bf16 or fp16."""
        return self._checked(name, self.source.read(name))

    def rows(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The rows of matrices, one after another, in slices."""
        for name in names:
            for rows in self.source.read_slices(name):
                yield name, self._checked(name, rows)

    def dense(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Matrices stacked along their outputs."""
        weight = self.memory.zeros(*self._shape(names), dtype=dtype)
        start = 0
        for name, exact in self.rows(names):
            held = weight[start : start + len(exact)].copy_(exact)
            start += len(exact)
            if dtype is not torch.float32:
                self.losses.add(name, exact, held)
        assert start == len(weight), (names, start)
        return weight

    def int8(self, names: Sequence[str]) -> PackedInt8:
        outputs, inputs = self._shape(names)
        values = self.memory.zeros(outputs, inputs + -inputs % int8.MULTIPLE, dtype=torch.int8)
        scales = self.memory.zeros(outputs, dtype=torch.bfloat16)
        start = 0
        for part in self._int8_values(names):
            rows = slice(start, start + len(part.values))
            values[rows, :inputs], scales[rows] = part.values, part.scales
            start = rows.stop
        assert start == outputs, (names, start)
        return PackedInt8(values, scales, inputs)

    def int4(self, names: Sequence[str]) -> PackedInt4:
        outputs, inputs = self._shape(names)
        padded, blocks = inputs + -inputs % self.group, outputs + -outputs % int4.BLOCK
        packed = self.memory.zeros(blocks, padded // 2, dtype=torch.uint8)
        scales_zeros = self.memory.zeros(padded // self.group, blocks, 2, dtype=torch.bfloat16)
        start = 0
        for part in self.int4_parts(names):
            rows = slice(start, start + len(part.packed))
            packed[rows], scales_zeros[:, rows] = part.packed, part.scales_zeros
            start = rows.stop
        assert start == blocks, (names, start)
        return PackedInt4(packed, scales_zeros, self.group, outputs, inputs)

    def int8_parts(self, names: Sequence[str]) -> Iterator[PackedInt8]:
        """Matrices stacked along their outputs, in parts of some rows."""
        return map(int8.pack, self._int8_values(names))

    def int4_parts(self, names: Sequence[str]) -> Iterator[PackedInt4]:
        """The same, in parts of whole blocks but for the last one."""
        for values in _in_blocks(self._int4_values(names)):
            yield int4.pack(values)

    def _int8_values(self, names: Sequence[str]) -> Iterator[Int8Values]:
        for name, rows in self.rows(names):
            yield self.losses.add(name, rows, quantise_int8(rows))

    def _int4_values(self, names: Sequence[str]) -> Iterator[Int4Values]:
        for name in names:
            stored = self._stored_int4(name)
            if stored is not None:
                yield stored
                continue
            for _, rows in self.rows([name]):
                yield self.losses.add(name, rows, quantise_int4(rows, self.group))

    def _stored_int4(self, name: str) -> Int4Values | None:
        """A matrix whose integers are in the file; None if they are not."""
        groups = self.source.read_groups(name)
        if groups is None:
            return None
        assert groups.size == self.group, groups.size
        self._check_finite(name, groups.scales)
        self._check_finite(name, groups.minimums)
        values = int4_from_groups(groups.values, groups.scales, groups.minimums, groups.size)
        return self.losses.add(name, groups, values)

    def _shape(self, names: Sequence[str]) -> tuple[int, int]:
        shapes = [self.source.shape(name) for name in names]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.float64:
            tensor = tensor.float()  # before it is checked: what is too large becomes infinite
        if not self.source.finite:
            self._check_finite(name, tensor)
        return tensor

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightsDamaged(
                f"weight {name!r} in {self.source.path} is not finite",
                value=f"{float(low)} to {float(high)}",
            )


def _in_blocks(parts: Iterable[Int4Values]) -> Iterator[Int4Values]:
    """The same rows in parts of whole blocks of the packed form, but for the last part."""
    pending: Int4Values | None = None
    for part in parts:
        pending = part if pending is None else stack_int4([pending, part])
        rows = len(pending.values)
        whole = rows - rows % int4.BLOCK
        step = max(1, SLICE_ELEMENTS // pending.values.shape[1] // int4.BLOCK) * int4.BLOCK
        for start in range(0, whole, step):
            yield _some(pending, slice(start, min(start + step, whole)))
        pending = _some(pending, slice(whole, rows))
    if pending is not None and len(pending.values):
        yield pending


def _some(values: Int4Values, rows: slice) -> Int4Values:
    return replace(
        values, values=values.values[rows], scales=values.scales[rows], zeros=values.zeros[rows]
    )

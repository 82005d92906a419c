# SPDX-License-Identifier: Apache-2.0
"""Rows that many experts take some of each: what a form rounds is rounded once for all of them."""

from dataclasses import dataclass
from threading import Lock

import torch

from ..kernels.int8_linear.cpu import IntegerRows, quantise_rows


class Rows:
    """Rows [n, K] fp32; any thread may take some."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self._rounded: dict[torch.dtype, torch.Tensor] = {torch.float32: x}
        self._integers: dict[int, IntegerRows] = {}
        self._rounding = Lock()

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        with self._rounding:
            if dtype not in self._rounded:
                self._rounded[dtype] = self.x.to(dtype)
            return self._rounded[dtype]

    def integers(self, parts: int) -> IntegerRows:
        with self._rounding:
            if parts not in self._integers:
                self._integers[parts] = quantise_rows(self.x, parts)
            return self._integers[parts]

    def pick(self, numbers: torch.Tensor | None) -> "PickedRows":
        """Those with these numbers [m] int64, m >= 1; None: all."""
        return PickedRows(self, numbers)


@dataclass(frozen=True)
class PickedRows:
    """Some rows [m, K]."""

    rows: Rows
    numbers: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.rows.x) if self.numbers is None else len(self.numbers)

    def plain(self) -> torch.Tensor:
        return self.rounded(torch.float32)

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        whole = self.rows.rounded(dtype)
        return whole if self.numbers is None else whole.index_select(0, self.numbers)

    def integers(self, parts: int) -> IntegerRows:
        whole = self.rows.integers(parts)
        return whole if self.numbers is None else whole.pick(self.numbers)

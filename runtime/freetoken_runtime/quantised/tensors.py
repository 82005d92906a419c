# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices: what several stored tensors are together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from ..errors import WeightsMismatch
from ..weight_source import Groups, Shape, in_one_run

_SLICE_ELEMENTS = 4 << 20
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Entry:
    """What the header of a file says about a tensor. `dtype` as safetensors spells it."""

    shape: Shape
    dtype: str


Entries = Mapping[str, Entry]
Read = Callable[[str], torch.Tensor]  # a stored tensor by name; it may be a view of the file


class QuantisedTensor(ABC):
    """Matrices [..., N, K] as one tensor; a row is one of all their rows, in order."""

    shape: Shape

    @property
    @abstractmethod
    def format(self) -> str:
        """For reports: how it is quantised."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The stored tensors that it consists of."""

    @abstractmethod
    def _dequantise(self, read: Read, rows: torch.Tensor) -> torch.Tensor:
        """Some rows, as fp32 [n, K]."""

    def dequantise(self, read: Read, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [n] (None: all) in fp32 [n, K], in slices, so that what lies between is small."""
        if rows is None:
            rows = torch.arange(prod(self.shape[:-1]))
        out = torch.empty(len(rows), self.shape[-1])
        step = max(1, _SLICE_ELEMENTS // self.shape[-1])
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            out[start : start + step] = self._dequantise(read, some)
        return out

    def groups(self, read: Read, rows: torch.Tensor) -> Groups | None:
        """The integers of rows [n], where they have 4 bits and groups of 32 or multiples."""
        return None


@dataclass(frozen=True)
class Found:
    """`tensors` by the name that a parameter is looked for under; `unused`: stored tensors that
    computing without quantised activations does without."""

    tensors: Mapping[str, QuantisedTensor]
    unused: frozenset[str] = frozenset()


class Scheme(Protocol):
    """How a checkpoint is quantised, from its configuration."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not computed as the checkpoint's authors do it."""

    def find(self, entries: Entries, read: Read) -> Found:
        """What is quantised among the stored tensors. WeightsMismatch, UnsupportedQuantization,
        naming tensors."""


def picked(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix of any dtype; a view if they follow each other."""
    run = in_one_run(rows)
    if run is not None:
        return tensor[run]
    if tensor.element_size() == 1:  # 8-bit floats cannot be indexed
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def require(entries: Entries, name: str, of: str) -> Entry:
    """WeightsMismatch if what belongs to a tensor is not there."""
    if name not in entries:
        raise WeightsMismatch(f"tensor {of!r} is quantised, but {name!r} is missing")
    return entries[name]


def misshapen(name: str, value: object, limit: object) -> WeightsMismatch:
    return WeightsMismatch(f"tensor {name!r} has the wrong shape", value=value, limit=limit)

# SPDX-License-Identifier: Apache-2.0
"""Token ids to rows, from a table of its own or from the head a model ties to it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .linear import Linear


class Embedding(ABC):
    """ids [T] int64 -> [T, H] fp32."""

    @abstractmethod
    def __call__(self, ids: torch.Tensor) -> torch.Tensor: ...

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that are not counted elsewhere."""


@dataclass(frozen=True)
class TableEmbedding(Embedding):
    """A table kept in the dtype of the file: a lookup needs no arithmetic, so nothing is gained
    by widening it."""

    table: torch.Tensor  # [V, H]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids].float()

    @property
    def size_bytes(self) -> int:
        return self.table.nbytes


@dataclass(frozen=True)
class TiedEmbedding(Embedding):
    """The head's own weights, whatever their form: one parameter has one value."""

    head: Linear

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.weight_rows(ids)

    @property
    def size_bytes(self) -> int:
        return 0

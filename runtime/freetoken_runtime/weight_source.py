# SPDX-License-Identifier: Apache-2.0
"""What loading needs of weight files, whatever their format."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import WeightsMismatch
from .spec import ModelSpec


@dataclass(frozen=True)
class Groups:
    """Integer weights as a file stores them: w = q · scale + minimum, per group along K."""

    values: torch.Tensor  # [N, K] uint8, 0..15
    scales: torch.Tensor  # [N, K / size] fp32
    minimums: torch.Tensor  # [N, K / size] fp32
    size: int


class WeightSource(ABC):
    """Open weight files of one model. Mutable: it remembers what was read, so that `finish` can
    tell what was not. Each tensor is read once."""

    path: Path
    spec: ModelSpec

    def __init__(self, path: Path, spec: ModelSpec, names: dict[str, str]) -> None:
        self.path = path
        self.spec = spec
        self._shapes = spec.parameter_shapes()
        self._names = names
        self._unread = set(self._shapes)

    @property
    @abstractmethod
    def files(self) -> Sequence[Path]:
        """The weight files, for their content hash."""

    @abstractmethod
    def _stored_names(self) -> set[str]:
        """Every tensor in the files that must be used."""

    @abstractmethod
    def _stored_shape(self, stored: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str, stored: str) -> torch.Tensor: ...

    def _read_groups(self, name: str, stored: str) -> Groups | None:
        return None

    def check(self) -> None:
        """WeightsMismatch naming tensors that are missing, unused or misshapen."""
        wanted, stored = set(self._names.values()), self._stored_names()
        _refuse("weights are missing", self.path, wanted - stored)
        _refuse("weights are not used by this architecture", self.path, stored - wanted)
        for name, tensor in self._names.items():
            shape = self._stored_shape(tensor)
            if shape != self._shapes[name]:
                raise WeightsMismatch(
                    f"tensor {tensor!r} in {self.path} has the wrong shape",
                    value=shape,
                    limit=self._shapes[name],
                )

    def read(self, name: str) -> torch.Tensor:
        """A parameter in a floating dtype (that of the file, or fp32 if quantised), in memory of
        its own."""
        self._take(name)
        return self._read(name, self._names[name])

    def read_groups(self, name: str) -> Groups | None:
        """A 4-bit matrix as stored, or None if it is not stored so (then `read` it)."""
        groups = self._read_groups(name, self._names[name])
        if groups is not None:
            self._take(name)
        return groups

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def has(self, name: str) -> bool:
        return name in self._shapes

    def finish(self) -> None:
        """Our own invariant: every parameter was read exactly once."""
        assert not self._unread, sorted(self._unread)

    def _take(self, name: str) -> None:
        assert name in self._unread, name
        self._unread.remove(name)


def _refuse(what: str, path: Path, names: set[str]) -> None:
    if names:
        listed = sorted(names)
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise WeightsMismatch(f"{what} in {path}: {', '.join(listed[:5])}{more}")

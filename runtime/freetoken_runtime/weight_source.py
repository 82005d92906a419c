# SPDX-License-Identifier: Apache-2.0
"""What loading needs of weight files, whatever their format."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

import torch

from .content_hash import content_hash
from .errors import WeightsMismatch
from .kernels.int4_linear.cpu import PackedInt4
from .kernels.int8_linear.cpu import PackedInt8
from .spec import ModelSpec

Shape = tuple[int, ...]
Quant = Literal["int8", "int4"]
SLICE_ELEMENTS = (
    1 << 18
)  # of a matrix that is read some rows at a time: larger ones stay with malloc
# A matrix [out, in] as its kernel takes it.
Matrix = torch.Tensor | PackedInt8 | PackedInt4


@dataclass(frozen=True)
class Stored:
    """What a parameter takes of one stored tensor.

    The tensor of `shape` is seen as `view` (as it is, if empty), of which the ranges `part`
    (dimension, start, stop) are taken; then the dimensions are put in `order`.
    """

    tensor: str
    shape: Shape
    view: Shape = ()
    part: tuple[tuple[int, int, int], ...] = ()
    order: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        sizes = list(self.view or self.shape)
        for dimension, start, stop in self.part:
            sizes[dimension] = stop - start
        return prod(sizes)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, a view of the stored tensor."""
        if self.view:
            tensor = tensor.view(self.view)
        for dimension, start, stop in self.part:
            tensor = tensor.narrow(dimension, start, stop - start)
        return tensor.permute(self.order) if self.order else tensor

    def rows(self) -> torch.Tensor | None:
        """Which rows (all of a last dimension) are taken, as indices in the shape of what is taken;
        None if parts of rows are."""
        view = self.view or self.shape
        last = len(view) - 1
        picked = any(dimension == last for dimension, _, _ in self.part)
        if view[-1] != self.shape[-1] or picked or (self.order and self.order[-1] != last):
            return None
        rows = torch.arange(prod(view[:-1])).view(view[:-1])
        for dimension, start, stop in self.part:
            rows = rows.narrow(dimension, start, stop - start)
        return rows.permute(self.order[:-1]) if self.order else rows


def in_one_run(rows: torch.Tensor) -> slice | None:
    """Indices [n] as a slice, if they follow each other."""
    first, count = int(rows[0]), len(rows)
    run = torch.equal(rows, torch.arange(first, first + count))
    return slice(first, first + count) if run else None


def in_slices(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows [n, …], at most SLICE_ELEMENTS elements at a time, but at least a row."""
    return torch.split(rows, max(1, SLICE_ELEMENTS // prod(rows.shape[1:])))


# Ways to store a parameter, the preferred one first; each is a number of pieces, concatenated
# along their first dimension and seen in the parameter's shape.
Ways = tuple[tuple[Stored, ...], ...]
Names = Mapping[str, Ways]


@dataclass(frozen=True)
class Groups:
    """Integer weights as a file stores them: w = q · scale + minimum, per group along K."""

    values: torch.Tensor  # [N, K] uint8, 0..15
    scales: torch.Tensor  # [N, K / size] fp32
    minimums: torch.Tensor  # [N, K / size] fp32
    size: int


@dataclass(frozen=True)
class StoredAt:
    """Where the bytes of a stored tensor lie, in rows, without gaps."""

    path: Path
    offset: int
    dtype: torch.dtype


class WeightSource(ABC):
    """Open weight files of one model. Mutable: it remembers what was read, so that `finish` can
    tell what was not. Each parameter is read once.

    `names`: how each parameter may be stored. `notes`: what of the files is left out, for the
    report. `quant`: how matrices are quantised already, in a form that `read_matrix` hands out.
    `finite`: whether all weights are known to be.
    """

    path: Path
    spec: ModelSpec
    notes: tuple[str, ...] = ()
    quant: Quant | None = None
    finite: bool = False

    def __init__(self, path: Path, spec: ModelSpec, names: Names) -> None:
        self.path = path
        self.spec = spec
        self._shapes = spec.parameter_shapes()
        assert names.keys() == self._shapes.keys(), names.keys() ^ self._shapes.keys()
        self._names = names
        self._pieces: dict[str, tuple[Stored, ...]] = {}  # chosen by `check`
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
    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        """What a parameter takes of a stored tensor, in memory of its own."""

    def _read_slices(self, name: str, stored: Stored) -> Iterator[torch.Tensor]:
        """What a matrix takes of a stored tensor, some rows at a time."""
        yield from in_slices(self._read(name, stored).reshape(-1, self._shapes[name][1]))

    def _read_groups(self, name: str, stored: Stored) -> Groups | None:
        return None

    def stored_format(self, name: str) -> str | None:
        """How a parameter is quantised in the files, None if it is not."""
        return None

    def _stored_dtype(self, name: str, stored: Stored) -> torch.dtype:
        return self._read(name, stored).dtype

    def content_hash(self, cache: Path | None) -> str:
        """Hex, over all weights. `cache`: see `content_hash.content_hash`."""
        return content_hash(self.files, cache)

    def check(self) -> None:
        """WeightsMismatch naming tensors that are missing, unused or misshapen."""
        stored = self._stored_names()
        self._pieces = {name: _choose(ways, stored) for name, ways in self._names.items()}
        wanted = {piece.tensor for pieces in self._pieces.values() for piece in pieces}
        _refuse("weights are missing", self.path, wanted - stored)
        _refuse("weights are not used by this architecture", self.path, stored - wanted)
        takers: dict[str, list[Stored]] = {}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                shape = self._stored_shape(piece.tensor)
                if shape != piece.shape:
                    raise WeightsMismatch(
                        f"tensor {piece.tensor!r} in {self.path} has the wrong shape",
                        value=shape,
                        limit=piece.shape,
                    )
                takers.setdefault(piece.tensor, []).append(piece)
            elements = sum(piece.elements for piece in pieces)
            assert elements == prod(self._shapes[name]), (name, elements)
        for parts in takers.values():
            _assert_whole(parts)

    def ahead(self, names: Collection[str]) -> AbstractContextManager[None]:
        """While this lasts, these parameters are brought into memory before they are read, where
        the files can do that in another thread."""
        return nullcontext()

    def read(self, name: str) -> torch.Tensor:
        """A parameter in a floating dtype (that of the file, or fp32 if quantised), in memory of
        its own."""
        self._take(name)
        parts = [self._read(name, piece) for piece in self._pieces[name]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.reshape(self._shapes[name])

    def read_slices(self, name: str) -> Iterator[torch.Tensor]:
        """The rows of a matrix as `read` returns them, some at a time, but perhaps in the memory of
        the files: not to be written to."""
        self._take(name)
        for piece in self._pieces[name]:
            yield from self._read_slices(name, piece)

    def read_groups(self, name: str) -> Groups | None:
        """A 4-bit matrix as stored, or None if it is not stored so (then `read` it)."""
        pieces = self._pieces[name]
        if len(pieces) > 1:
            return None
        groups = self._read_groups(name, pieces[0])
        if groups is not None:
            self._take(name)
        return groups

    def read_matrix(self, names: Sequence[str], quant: Quant | None) -> Matrix | None:
        """Matrices stacked along their outputs as a kernel of this quantisation takes them, without
        their biases, or None if they are not stored so (then `read` them). The memory is the
        files' own where it can be; it may be written to, and the files do not change."""
        return None

    def pieces(self, name: str) -> Sequence[Stored]:
        """What a parameter consists of; known after `check`."""
        return self._pieces[name]

    def stored_at(self, tensor: str) -> StoredAt | None:
        """Where a stored tensor can be read without this source; None if that is not told."""
        return None

    def defer(self, name: str) -> None:
        """Count a parameter as read: it will be, each time it is needed, from where it lies."""
        self._take(name)

    def dtype(self, name: str) -> torch.dtype:
        """What `read` will return."""
        parts = [self._stored_dtype(name, piece) for piece in self._pieces[name]]
        return reduce(torch.promote_types, parts)

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


def _choose(ways: Sequence[tuple[Stored, ...]], stored: set[str]) -> tuple[Stored, ...]:
    """The first way whose tensors are all there; if none is, the one that lacks the smallest part,
    so that what it lacks is named as missing."""

    def lack(pieces: tuple[Stored, ...]) -> float:
        return sum(piece.tensor not in stored for piece in pieces) / len(pieces)

    return min(ways, key=lack)


def _assert_whole(parts: Sequence[Stored]) -> None:
    """Our own invariant: what is taken of a tensor does not overlap, and nothing of it is left. All
    parts are cells of one grid: seen alike, and in each dimension equal ranges or disjoint ones."""
    views = {part.view or part.shape for part in parts}
    assert len(views) == 1, (parts[0].tensor, views)
    (view,) = views
    whole = tuple((0, size) for size in view)
    cells = []
    for part in parts:
        cell = list(whole)
        for dimension, start, stop in part.part:
            cell[dimension] = (start, stop)
        cells.append(tuple(cell))
    for dimension in range(len(view)):
        ranges = sorted({cell[dimension] for cell in cells})
        disjoint = all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert disjoint, (parts[0].tensor, dimension, ranges)
    assert len(set(cells)) == len(cells), (parts[0].tensor, cells)
    elements = sum(part.elements for part in parts)
    assert elements == prod(view), (parts[0].tensor, elements)


def _refuse(what: str, path: Path, names: set[str]) -> None:
    if names:
        listed = sorted(names)
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise WeightsMismatch(f"{what} in {path}: {', '.join(listed[:5])}{more}")

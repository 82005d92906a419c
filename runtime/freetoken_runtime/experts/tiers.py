# SPDX-License-Identifier: Apache-2.0
"""Where the experts of a layer lie when they are in no slot, and how one gets into a slot.

    HeldExperts     in RAM, in the dtype of the file, where that is smaller than what computes
    StoredExperts   in the tensors of safetensors files, as extents (file, offset, length)
    RecordExperts   in an FTW folder, one checksummed record each, whose bytes are the slot's

A tier is immutable and used by several threads at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from threading import local
from typing import Protocol, runtime_checkable

import torch

from freetoken_storage.weights import FtwError, FtwTruncated
from freetoken_storage.weights_direct import AlignedBuffer, Extent, Pending

from ..errors import WeightsDamaged
from ..ftw_weights import FtwFolder, Place, tensor_of
from ..layers.expert import Expert
from ..weight_source import Stored, WeightSource
from .fetch import Disk
from .records import ExpertForm, units

_BLOCK = 4096  # extents that lie no further apart are read as one: the disk reads whole blocks


class Tier(Protocol):
    """The experts of one layer."""

    form: ExpertForm

    @property
    def near(self) -> bool:
        """Whether `load` finds experts in memory, so that who computes can do it as well. From a
        disk there is no such way: reads bypass memory, and are waited for."""

    def load(self, expert: int, memory: memoryview) -> int:
        """Write an expert into a slot's memory. Returns the bytes that came from a disk; raises
        before anything that is wrong can be used: WeightsError, FtwError, OSError."""

    @property
    def held_bytes(self) -> int:
        """What stays in memory for it."""

    @property
    def scratch_bytes(self) -> int:
        """What one `load` needs beside the slot, at most."""


@runtime_checkable
class DirectTier(Tier, Protocol):
    """Experts in memory as they compute: a slot would be a copy."""

    def seen(self, expert: int) -> bool:
        """Whether `in_place` returns at once; else it may have to read what it verifies."""

    def in_place(self, expert: int) -> Expert:
        """What computes with an expert's bytes where they lie. Raises as `load` does."""


class HeldExperts:
    """Parameters of every expert, in memory."""

    near = True

    def __init__(self, form: ExpertForm, every: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.form = form
        self._every = every

    def load(self, expert: int, memory: memoryview) -> int:
        self.form.fill(memory, self._every[expert].__getitem__)
        return 0

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for every in self._every for tensor in every.values())

    @property
    def scratch_bytes(self) -> int:
        return self.form.largest_bytes


@dataclass(frozen=True)
class Window:
    """The stretch of a stored tensor that holds a part of it, and how the part lies in it."""

    first: int  # element
    last: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, stored: Stored) -> "Window":
        view = stored.view or stored.shape
        strides = tuple(prod(view[dimension + 1 :]) for dimension in range(len(view)))
        starts, sizes = [0] * len(view), list(view)
        for dimension, start, stop in stored.part:
            starts[dimension], sizes[dimension] = start, stop - start
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return cls(first, first + reach, tuple(sizes), strides)


@dataclass(frozen=True)
class Piece:
    """What a parameter takes of one stored tensor: where its bytes begin and end in the file, and
    how to see them."""

    stored: Stored
    window: Window
    dtype: torch.dtype
    extent: Extent

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """flat: the extent's elements -> the part, as `Stored.take` has it."""
        seen = flat.as_strided(self.window.sizes, self.window.strides)
        return seen.permute(self.stored.order) if self.stored.order else seen


class StoredExperts:
    """Served from the files as they were downloaded; converted each time. Without checksums: what
    is not finite is refused."""

    near = False

    def __init__(self, form: ExpertForm, source: WeightSource, at: str, disk: Disk) -> None:
        """`at`: the prefix of the layer's names."""
        self.form = form
        self._source = source
        self._at = at
        self._disk = disk
        self._shapes = dict(form.spec.parameter_shapes(form.width))
        self._local = local()

    def pieces(self, expert: int) -> dict[str, tuple[Piece, ...]]:
        """Where each parameter of an expert lies."""
        return {name: tuple(self._pieces(f"{self._at}{expert}.{name}")) for name in self._shapes}

    def extents(self, expert: int) -> tuple[Extent, ...]:
        """What is read for an expert, each byte once."""
        every = [piece.extent for pieces in self.pieces(expert).values() for piece in pieces]
        return merged(every)

    def load(self, expert: int, memory: memoryview) -> int:
        pieces = self.pieces(expert)
        extents = merged([piece.extent for of_name in pieces.values() for piece in of_name])
        read = self._read(extents)

        def parameter(name: str) -> torch.Tensor:
            found = torch.cat([_seen(piece, read) for piece in pieces[name]])
            tensor = found.reshape(self._shapes[name])
            if tensor.dtype is torch.float64:
                tensor = tensor.float()
            low, high = torch.aminmax(tensor)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise WeightsDamaged(
                    f"weight '{self._at}{expert}.{name}' in {self._source.path} is not finite",
                    value=f"{float(low)} to {float(high)}",
                )
            return tensor

        self.form.fill(memory, parameter)
        return sum(extent.room for extent in extents)

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def scratch_bytes(self) -> int:
        return sum(extent.room for extent in self.extents(0)) + self.form.largest_bytes

    def _pieces(self, name: str) -> list[Piece]:
        pieces = []
        for stored in self._source.pieces(name):
            place = self._source.stored_at(stored.tensor)
            assert place is not None, name
            window, size = Window.of(stored), place.dtype.itemsize
            length = (window.last - window.first + 1) * size
            extent = Extent(place.path, place.offset + window.first * size, length)
            pieces.append(Piece(stored, window, place.dtype, extent))
        return pieces

    def _read(self, extents: Sequence[Extent]) -> dict[Extent, memoryview]:
        """All extents at once, into this thread's memory, which the next read takes again."""
        needed = sum(extent.room for extent in extents)
        if len(getattr(self._local, "memory", b"")) < needed:
            self._local.memory = AlignedBuffer(needed).view
        memory: memoryview = self._local.memory
        pending: dict[Extent, Pending] = {}
        views: dict[Extent, memoryview] = {}
        failure: FtwError | None = None
        at = 0
        try:
            for extent in extents:
                part = memory[at : at + extent.room]
                pending[extent] = self._disk.reader().submit(extent, part)
                at += extent.room
        except FtwError as error:
            failure = error
        for extent, read in pending.items():  # all: none may write into the memory later
            try:
                views[extent] = read.result()
            except FtwError as error:
                failure = failure or error
        if failure is not None:
            raise self._translated(failure) from failure
        return views

    def _translated(self, error: FtwError) -> WeightsDamaged:
        """These files are no converted weights; who reads them speaks as if they were."""
        what, remedy = "cannot be read", "check the disk"
        if isinstance(error, FtwTruncated):
            what, remedy = "are no longer what was opened", "download them again"
        return WeightsDamaged(
            f"weight files of {self._source.path} {what}: {error.what}",
            value=error.value,
            limit=error.limit,
            remedy=remedy,
        )


class RecordExperts:
    """Served from converted weights: the record's own bytes where the slot's form is the record's,
    converted from there otherwise."""

    near = False

    def __init__(self, form: ExpertForm, source: FtwFolder, at: str, disk: Disk) -> None:
        self.form = form
        self._source = source
        self._at = at
        self._disk = disk
        self._local = local()

    def load(self, expert: int, memory: memoryview) -> int:
        name = f"{self._at}{expert}"
        record = self._source.file.records[name]
        if record.layout == self.form.layout:
            self._source.file.read(name, self._disk.reader(), memory)
            return self._source.file.extent(name).room
        read = self._source.file.read(name, self._disk.reader(), self._memory(name))
        self._convert(name, read, memory)
        return self._source.file.extent(name).room

    def _convert(self, name: str, read: memoryview, memory: memoryview) -> None:
        """Write the bytes of a record of another form into a slot."""
        layout = self._source.file.records[name].layout
        fields = {field.name: tensor_of(read, field) for field in layout.fields}
        if self._source.quant == self.form.quant:
            self.form.copy(memory, fields)
        else:
            self.form.fill(memory, self._parameters(name, fields).__getitem__)

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def scratch_bytes(self) -> int:
        return self._source.file.extent(f"{self._at}0").room + self.form.largest_bytes

    def _parameters(
        self, record: str, fields: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Rows of the stacked fields, by the names of the parameters."""
        shapes = dict(self.form.spec.parameter_shapes(self.form.width))
        parameters: dict[str, torch.Tensor] = {}
        for names in units(self.form.spec):
            place = Place.of([f"{record}.{name}" for name in names])
            start = 0
            for name in names:
                stop = start + shapes[name][0]
                parameters[name] = fields[f"{place.prefix}weight"][start:stop]
                if self.form.spec.bias:
                    parameters[f"{name}.bias"] = fields[f"{place.prefix}bias"][start:stop]
                start = stop
        return parameters

    def _memory(self, name: str) -> memoryview:
        room = self._source.file.extent(name).room
        if len(getattr(self._local, "memory", b"")) < room:
            self._local.memory = AlignedBuffer(room).view
        memory: memoryview = self._local.memory
        return memory


def merged(extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """The same bytes in fewer extents: what overlaps or lies in one block is read once."""
    found: list[Extent] = []
    order = sorted(set(extents), key=lambda extent: (str(extent.path), extent.offset))
    for path, of_file in groupby(order, key=lambda extent: extent.path):
        start = stop = -1
        for extent in of_file:
            if start >= 0 and extent.offset > stop + _BLOCK:
                found.append(Extent(path, start, stop - start))
                start = -1
            if start < 0:
                start, stop = extent.offset, extent.offset + extent.length
            stop = max(stop, extent.offset + extent.length)
        found.append(Extent(path, start, stop - start))
    return tuple(found)


def _seen(piece: Piece, read: Mapping[Extent, memoryview]) -> torch.Tensor:
    """A piece within the extent that covers it."""
    wanted = piece.extent
    for extent, memory in read.items():
        begin = wanted.offset - extent.offset
        if extent.path == wanted.path and 0 <= begin and begin + wanted.length <= extent.length:
            part = memory[begin : begin + wanted.length]
            if begin % piece.dtype.itemsize:
                part = memoryview(bytearray(part))  # torch wants elements aligned
            return piece.tensor(torch.frombuffer(part, dtype=piece.dtype))
    raise AssertionError((wanted, list(read)))

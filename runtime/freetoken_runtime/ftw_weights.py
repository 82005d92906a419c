# SPDX-License-Identifier: Apache-2.0
"""Converted weights: an FTW folder as a source, its mapped records used as they are.

    record                     fields, by what they hold
    layers.3.q k v             weight [N, K] | values, scales | packed, scales_zeros;  bias [N]
    layers.3.experts.17        the same for each of its matrices: `gate up.packed`, `down.packed` …
    layers.3.router, norm      weight

A record's last word names the matrices that are stacked along their outputs, as a layer computes
with them. int8 and int4 are the forms of `kernels`; how int4 bytes are packed depends on the
machine and is named in the header.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from freetoken_storage.weights import Field, FtwNewer, Record
from freetoken_storage.weights_file import WeightsFile, is_weights_folder

from .errors import UnsupportedQuantization, WeightsMismatch
from .kernels.int4_linear import cpu as int4
from .kernels.int4_linear.cpu import PackedInt4
from .kernels.int8_linear import cpu as int8
from .kernels.int8_linear.cpu import PackedInt8
from .spec import ModelSpec
from .spec_records import read as read_spec
from .weight_source import Matrix, Quant, Stored, WeightSource

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
FLOATS = ("float32", "bfloat16", "float16")
META_VERSION = 1
GROUPS = (32, 64, 128, 256)  # that the int4 kernel has
_MAIN = ("weight", "values", "packed")
_EXPERT = re.compile(r"(.*\bexperts\.\d+)\.([^.]+)")
_META = {"config", "group", "notes", "packing", "quant", "spec", "version"}


def is_ftw(folder: Path) -> bool:
    return is_weights_folder(folder)


@dataclass(frozen=True)
class Place:
    """Where the matrices or vectors that are stacked into one are stored. `prefix`: of the names
    of its fields."""

    record: str
    prefix: str

    @classmethod
    def of(cls, names: Sequence[str]) -> "Place":
        stems = {name.rpartition(".")[0] for name in names}
        assert len(stems) == 1, names
        stem = stems.pop()
        unit = " ".join(name.rpartition(".")[2] for name in names)
        whole = f"{stem}.{unit}" if stem else unit
        expert = _EXPERT.fullmatch(whole)
        return cls(whole, "") if expert is None else cls(expert[1], f"{expert[2]}.")


@dataclass(frozen=True)
class Part:
    """Rows of a field that are a parameter."""

    place: Place
    kind: str  # the field's name without the prefix
    rows: slice


def stacked(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of parameters stacked along their first dimension."""
    first = shapes[names[0]]
    return (sum(shapes[name][0] for name in names), *first[1:])


def fields_of(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], quant: Quant | None, group: int
) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """What a matrix's fields must be: kind -> dtype (None: any float) and shape."""
    shape = stacked(names, shapes)
    if quant is None:
        return {"weight": (None, shape)}
    rows, inputs = shape
    if quant == "int8":
        padded = inputs + -inputs % int8.MULTIPLE
        return {"values": ("int8", (rows, padded)), "scales": ("bfloat16", (rows,))}
    padded, blocks = inputs + -inputs % group, rows + -rows % int4.BLOCK
    return {
        "packed": ("uint8", (blocks, padded // 2)),
        "scales_zeros": ("bfloat16", (padded // group, blocks, 2)),
    }


class FtwFolder(WeightSource):
    """Weights of an FTW folder. FtwError and its kinds, UnsupportedQuantization for int4 weights
    that were packed for another machine unless `any_packing`, which packs them anew."""

    finite = True  # the conversion saw to it, and checksums to the rest

    def __init__(self, folder: Path, *, any_packing: bool = False) -> None:
        self.file = WeightsFile(folder)
        meta = _Meta.read(self.file.header.meta, folder)
        self.quant = meta.quant
        self.notes = meta.notes
        self.config = meta.config
        self._group = meta.group
        self._packing = meta.packing
        if meta.packing is not None and meta.packing != int4.byte_layout() and not any_packing:
            raise UnsupportedQuantization(
                f"the int4 weights in {folder} were packed for another machine",
                value=meta.packing.name,
                limit=int4.byte_layout().name,
                remedy="convert them, or their original, on this machine",
            )
        shapes = meta.spec.parameter_shapes()
        self._parts: dict[str, Part] = {}
        for name, part in _parts(self.file.header.records, shapes):
            if name in self._parts:
                raise WeightsMismatch(f"{name!r} is stored twice", value=str(folder))
            self._parts[name] = part
        names = {name: ((Stored(name, shape),),) for name, shape in shapes.items()}
        super().__init__(folder, meta.spec, names)

    @property
    def files(self) -> Sequence[Path]:
        return [self.path / name for name in self.file.header.shards]

    def content_hash(self, cache: Path | None) -> str:
        """The header's digest: it covers every record's checksum."""
        return self.file.digest

    def _stored_names(self) -> set[str]:
        return set(self._parts)

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        """The spec's: what is stored may be padded, and is compared where it is read."""
        return self._shapes[stored]

    def _stored_dtype(self, name: str, stored: Stored) -> torch.dtype:
        part = self._parts[name]
        return DTYPES[self._field(part.place, part.kind).dtype]

    def ahead(self, names: Collection[str]) -> AbstractContextManager[None]:
        wanted = {self._parts[name].place.record for name in names}
        return self.file.ahead(record for record in self.file.records if record in wanted)

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        part = self._parts[name]
        if part.kind not in ("weight", "bias"):
            raise self._mismatch(part.place, "is not stored as numbers", part.kind)
        tensor = self._tensor(part.place, part.kind)[part.rows]
        if tensor.shape != stored.shape or tensor.dtype not in (DTYPES[x] for x in FLOATS):
            raise self._mismatch(part.place, "has the wrong shape or dtype", tuple(tensor.shape))
        return tensor

    def read_matrix(self, names: Sequence[str], quant: Quant | None) -> Matrix | None:
        place = Place.of(names)
        if self.quant is None and quant is not None:
            return None  # quantised as it is loaded
        tensors = []
        wanted = fields_of(names, self._shapes, quant, self._group)
        for kind, (dtype, shape) in wanted.items():
            field = self._field(place, kind)
            if field.shape != shape or field.dtype not in ((dtype,) if dtype else FLOATS):
                raise self._mismatch(place, "has the wrong shape or dtype", field)
            tensors.append(self._tensor(place, kind))
        for name in names:
            self._take(name)
        if quant is None:
            return tensors[0]
        rows, inputs = stacked(names, self._shapes)
        if quant == "int8":
            return PackedInt8(tensors[0], tensors[1], inputs)
        assert self._packing is not None
        packed = int4.repack(tensors[0], self._packing)
        return PackedInt4(packed, tensors[1], self._group, rows, inputs)

    def _field(self, place: Place, kind: str) -> Field:
        record = self.file.records.get(place.record)
        field = None if record is None else record.layout.field(place.prefix + kind)
        if field is None:
            raise self._mismatch(place, "is not stored in this form", kind)
        return field

    def _tensor(self, place: Place, kind: str) -> torch.Tensor:
        """A field, in the file's own pages."""
        field = self._field(place, kind)
        return tensor_of(self.file.mapped(place.record), field)

    def _mismatch(self, place: Place, what: str, value: object) -> WeightsMismatch:
        return WeightsMismatch(
            f"{place.record!r} in {self.path} {what}", value=value, remedy="convert the model again"
        )


def tensor_of(record: memoryview, field: Field) -> torch.Tensor:
    """A field of a record's bytes, as a view of them."""
    count = field.size_bytes // DTYPES[field.dtype].itemsize
    flat = torch.frombuffer(record, dtype=DTYPES[field.dtype], count=count, offset=field.offset)
    return flat.view(field.shape)


def _parts(
    records: Sequence[Record], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Part]]:
    """Every parameter that is stored: the inverse of `Place.of`."""
    for record in records:
        for field in record.layout.fields:
            prefix, _, kind = field.name.rpartition(".")
            stem, _, unit = record.name.rpartition(".")
            place = Place(record.name, f"{prefix}." if prefix else "")
            if prefix:
                stem, unit = record.name, prefix
            names = [f"{stem}.{part}" if stem else part for part in unit.split(" ")]
            start = 0
            for name in names if kind in (*_MAIN, "bias") else ():
                shape = shapes.get(name, ())  # what is unknown is refused as not used
                stop = start + (shape[0] if shape else 0)
                rows = slice(start, stop) if len(names) > 1 else slice(None)
                yield name if kind in _MAIN else f"{name}.bias", Part(place, kind, rows)
                start = stop


@dataclass(frozen=True)
class _Meta:
    """The header's `meta`, checked."""

    spec: ModelSpec
    quant: Quant | None
    group: int
    packing: int4.ByteLayout | None
    notes: tuple[str, ...]
    config: Any

    @classmethod
    def read(cls, meta: Mapping[str, Any], folder: Path) -> "_Meta":
        """FtwNewer if it says what this program does not know."""
        remedy = "update freetoken-agent, or convert the model again"
        if meta.get("version") != META_VERSION or meta.keys() != _META:
            raise FtwNewer(
                f"the weights in {folder} are of another version",
                value=meta.get("version"),
                limit=META_VERSION,
                remedy=remedy,
            )
        layouts = {layout.name: layout for layout in int4.LAYOUTS}
        quant, group, packing, notes = (meta[x] for x in ("quant", "group", "packing", "notes"))
        known = quant in (None, *get_args(Quant)) and isinstance(notes, list)
        known = known and (packing in layouts if quant == "int4" else packing is None)
        if not known or group not in GROUPS:
            raise FtwNewer(
                f"unknown quantisation in {folder}", value=[quant, group, packing], remedy=remedy
            )
        try:
            spec = read_spec(meta["spec"])
        except ValueError as error:
            raise FtwNewer(f"unknown model in {folder}: {error}", remedy=remedy) from error
        said = tuple(str(note) for note in notes)
        return cls(spec, quant, group, layouts.get(packing), said, meta["config"])

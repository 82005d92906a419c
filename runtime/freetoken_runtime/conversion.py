# SPDX-License-Identifier: Apache-2.0
"""From any weight source to an FTW folder, one matrix at a time.

What is stored together follows from how layers ask for their weights: their modules are built once
with stand-ins that remember it. Then each record is read and quantised in slices of rows, and
written; at most one matrix is in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain, groupby
from math import prod
from pathlib import Path

import torch

from freetoken_storage.weights_writer import RecordWriter, WeightsWriter

from .ftw_weights import (
    DTYPES,
    META_VERSION,
    FtwFolder,
    Place,
    fields_of,
    is_ftw,
    stacked,
)
from .kernels.int4_linear import cpu as int4
from .kernels.int4_linear.cpu import PackedInt4
from .kernels.int8_linear.cpu import PackedInt8
from .layers.embedding import TableEmbedding
from .layers.linear import DenseLinear, Linear
from .memory import return_freed_memory
from .spec_records import describe
from .weight_source import Matrix, Quant, WeightSource, in_slices
from .weights import INT4_GROUP, Builder, open_source, usable_quant

# What of a Hugging Face folder goes along: the configuration, the tokenizer and its template.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_CONVERTER = 1  # to be raised when other bytes follow from the same source
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MANY_ELEMENTS = 4 << 20  # of a record: what was allocated for it goes back to the system
Progress = Callable[[int, int], None]  # weights done, weights in total


@dataclass(frozen=True)
class Conversion:
    """What was written. `resumed`: records that an interrupted run had left."""

    folder: Path
    digest: str
    quant: Quant | None
    size_bytes: int
    records: int
    shards: int
    resumed: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are stored as one: matrices stacked along their outputs in the form of
    `quant`, with their biases, or one tensor."""

    names: tuple[str, ...]
    biases: tuple[str, ...] = ()
    quant: Quant | None = None

    @property
    def place(self) -> Place:
        return Place.of(self.names)

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.names, *self.biases)


def convert(
    source: Path | str | WeightSource,
    target: Path | str,
    *,
    quant: Quant | None = None,
    files: Mapping[str, bytes] | None = None,
    on_progress: Progress | None = None,
) -> Conversion:
    """Write a model, at a path or opened, into the folder `target`, which appears when it is whole.
    Run again after an interruption, it goes on where it stopped, to the same bytes.

    `files`: what goes along instead of the source's own tokenizer and configuration. Errors are
    those of loading, and FtwError if the folder exists or cannot be written."""
    opened = source if isinstance(source, WeightSource) else _open(Path(source))
    quant = usable_quant(opened, quant)
    meta = _meta(opened, quant)
    small = _side_files(opened) if files is None else files
    plan = Plan(opened, quant)
    job = {
        "converter": _CONVERTER,
        "source": [opened.path.name, *(_identity(file) for file in opened.files)],
        "meta": meta,
    }
    with WeightsWriter(Path(target), job) as writer:
        resumed = len(writer.records)
        for done in _write_all(plan, writer):
            if on_progress is not None:
                on_progress(done, plan.elements)
        header = writer.finish(meta, small)
    return Conversion(
        folder=Path(target),
        digest=FtwFolder(Path(target)).file.digest,
        quant=quant,
        size_bytes=sum(header.shards.values()),
        records=len(header.records),
        shards=len(header.shards),
        resumed=resumed,
        notes=(*opened.notes, *plan.all_notes()),
    )


def _open(path: Path) -> WeightSource:
    """A converted folder may be packed for another machine: that is a reason to convert it."""
    if path.is_dir() and is_ftw(path):
        source = FtwFolder(path, any_packing=True)
        source.check()
        return source
    return open_source(path)


def _meta(source: WeightSource, quant: Quant | None) -> dict[str, object]:
    return {
        "version": META_VERSION,
        "spec": describe(source.spec),
        "config": _config(source),
        "quant": quant,
        "group": INT4_GROUP,
        "packing": int4.byte_layout().name if quant == "int4" else None,
        "notes": list(source.notes),
    }


def _config(source: WeightSource) -> object:
    """The configuration as it was given, for people."""
    if isinstance(source, FtwFolder):
        return source.config
    file = source.path / "config.json"
    return json.loads(file.read_bytes()) if file.is_file() else None


def _side_files(source: WeightSource) -> dict[str, bytes]:
    paths = [source.path / name for name in SIDE_FILES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _identity(file: Path) -> list[object]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]


class Plan(Builder):
    """What is to be written, in order, found by building every layer once without weights. Mutable
    only while it is made, but for the notes of its reads."""

    def __init__(self, source: WeightSource, quant: Quant | None) -> None:
        super().__init__(source, "float32", quant)
        self.source = source
        self.shapes = source.spec.parameter_shapes()
        self.elements = sum(map(prod, self.shapes.values()))
        self.units: list[Unit] = []
        self.ends()
        for index, layer in enumerate(source.spec.layers):
            self.layer(index, layer)
        self.norm("norm")
        written = [name for unit in self.units for name in unit.parameters]
        assert sorted(written) == sorted(self.shapes), set(written) ^ set(self.shapes)

    def make(self, names: list[str], quant: Quant | None) -> Linear:
        biases = tuple(f"{name}.bias" for name in names if f"{name}.bias" in self.shapes)
        self.units.append(Unit(tuple(names), biases, quant))
        return DenseLinear(torch.empty(stacked(names, self.shapes), device="meta"))

    def tensor(self, name: str) -> torch.Tensor:
        self.units.append(Unit((name,)))
        return torch.zeros(self.shapes[name])

    def table(self, name: str) -> TableEmbedding:
        self.units.append(Unit((name,)))
        return TableEmbedding(torch.empty(self.shapes[name], device="meta"))


def _write_all(plan: Plan, writer: WeightsWriter) -> Iterator[int]:
    """Write what is not there yet; yields how many weights are."""
    done = 0
    for record, group in groupby(plan.units, key=lambda unit: unit.place.record):
        units = list(group)
        elements = sum(prod(plan.shapes[name]) for unit in units for name in unit.parameters)
        if record not in writer.records:
            with writer.record(record) as out:
                for unit in units:
                    _UnitWriter(plan, unit, out).write()
            if elements > _MANY_ELEMENTS:
                return_freed_memory()
        done += elements
        yield done


@dataclass(frozen=True)
class _UnitWriter:
    """Writes one unit's fields into a record."""

    plan: Plan
    unit: Unit
    out: RecordWriter

    def write(self) -> None:
        unit = self.unit
        stored = self.plan.source.read_matrix(unit.names, unit.quant)
        if stored is not None:
            self._write_stored(stored)
        elif unit.quant == "int8":
            self._write_int8()
        elif unit.quant == "int4":
            self._write_int4()
        else:
            self._write_dense()
        if unit.biases:
            bias = torch.cat([self.plan.read(name) for name in unit.biases])
            self._begin("bias", bias.dtype, tuple(bias.shape))
            self._append(bias)

    def _write_stored(self, matrix: Matrix) -> None:
        """What is in its form already."""
        if isinstance(matrix, PackedInt8):
            fields = {"values": matrix.values, "scales": matrix.scales}
        elif isinstance(matrix, PackedInt4):
            fields = {"packed": matrix.packed, "scales_zeros": matrix.scales_zeros}
        else:
            fields = {"weight": matrix}
        for kind, tensor in fields.items():
            self._begin(kind, tensor.dtype, tuple(tensor.shape))
            for rows in in_slices(tensor):
                self._append(rows)

    def _write_dense(self) -> None:
        names = self.unit.names
        if len(self.plan.shapes[names[0]]) == 2:
            slices = (rows for _, rows in self.plan.reader.rows(names))
        else:
            slices = (self.plan.read(name) for name in names)
        first = next(slices)
        dtypes = [self.plan.source.dtype(name) for name in names[1:]]
        dtype = reduce(torch.promote_types, dtypes, first.dtype)
        if dtype is torch.float64:
            dtype = torch.float32  # as `read` rounds it
        self._begin("weight", dtype, stacked(names, self.plan.shapes))
        for rows in chain((first,), slices):
            self._append(rows.to(dtype))

    def _write_int8(self) -> None:
        self._begin_next("values")
        scales = []
        for part in self.plan.reader.int8_parts(self.unit.names):
            self._append(part.values)
            scales.append(part.scales)
        self._begin_next("scales")
        self._append(torch.cat(scales))

    def _write_int4(self) -> None:
        self._begin_next("packed")
        scales_zeros = []
        for part in self.plan.reader.int4_parts(self.unit.names):
            self._append(part.packed)
            scales_zeros.append(part.scales_zeros)
        self._begin_next("scales_zeros")
        self._append(torch.cat(scales_zeros, 1))

    def _begin_next(self, kind: str) -> None:
        """Begin a field of the quantised form, as its readers expect it."""
        unit = self.unit
        dtype, shape = fields_of(unit.names, self.plan.shapes, unit.quant, INT4_GROUP)[kind]
        assert dtype is not None
        self._begin(kind, DTYPES[dtype], shape)

    def _begin(self, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.out.begin(self.unit.place.prefix + kind, _NAMES[dtype], shape)

    def _append(self, tensor: torch.Tensor) -> None:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        self.out.write(flat.numpy().data)

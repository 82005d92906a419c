# SPDX-License-Identifier: Apache-2.0
"""A GGUF file: its tensors as parameters, dequantised or, where they have 4 bits, as integers.

Only the rows that a parameter takes are read, so that one expert costs its own bytes.
"""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from .errors import UnsupportedQuantization
from .gguf_blocks import FLOATS, TYPES, dequantise, groups, row_bytes
from .gguf_config import ROPE_FACTORS, read_gguf_spec
from .gguf_header import TensorInfo, read_header
from .gguf_names import gguf_names
from .weight_source import SLICE_ELEMENTS, Groups, Stored, WeightSource, in_one_run


class GgufFile(WeightSource):
    """Weights of one .gguf file, mapped."""

    def __init__(self, file: Path) -> None:
        header = read_header(file)
        self._tensors = header.tensors
        self._bytes = np.memmap(file, np.uint8, "r")
        self._check_types(file)
        factors = None
        if ROPE_FACTORS in self._tensors:
            info = self._tensors[ROPE_FACTORS]
            factors = tuple(dequantise(info.kind, self._rows(info)).flatten().tolist())
        spec = read_gguf_spec(file, header, factors)
        super().__init__(file, spec, gguf_names(spec))

    @property
    def files(self) -> Sequence[Path]:
        return [self.path]

    def stored_format(self, name: str) -> str | None:
        kinds = {self._tensors[piece.tensor].kind for piece in self._pieces[name]}
        return " and ".join(sorted(kind.name for kind in kinds - FLOATS.keys())) or None

    def _check_types(self, file: Path) -> None:
        for name, info in self._tensors.items():
            if info.kind not in TYPES:
                raise UnsupportedQuantization(
                    f"tensor {name!r} in {file} has a type that cannot be loaded",
                    value=info.kind.name,
                    limit=", ".join(kind.name for kind in TYPES),
                    remedy="use a file of the same model in one of these",
                )

    def _stored_names(self) -> set[str]:
        return set(self._tensors) - {ROPE_FACTORS}

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return self._tensors[stored].shape

    def _stored_dtype(self, name: str, stored: Stored) -> torch.dtype:
        return FLOATS.get(self._tensors[stored.tensor].kind, torch.float32)

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        info = self._tensors[stored.tensor]
        rows = stored.rows()
        if rows is None:  # what is taken are parts of rows
            whole = dequantise(info.kind, self._rows(info)).view(info.shape)
            return stored.take(whole).clone(memory_format=torch.contiguous_format)
        taken = dequantise(info.kind, self._rows(info, rows.flatten()))
        return taken.view(*rows.shape, info.shape[-1])

    def _read_slices(self, name: str, stored: Stored) -> Iterator[torch.Tensor]:
        info, rows = self._tensors[stored.tensor], stored.rows()
        if rows is None or info.shape[-1] != self._shapes[name][-1]:
            yield from super()._read_slices(name, stored)
            return
        for some in torch.split(rows.flatten(), max(1, SLICE_ELEMENTS // info.shape[-1])):
            yield dequantise(info.kind, self._rows(info, some))

    def _read_groups(self, name: str, stored: Stored) -> Groups | None:
        info, rows = self._tensors[stored.tensor], stored.rows()
        return None if rows is None else groups(info.kind, self._rows(info, rows.flatten()))

    def _rows(self, info: TensorInfo, rows: torch.Tensor | None = None) -> np.ndarray:
        """Stored rows, in memory of their own if they are picked."""
        flat = self._bytes[info.offset : info.offset + info.size_bytes]
        stored = flat.reshape(prod(info.shape[:-1]), row_bytes(info.kind, info.shape[-1]))
        if rows is None:
            return stored
        run = in_one_run(rows)
        return stored[rows.numpy()] if run is None else stored[run]

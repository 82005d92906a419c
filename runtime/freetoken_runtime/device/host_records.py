# SPDX-License-Identifier: Apache-2.0
"""All experts in the host's memory, where a device reads them and the CPU computes with them."""

from collections.abc import Callable, Sequence

import torch

from freetoken_storage.weights import RECORD_ALIGNMENT, aligned

from ..experts.records import ExpertForm, units
from ..kernels.experts.record import Activation, ExpertRecord, Kind, RecordMatrix
from ..kernels.int4_linear.cpu import byte_layout
from ..layers.expert import Expert
from ..specs.moe import ClampedGlu
from .accelerator import Accelerator

_LEAST_PER_CHUNK = 32  # records: locked memory comes in powers of two, of which one is left over


class HostRecords:
    """The experts of all layers of one form, page-locked where the accelerator needs it. Written
    once, by `add_layer`, and read by anybody afterwards."""

    def __init__(self, accelerator: Accelerator, form: ExpertForm, num_experts: int) -> None:
        self.form = form
        self.num_experts = num_experts
        self.record_bytes = aligned(form.layout.size_bytes, RECORD_ALIGNMENT)
        self._accelerator = accelerator
        self._chunk_bytes = 1 << (_LEAST_PER_CHUNK * self.record_bytes - 1).bit_length()
        self._chunks = 0
        self._free: list[torch.Tensor] = []  # the last first
        self._layers: list[list[torch.Tensor]] = []
        self._experts: list[list[Expert]] = []

    def __len__(self) -> int:
        return len(self._layers)

    def add_layer(self, load: Callable[[int, memoryview], object]) -> int:
        """One more layer; `load` writes an expert into memory in this form, as
        `experts.tiers.Tier` does. The layer's number."""
        records, experts = [], []
        for expert in range(self.num_experts):
            record = self._room()
            view = record.numpy().data
            load(expert, view)
            records.append(record)
            experts.append(self.form.expert(view))
        self._layers.append(records)
        self._experts.append(experts)
        return len(self._layers) - 1

    def bytes_of(self, layer: int, expert: int) -> torch.Tensor:
        """The record [record] uint8."""
        return self._layers[layer][expert]

    def expert(self, layer: int, expert: int) -> Expert:
        """What computes with it where it lies."""
        return self._experts[layer][expert]

    @property
    def size_bytes(self) -> int:
        return self._chunks * self._chunk_bytes

    def _room(self) -> torch.Tensor:
        if not self._free:
            chunk = self._accelerator.host_memory(self._chunk_bytes)
            whole = self._chunk_bytes // self.record_bytes * self.record_bytes
            self._free = list(torch.split(chunk[:whole], self.record_bytes))[::-1]
            self._chunks += 1
        return self._free.pop()


def record_of(form: ExpertForm) -> ExpertRecord:
    """How a kernel on a device reads the bytes of this form."""
    kind: Kind = form.quant or "dense"
    spec = form.spec.activation
    activation: Activation = "clamped_glu" if isinstance(spec, ClampedGlu) else spec
    up, down = (_matrix(form, kind, names) for names in units(form.spec))
    return ExpertRecord(
        kind=kind,
        dtype=form.dtype,
        up=up,
        down=down,
        activation=activation,
        alpha=spec.alpha if isinstance(spec, ClampedGlu) else 0.0,
        limit=spec.limit if isinstance(spec, ClampedGlu) else 0.0,
        group=form.group if kind == "int4" else 0,
        packing=byte_layout() if kind == "int4" else ExpertRecord.packing,
    )


def _matrix(form: ExpertForm, kind: Kind, names: Sequence[str]) -> RecordMatrix:
    fields = {field.name: field for field in form.layout.fields}
    shapes = dict(form.spec.parameter_shapes(form.width))
    at = " ".join(names)
    weights = fields[f"{at}.{ {'dense': 'weight', 'int8': 'values', 'int4': 'packed'}[kind] }"]
    scales = fields.get(f"{at}.{'scales' if kind == 'int8' else 'scales_zeros'}")
    bias = fields.get(f"{at}.bias")
    return RecordMatrix(
        outputs=sum(shapes[name][0] for name in names),
        inputs=shapes[names[0]][1],
        weights=weights.offset,
        stride=weights.shape[0] if kind == "int4" else weights.shape[1],
        scales=0 if scales is None else scales.offset,
        bias=None if bias is None else bias.offset,
    )

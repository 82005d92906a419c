# SPDX-License-Identifier: Apache-2.0
"""A model whose experts are computed on a device; the rest of it stays with the CPU.

States that follow from experts on a device are not those of a CPU to the bit, so the formats of a
model, and with them its fingerprint, name the device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from ..batch import RowGroup
from ..errors import UnsupportedConfig
from ..experts.choice import disk_tier, has_experts, own_form
from ..experts.records import ExpertForm
from ..ftw_weights import FtwFolder
from ..kernels.experts.cpu import Demand
from ..layers.expert import Served
from ..layers.moe import Moe
from ..layers.routing import Routes
from ..models.decoder import Decoder, DecoderParts, Layer
from ..specs.moe import MoeSpec
from ..weight_source import Quant, WeightSource
from ..weights import INT4_GROUP, Builder, Dtype, LoadedModel, open_source, usable_quant
from .accelerator import Accelerator
from .host_records import HostRecords
from .mixture import DeviceExperts, Serving
from .slots import DeviceSlots


@dataclass(frozen=True)
class DeviceSettings:
    """`budget_bytes`: the device's memory for experts, of which whole chunks are used."""

    budget_bytes: int
    slots_per_chunk: int = 16
    serving: Serving = field(default_factory=Serving)


@dataclass(frozen=True)
class DeviceModel:
    """`model` goes into an `Engine` like any other; `experts` serves it."""

    model: LoadedModel
    experts: DeviceExperts


class DeviceMoe(Moe):
    """A mixture whose routed experts are a device's. Router and what is shared stay."""

    def __init__(self, moe: Moe, layer: int, experts: DeviceExperts) -> None:
        super().__init__(moe.router, moe.experts, moe.shared, moe.latent)
        self._layer = layer
        self._device_experts = experts

    def _mix(self, x: torch.Tensor, routes: Routes, parts: Sequence[RowGroup]) -> torch.Tensor:
        return self._device_experts.mix(self._layer, x, routes, parts)


def load_on_device(
    model: Path | str | WeightSource,
    accelerator: Accelerator,
    settings: DeviceSettings,
    *,
    dtype: Dtype = "float32",
    quant: Quant | None = None,
) -> DeviceModel:
    """As `weights.load`, with all experts in the host's memory where the device reads them.
    UnsupportedConfig without experts, or with experts of several layouts; BudgetTooSmall."""
    source = open_source(model) if isinstance(model, str | Path) else model
    if not has_experts(source):
        raise UnsupportedConfig("a model without experts has nothing to compute on a device")
    builder = _DeviceBuilder(source, dtype, usable_quant(source, quant), accelerator)
    parts = builder.parts()
    source.finish()
    builder.store.close()  # its files were read
    records = builder.records
    assert records is not None
    slots = DeviceSlots(
        *(accelerator, records.record_bytes, len(records), records.num_experts),
        slots_per_chunk=settings.slots_per_chunk,
    )
    slots.resize(settings.budget_bytes)
    experts = DeviceExperts(accelerator, records, slots, settings.serving)
    loaded = LoadedModel(
        decoder=Decoder(source.spec, _with_device(parts, experts)),
        spec=source.spec,
        content_hash=source.content_hash(None),
        formats=builder.formats,
        notes=(*source.notes, *builder.all_notes()),
    )
    return DeviceModel(loaded, experts)


class _DeviceBuilder(Builder):
    """Builds layers whose experts are records. `records`: None until there are some."""

    def __init__(
        self, source: WeightSource, dtype: Dtype, quant: Quant | None, accelerator: Accelerator
    ) -> None:
        super().__init__(source, dtype, quant)
        self.records: HostRecords | None = None
        self._accelerator = accelerator

    def experts(self, at: str, spec: MoeSpec) -> "_OnDevice":
        source, count, at = self._source, spec.router.num_experts, f"{at}experts."
        width = source.spec.hidden_size if spec.latent is None else spec.latent.size
        form = ExpertForm.of(spec.expert, width, self._quant, self._dtype, INT4_GROUP)
        load: Callable[[int, memoryview], object]
        if isinstance(source, FtwFolder):
            form = own_form(form, source, at)
            load = disk_tier(form, source, at, count, self.store.disk).load
        else:
            load = partial(self._fill, form, at)
        if self.records is None:
            self.records = HostRecords(self._accelerator, form, count)
        if (form, count) != (self.records.form, self.records.num_experts):
            raise UnsupportedConfig("experts of several layouts cannot share a device's slots")
        kind = self._accelerator.device.type
        for name, held in form.formats().items():
            self.formats[f"{at}*.{name}"] = f"{held} on {kind}"
        number = self.records.add_layer(load)
        return _OnDevice(number, count * self.records.record_bytes)

    def _fill(self, form: ExpertForm, at: str, expert: int, memory: memoryview) -> None:
        form.fill(memory, lambda name: self.read(f"{at}{expert}.{name}"))


@dataclass(frozen=True)
class _OnDevice:
    """Stands for a layer's experts until the device serves them. `size_bytes`: of the host's."""

    number: int
    size_bytes: int

    def serve(self, wanted: Sequence[Demand], rows: int) -> Iterable[Served]:
        raise AssertionError("experts on a device are not handed out one by one")


def _with_device(parts: DecoderParts, experts: DeviceExperts) -> DecoderParts:
    return replace(parts, layers=tuple(_on_device(layer, experts) for layer in parts.layers))


def _on_device(layer: Layer, experts: DeviceExperts) -> Layer:
    block = layer.feed_forward
    if block is None or not isinstance(block.feed_forward, Moe):
        return layer
    moe = block.feed_forward
    assert isinstance(moe.experts, _OnDevice)
    served = DeviceMoe(moe, moe.experts.number, experts)
    return replace(layer, feed_forward=replace(block, feed_forward=served))

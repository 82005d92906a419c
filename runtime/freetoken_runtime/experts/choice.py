# SPDX-License-Identifier: Apache-2.0
"""Which tier a layer's experts get, and whether a model needs one at all."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from freetoken_storage.weights import Layout

from ..config import ResolvedConfig
from ..errors import InvalidConfig, WeightsMismatch
from ..ftw_weights import FLOATS, FtwFolder
from ..plan import weights_estimate, working_bytes
from ..reports import Offload
from ..specs.moe import MoeSpec
from ..weight_source import WeightSource
from .fetch import Disk
from .mapped import DirectExperts, MappedExperts
from .records import ExpertForm
from .tiers import HeldExperts, RecordExperts, StoredExperts, Tier


def has_experts(source: WeightSource) -> bool:
    return any(isinstance(layer.feed_forward, MoeSpec) for layer in source.spec.layers)


def usual_level(source: WeightSource, config: ResolvedConfig) -> Offload:
    """What is done where nothing was asked: all in memory if that fits, else experts from disk."""
    config = replace(config, quant=source.quant or config.quant)
    needed = weights_estimate(source.spec, config) + working_bytes(source.spec, config)
    if needed <= config.ram_budget_bytes or not has_experts(source):
        return "none"
    return "disk" if _serves_from_disk(source, expert_names(source)) else "none"


def expert_names(source: WeightSource) -> list[str]:
    """The parameters of all experts."""
    return [
        f"layers.{index}.{name}"
        for index, layer in enumerate(source.spec.layers)
        if isinstance(layer.feed_forward, MoeSpec)
        for name in layer.parameter_shapes(source.spec.hidden_size)
        if name.startswith("experts.")
    ]


def check_level(source: WeightSource, level: Offload) -> None:
    """InvalidConfig for experts that cannot be served from where they should; reads nothing."""
    if level == "disk" and not _serves_from_disk(source, expert_names(source)):
        raise InvalidConfig(
            f"experts of {source.path} cannot be served from its files",
            value="offload='disk'",
            limit="safetensors with floating-point weights, or a converted folder",
            remedy="convert the model, or use offload='none'",
        )


def disk_tier(
    form: ExpertForm, source: WeightSource, at: str, num_experts: int, disk: Disk
) -> Tier:
    """Experts `at0`, `at1`, … from the files, after `check_level`."""
    names = [
        f"{at}{expert}.{name}"
        for expert in range(num_experts)
        for name, _ in form.spec.parameter_shapes(form.width)
    ]
    for name in names:
        source.defer(name)
    if isinstance(source, FtwFolder):
        _check_records(form, source, [f"{at}{expert}" for expert in range(num_experts)])
        return RecordExperts(form, source, at, disk)
    return StoredExperts(form, source, at, disk)


def ram_tier(
    form: ExpertForm,
    source: WeightSource,
    at: str,
    num_experts: int,
    read: Callable[[str], torch.Tensor],
) -> Tier | None:
    """Experts as the file has them, if that takes less memory than what computes: the pages of
    converted weights, or parameters in a smaller dtype. None if not."""
    if isinstance(source, FtwFolder):
        return _mapped_tier(form, source, at, num_experts)
    names = [name for name, _ in form.spec.parameter_shapes(form.width)]
    if form.quant is not None or source.quant is not None:
        return None
    if all(source.dtype(f"{at}0.{name}").itemsize >= form.dtype.itemsize for name in names):
        return None
    every = [{name: read(f"{at}{e}.{name}") for name in names} for e in range(num_experts)]
    return HeldExperts(form, every)


def _mapped_tier(form: ExpertForm, source: FtwFolder, at: str, num_experts: int) -> Tier | None:
    """None where each fetch would quantise: that takes longer than reading what was quantised."""
    if source.quant != form.quant:
        return None
    form = own_form(form, source, at)
    records = [f"{at}{expert}" for expert in range(num_experts)]
    for record in records:
        for name, _ in form.spec.parameter_shapes(form.width):
            source.defer(f"{record}.{name}")
    _check_records(form, source, records)
    direct = all(source.file.records[record].layout == form.layout for record in records)
    return (DirectExperts if direct else MappedExperts)(form, source, at, Disk())


def _serves_from_disk(source: WeightSource, names: Sequence[str]) -> bool:
    if isinstance(source, FtwFolder):
        return True
    pieces = (piece for name in names for piece in source.pieces(name))
    return all(source.stored_at(piece.tensor) is not None for piece in pieces)


def _check_records(form: ExpertForm, source: FtwFolder, records: Sequence[str]) -> None:
    """Every expert has the fields that its form wants. WeightsMismatch."""
    stored = ExpertForm.of(form.spec, form.width, source.quant, form.dtype, form.group)
    wanted = {field.name: (field.shape, field.dtype) for field in stored.layout.fields}
    for name in records:
        record = source.file.records.get(name)
        fields = {} if record is None else {x.name: x for x in record.layout.fields}
        fits = fields.keys() == wanted.keys() and all(
            field.shape == wanted[field.name][0]
            and (field.dtype == wanted[field.name][1] or _floats(field.name, field.dtype))
            for field in fields.values()
        )
        if not fits:
            raise WeightsMismatch(
                f"record {name!r} in {source.path} is no expert of this model",
                value=sorted(fields),
                limit=sorted(wanted),
                remedy="convert the model again",
            )


def _floats(field: str, dtype: str) -> bool:
    """Whether a field is one that may be stored in any floating dtype."""
    return field.endswith((".weight", ".bias")) and dtype in FLOATS


def own_form(plain: ExpertForm, source: WeightSource, at: str) -> ExpertForm:
    """The form of the records at `at`, if they are like `plain` but for the offsets of fields."""
    record = source.file.records.get(f"{at}0") if isinstance(source, FtwFolder) else None
    if record is None or _kinds(record.layout) != _kinds(plain.layout):
        return plain
    return replace(plain, layout=record.layout)


def _kinds(layout: Layout) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(field.name, field.dtype, field.shape) for field in layout.fields}

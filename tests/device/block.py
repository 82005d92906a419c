# SPDX-License-Identifier: Apache-2.0
"""Runs blocks in this process; what they share: a report, and mixtures of random experts."""

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freetoken_runtime.batch import Form, RowGroup
from freetoken_runtime.device.accelerator import Accelerator, CudaAccelerator, HostAccelerator
from freetoken_runtime.device.host_records import HostRecords
from freetoken_runtime.device.mixture import DeviceExperts, Serving
from freetoken_runtime.device.slots import DeviceSlots
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.layers.routing import Routes
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.moe import ExpertSpec
from freetoken_runtime.weight_source import Quant

_ALIKE = 37  # every so many experts are the same
# Block -> the module beside this one that has a function of that name.
MODULES = {
    "links": "links",
    "kernels": "kernels",
    "large": "kernels",
    "mixtures": "mixtures",
    "double_buffer": "mixtures",
    "elastic": "mixtures",
    "placement": "placement",
    "graphs": "graphs",
    "order": "order",
}
FORMS: Mapping[str, tuple[Quant | None, torch.dtype]] = {
    "float32": (None, torch.float32),
    "bfloat16": (None, torch.bfloat16),
    "int8": ("int8", torch.float32),
    "int4": ("int4", torch.float32),
}


@dataclass
class Report:
    """What a block found. Mutable."""

    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, name: str, value: object) -> None:
        self.values[name] = value

    def check(self, name: str, holds: bool, value: object = None) -> None:
        self.values[name] = holds if value is None else value
        if not holds:
            self.failures.append(f"{name}: {value}")


@dataclass(frozen=True)
class Place:
    """Where blocks run. `size`: the first number on a device, the second one interpreted."""

    accelerator: Accelerator
    interpreted: bool

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.interpreted else real

    def seconds(self, run: Callable[[], object], times: int = 3) -> float:
        """The best of a few, each until the device is done."""
        best = float("inf")
        for _ in range(1 if self.interpreted else times):
            self.accelerator.finish()
            begun = time.perf_counter()
            run()
            self.accelerator.finish()
            best = min(best, time.perf_counter() - begun)
        return best


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int


def host_records(
    place: Place, shape: Shape, form: str, spec: ExpertSpec | None = None
) -> HostRecords:
    """Experts of all layers: one drawn expert, rolled by a number that few others have."""
    quant, dtype = FORMS[form]
    spec = spec or ExpertSpec(shape.inner)
    kind = ExpertForm.of(spec, shape.hidden, quant, dtype, 32)
    drawn = {
        name: torch.randn(size, generator=generator(7)) / (size[-1] ** 0.5 if len(size) > 1 else 3)
        for name, size in spec.parameter_shapes(shape.hidden)
    }
    made: dict[int, bytes] = {}  # quantising each of hundreds takes a minute

    def load(layer: int, expert: int, memory: memoryview) -> None:
        turn = (layer * shape.experts + expert) % _ALIKE
        if turn not in made:
            kind.fill(memory, lambda name: drawn[name].roll(1 + turn, -1))
            made[turn] = bytes(memory)
        memory[:] = made[turn]

    records = HostRecords(place.accelerator, kind, shape.experts)
    for layer in range(shape.layers):
        records.add_layer(partial(load, layer))
    return records


def device_experts(
    place: Place, records: HostRecords, slots: int, per_chunk: int = 1, **settings: Any
) -> DeviceExperts:
    room = DeviceSlots(
        place.accelerator, records.record_bytes, len(records), records.num_experts, per_chunk
    )
    room.resize(slots * records.record_bytes)
    return DeviceExperts(place.accelerator, records, room, Serving(**settings))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def routes(shape: Shape, rows: int, seed: int) -> Routes:
    """Each row's experts, drawn evenly, on the host."""
    drawn = torch.rand(rows, shape.experts, generator=generator(seed))
    best = drawn.topk(shape.top_k, -1)
    return Routes(best.indices, best.values.softmax(-1))


def rows_of(shape: Shape, rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, shape.hidden, generator=generator(seed))


def whole(rows: int, form: Form) -> list[RowGroup]:
    return [RowGroup(0, rows, form)]


def apart(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest expected value; infinite if not finite."""
    ours, expected = ours.double().cpu(), expected.double().cpu()
    if ours.shape != expected.shape or not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours - expected).abs().max() / expected.abs().max())


def small_spec(*, layers: int = 3, experts: int = 12) -> ModelSpec:
    """A small model with experts in all layers but the first."""
    return read_spec(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 211,
            "hidden_size": 60,
            "intermediate_size": 84,
            "num_hidden_layers": layers,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("blocks", nargs="+")
    args = parser.parse_args()
    accelerator = HostAccelerator() if args.interpret else CudaAccelerator()
    place = Place(accelerator, args.interpret)
    if args.interpret:  # fresh memory is NaN, so that what reads it shows
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
    for name in args.blocks:
        (args.out / f"{name}.json").write_text(json.dumps(_result(name, place), indent=1))


def _result(name: str, place: Place) -> dict[str, Any]:
    report, begun, error = Report(), time.perf_counter(), None
    try:
        run = getattr(importlib.import_module(f"tests.device.{MODULES[name]}"), name)
        with torch.inference_mode():
            run(place, report)
    except Exception:  # noqa: BLE001 - the edge of a block, whose fault is its result
        error = traceback.format_exc()
    return {
        "block": name,
        "ok": error is None and not report.failures,
        "device": _device_name(place),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begun, 3),
        "failures": report.failures,
        "error": error,
        "values": report.values,
    }


def _device_name(place: Place) -> str:
    return "interpreter" if place.interpreted else place.accelerator.name


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder of any configuration with random weights, written tensor by tensor: what
loading and conversion are measured on where no checkpoint of the wanted shapes is at hand."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from .models.registry import read_family
from .random_weights import RandomWeights
from .safetensors_writer import write_safetensors
from .spec import ModelSpec
from .weight_source import Ways

Progress = Callable[[int, int], None]  # bytes written, bytes in total


def write_random_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    on_progress: Progress | None = None,
) -> ModelSpec:
    """One file of all parameters as the family's checkpoints store them one by one, and config.json
    at last. The tokenizer is the caller's business; one tensor is in memory at a time."""
    family, spec = read_family(config)
    source = RandomWeights(spec, seed)
    source.check()
    shapes = spec.parameter_shapes()
    stored = {name: _tensor(name, ways) for name, ways in family.names(spec).items()}
    total, done = dtype.itemsize * sum(map(prod, shapes.values())), 0
    folder.mkdir(parents=True, exist_ok=True)

    def weights() -> Iterator[torch.Tensor]:
        for name in shapes:
            yield source.read(name).to(dtype)

    named = {stored[name]: shape for name, shape in shapes.items()}
    for written in write_safetensors(folder / "model.safetensors", named, weights(), dtype):
        done += written
        if on_progress is not None:
            on_progress(done, total)
    source.finish()
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    return spec


def _tensor(name: str, ways: Ways) -> str:
    """The tensor that is this parameter and nothing else, as it is."""
    for pieces in ways:
        if len(pieces) == 1 and not (pieces[0].view or pieces[0].part or pieces[0].order):
            return pieces[0].tensor
    raise ValueError(f"{name!r} shares tensors with others in every checkpoint")

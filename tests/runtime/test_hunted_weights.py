# SPDX-License-Identifier: Apache-2.0
"""Hostile weight folders. Oracle: our own error with the file's name, whatever is in it."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.errors import WeightsDamaged
from freetoken_runtime.weights import load


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama, copy)
    return copy


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_doubles_beyond_float32_are_refused(
    folder: Path, name: str, quant: Literal["int8", "int4"] | None
) -> None:
    """Finite as stored, infinite as computed with."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].double() * 1e300
    assert torch.isfinite(tensors[name]).all()
    save_file(tensors, file)
    with pytest.raises(WeightsDamaged, match="not finite"):
        load(folder, quant=quant)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deeply_nested_json_is_damage(folder: Path, file: str) -> None:
    """The parser's recursion limit is not the caller's problem."""
    (folder / file).write_text("[" * 200_000)
    with pytest.raises(WeightsDamaged, match=file):
        load(folder)


def test_shard_names_longer_than_a_file_name_are_refused(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "a" * 300 + ".safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsDamaged, match="plain file name"):
        load(folder)

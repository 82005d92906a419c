# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: every arrangement that loads, every damage that is named."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime import safetensors_weights
from freetoken_runtime.errors import (
    ModelNotFound,
    UnsupportedQuantization,
    WeightsDamaged,
    WeightsError,
    WeightsMismatch,
    WeightsNotFound,
)
from freetoken_runtime.safetensors_weights import SafetensorsFolder
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weight_source import Quant, Stored
from freetoken_runtime.weights import load, open_source

SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One whole model.safetensors."""
    build_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same weights in three shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::SHARDS]}
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    tensors = {name: source.read(name) for name in source.spec.parameter_shapes()}
    source.finish()
    return tensors


def test_m5_shards_load_with_and_without_an_index(sharded: Path, tmp_path: Path) -> None:
    """Oracle: each other, and names and shapes of the spec."""
    indexed = read_all(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    without = read_all(sharded)
    assert all(torch.equal(indexed[name], without[name]) for name in indexed)
    assert len(open_source(sharded).files) == SHARDS


def test_one_file_beside_consolidated_ones_is_enough(folder: Path) -> None:
    """Oracle: the file that transformers reads; mistral's own format beside it is ignored."""
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert [file.name for file in open_source(folder).files] == ["model.safetensors"]


@pytest.mark.parametrize("index", [True, False])
def test_m6_a_missing_shard_is_named(sharded: Path, index: bool) -> None:
    """Oracle: the message names the file; without an index the numbering tells."""
    name = "model-00002-of-00003.safetensors"
    (sharded / name).unlink()
    if not index:
        (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsNotFound, match=name) as error:
        open_source(sharded)
    assert error.value.code == "weights_not_found"


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_m6_m7_a_truncated_or_empty_shard_is_named(sharded: Path, part: float) -> None:
    """Oracle: the message names the file; nothing is computed from it."""
    file = sharded / "model-00003-of-00003.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(WeightsDamaged, match=file.name) as error:
        load(sharded)
    assert error.value.code == "weights_damaged"


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"\xff" * 64,
        os.urandom(4096),
        b"PK\x03\x04" + bytes(500),
        (2**40).to_bytes(8, "little") + b"{}",
    ],
)
def test_m6_a_foreign_file_is_named(folder: Path, content: bytes) -> None:
    """Oracle: the message names the file."""
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsDamaged, match=r"model\.safetensors"):
        open_source(folder)


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7]
)
def test_an_index_cannot_point_outside_its_folder(sharded: Path, name: Any) -> None:
    """Oracle: refused by name before any file is opened."""
    index = {"weight_map": {"model.norm.weight": name}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsDamaged, match="plain file name"):
        open_source(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\xff"])
def test_a_damaged_index_is_named(sharded: Path, text: str) -> None:
    """Oracle: the message names the index."""
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsDamaged, match=r"index\.json"):
        open_source(sharded)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff\xfe"])
def test_a_damaged_config_is_named(folder: Path, text: str) -> None:
    """Oracle: the message names config.json."""
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsDamaged, match=r"config\.json"):
        open_source(folder)


def test_what_is_not_a_model_is_not_found(tmp_path: Path) -> None:
    """Oracle: the error's type and code, for no path, no config, and no weights."""
    with pytest.raises(ModelNotFound) as error:
        open_source(tmp_path / "nothing")
    assert error.value.code == "model_not_found"
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        open_source(tmp_path)
    build_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsNotFound, match="no safetensors file"):
        open_source(tmp_path)


def test_m9_missing_unused_and_misshapen_weights_are_named(folder: Path) -> None:
    """Oracle: the message names the tensor."""
    name = "model.layers.1.mlp.up_proj.weight"
    original = load_file(folder / "model.safetensors")

    def write(**changes: torch.Tensor | None) -> None:
        tensors = {**original, **changes}
        kept = {key: value for key, value in tensors.items() if value is not None}
        save_file(kept, folder / "model.safetensors")

    write(**{name: None})
    with pytest.raises(WeightsMismatch, match=f"missing.*{name}") as error:
        open_source(folder)
    assert error.value.code == "weights_mismatch"
    write(**{"model.layers.1.mlp.side_proj.weight": original[name].clone()})
    with pytest.raises(WeightsMismatch, match=r"not used.*side_proj"):
        open_source(folder)
    write(**{name: original[name].t().contiguous()})
    with pytest.raises(WeightsMismatch, match="wrong shape"):
        open_source(folder)


def test_m9_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    """Oracle: the message names the tensor, equal copies or not."""
    first = sharded / "model-00001-of-00003.safetensors"
    second = sharded / "model-00002-of-00003.safetensors"
    doubled = next(iter(load_file(first)))
    save_file({**load_file(second), doubled: load_file(first)[doubled]}, second)
    with pytest.raises(WeightsMismatch, match="stored twice"):
        open_source(sharded)


def test_m9_every_parameter_is_read_exactly_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a count of the numbers read per parameter during a real load, in every form, whole or
    in slices."""
    monkeypatch.setattr(safetensors_weights, "SLICE_ELEMENTS", 7 * 60)
    original, in_slices = SafetensorsFolder._read, SafetensorsFolder._read_slices
    quants: tuple[Quant | None, ...] = (None, "int8", "int4")
    for quant in quants:
        counts: Counter[str] = Counter()

        def counted(
            self: SafetensorsFolder, name: str, stored: Stored, counts: Counter[str] = counts
        ) -> torch.Tensor:
            tensor = original(self, name, stored)
            counts[name] += tensor.numel()
            return tensor

        def counted_slices(
            self: SafetensorsFolder, name: str, stored: Stored, counts: Counter[str] = counts
        ) -> Iterator[torch.Tensor]:
            for rows in in_slices(self, name, stored):
                counts[name] += rows.numel()
                yield rows

        with monkeypatch.context() as patch:
            patch.setattr(SafetensorsFolder, "_read", counted)
            patch.setattr(SafetensorsFolder, "_read_slices", counted_slices)
            load(folder, quant=quant)
        shapes = open_source(folder).spec.parameter_shapes()
        assert counts == {name: prod(shape) for name, shape in shapes.items()}


def test_rotary_buffers_are_skipped_by_name(folder: Path) -> None:
    """Oracle: old checkpoints store inv_freq; anything else unknown stays an error."""
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({key: torch.ones(5)}))
    open_source(folder)
    change(folder, lambda tensors: tensors.update({"model.inv_freq_table": torch.ones(5)}))
    with pytest.raises(WeightsMismatch, match="inv_freq_table"):
        open_source(folder)


def test_m10_heads_tied_and_untied_present_and_absent(folder: Path) -> None:
    """Oracle: the four combinations, and a copy that differs from what it is tied to."""
    assert not open_source(folder).spec.tied_head
    tensors = load_file(folder / "model.safetensors")
    change(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(WeightsMismatch, match=r"missing.*lm_head\.weight"):
        open_source(folder)
    change_config(folder, tie_word_embeddings=True)
    assert open_source(folder).spec.tied_head
    equal = tensors["model.embed_tokens.weight"].clone()
    change(folder, lambda t: t.update({"lm_head.weight": equal}))
    assert open_source(folder).spec.tied_head
    change(folder, lambda t: t.update({"lm_head.weight": equal + 1}))
    with pytest.raises(WeightsMismatch, match="differs from the embedding"):
        open_source(folder)


def test_integer_tensors_are_refused(folder: Path) -> None:
    """Oracle: the message names tensor and dtype."""
    key = "model.norm.weight"
    change(folder, lambda t: t.update({key: torch.ones(60, dtype=torch.int32)}))
    with pytest.raises(UnsupportedQuantization, match=r"model\.norm\.weight.*int32"):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_weights_that_are_not_finite_are_refused(folder: Path, bad: float, quant: Any) -> None:
    """Oracle: the message names the parameter: integers would hide a NaN."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = bad

    change(folder, spoil)
    with pytest.raises(WeightsDamaged, match=r"layers\.1\.down.*not finite"):
        load(folder, quant=quant)


def test_every_weights_error_is_one_family() -> None:
    """Oracle: the tree drawn in errors.py."""
    assert all(
        issubclass(x, WeightsError) for x in (WeightsDamaged, WeightsMismatch, WeightsNotFound)
    )

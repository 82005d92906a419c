# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder: config.json and one or several safetensors files, with or without index.

Files are mapped, tensors copied out of the mapping one at a time.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import (
    ModelNotFound,
    UnsupportedQuantization,
    WeightsDamaged,
    WeightsMismatch,
    WeightsNotFound,
)
from .models.registry import family_of
from .weight_source import WeightSource

INDEX_NAME = "model.safetensors.index.json"
_SKIPPABLE = re.compile(r"rotary_emb\.inv_freq$")  # a buffer that the spec's rope replaces
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TIED_HEAD = "lm_head.weight"


class SafetensorsFolder(WeightSource):
    """Weights of a folder. Errors name the file: WeightsNotFound, WeightsDamaged."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        family = family_of(config.get("model_type"))
        spec = family.read(config)
        super().__init__(folder, spec, family.names(spec))
        self._files = _shards(folder)
        self._handles: dict[str, Any] = {}  # tensor -> the open file that holds it
        for file in self._files:
            handle = _open(file)
            for tensor in handle.keys():
                if tensor in self._handles:
                    raise WeightsMismatch(f"tensor {tensor!r} is stored twice", value=str(file))
                self._handles[tensor] = handle
        self._drop_copy_of_tied_head()

    @property
    def files(self) -> Sequence[Path]:
        return self._files

    def _stored_names(self) -> set[str]:
        return {name for name in self._handles if not _SKIPPABLE.search(name)}

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._handles[stored].get_slice(stored).get_shape())

    def _read(self, name: str, stored: str) -> torch.Tensor:
        tensor = self._handles[stored].get_tensor(stored)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedQuantization(
                f"tensor {stored!r} in {self.path} is stored in a dtype that is not supported",
                value=str(tensor.dtype),
                limit="float32, bfloat16, float16, float64",
            )
        copy: torch.Tensor = tensor.clone()
        return copy

    def _drop_copy_of_tied_head(self) -> None:
        """Some exporters store a tied head too: an equal copy is redundant, any other an error."""
        if not self.spec.tied_head or _TIED_HEAD not in self._handles:
            return
        embedding = self._names["embedding"]
        if embedding in self._handles:
            copy = self._handles[_TIED_HEAD].get_tensor(_TIED_HEAD)
            if not torch.equal(copy, self._handles[embedding].get_tensor(embedding)):
                raise WeightsMismatch(
                    f"{_TIED_HEAD!r} in {self.path} differs from the embedding it is tied to",
                    remedy="set tie_word_embeddings to false in config.json",
                )
        del self._handles[_TIED_HEAD]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. ModelNotFound if absent, WeightsDamaged if it is not an object."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(
            "the folder has no config.json", value=str(folder), remedy="pass a model folder"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsDamaged(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise WeightsDamaged(f"{file} is not a JSON object")
    return config


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_shards(folder, index)
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsNotFound(
            f"no safetensors file in {folder}", remedy="download or convert the weights"
        )
    _refuse_gaps(files)
    return files


def _indexed_shards(folder: Path, index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightsDamaged(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if (
            not isinstance(name, str)
            or name != Path(name).name
            or not name.endswith(".safetensors")
            or len(name.encode(errors="replace")) > 255  # no file system holds more
        ):
            raise WeightsDamaged(f"{index} names a shard that is not a plain file name", value=name)
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise WeightsNotFound(f"weight file {file} is missing", remedy="download it again")
    return files


def _refuse_gaps(files: Sequence[Path]) -> None:
    """Without an index, the names `…-00001-of-00003` tell how many files there must be."""
    for file in files:
        match = re.search(r"-(\d+)-of-(\d+)\.safetensors$", file.name)
        if match is None:
            continue
        width, count = len(match[2]), int(match[2])
        for number in range(1, min(count, 10_000) + 1):
            tail = f"-{number:0{width}d}-of-{match[2]}.safetensors"
            other = file.with_name(file.name[: match.start()] + tail)
            if not other.is_file():
                raise WeightsNotFound(f"weight file {other} is missing", remedy="download it again")


def _open(file: Path) -> Any:
    if file.stat().st_size == 0:
        raise WeightsDamaged(f"weight file {file} is empty", remedy="download it again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsDamaged(
            f"weight file {file} is truncated or not safetensors ({error})",
            value=f"{file.stat().st_size} bytes",
            remedy="download it again",
        ) from error

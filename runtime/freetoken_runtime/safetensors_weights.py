# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder: config.json and one or several safetensors files, with or without index.

Files are mapped, tensors copied out of the mapping one at a time.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
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
from .models.registry import read_family
from .quantised.config import read_scheme
from .quantised.tensors import Entry, QuantisedTensor, Scheme, picked
from .weight_source import SLICE_ELEMENTS, Groups, Names, Stored, StoredAt, WeightSource

INDEX_NAME = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = dict(zip(("F32", "BF16", "F16", "F64"), _FLOATS, strict=True))
_HEAD = "lm_head.weight"
_REPLACED = re.compile(r"rotary_emb\.inv_freq$")  # a buffer that the spec's rope replaces
# What of a larger model the text part does without; anything else unused is an error.
_SKIPPABLE = {
    "vision": re.compile(
        r"(model\.)?(visual|vision_tower|vision_model|vision_encoder|embed_vision"
        r"|multi_modal_projector|patch_merger)\."
    ),
    "audio": re.compile(r"(model\.)?(audio_tower|audio_model|audio_encoder|embed_audio)\."),
    "multi-token prediction": re.compile(r"(model\.)?mtp(_\w+)?\."),
}
_LAYER = re.compile(
    r"(?:language_model\.)?(?:model|backbone)\.(?:language_model\.)?layers\.(\d+)\."
)


class SafetensorsFolder(WeightSource):
    """Weights of a folder. Errors name the file: WeightsNotFound, WeightsDamaged."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        scheme = read_scheme(config)
        family, spec = read_family(config)
        self._files = _shards(folder)
        self._handles: dict[str, Any] = {}  # tensor -> the open file that holds it
        self._places: dict[str, StoredAt] = {}
        for file in self._files:
            handle = _open(file)
            for tensor in handle.keys():
                if tensor in self._handles:
                    raise WeightsMismatch(f"tensor {tensor!r} is stored twice", value=str(file))
                self._handles[tensor] = handle
            self._places |= _places(file)
        place = _text_prefix(self._handles)
        names = family.names(spec)
        super().__init__(folder, spec, names if place is None else _placed(names, place))
        self._drop_what_the_text_part_lacks()
        if spec.tied_head:
            self._drop_copy_of_tied_head(_HEAD if place is None else place(_HEAD))
        self._quantised: Mapping[str, QuantisedTensor] = {}
        self._parts: frozenset[str] = frozenset()  # stored tensors that are seen as others
        if scheme is not None:
            self._put_together(scheme)

    @property
    def files(self) -> Sequence[Path]:
        return self._files

    def _stored_names(self) -> set[str]:
        return (set(self._handles) - self._parts) | self._quantised.keys()

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        if stored in self._quantised:
            return self._quantised[stored].shape
        return self._entry(stored).shape

    def stored_format(self, name: str) -> str | None:
        found = (self._quantised.get(piece.tensor) for piece in self._pieces[name])
        return " and ".join(sorted({x.format for x in found if x is not None})) or None

    def _entry(self, stored: str) -> Entry:
        header = self._handles[stored].get_slice(stored)
        return Entry(tuple(header.get_shape()), header.get_dtype())

    def _tensor(self, stored: str) -> torch.Tensor:
        """A view of the file."""
        tensor: torch.Tensor = self._handles[stored].get_tensor(stored)
        return tensor

    def _floats(self, stored: str) -> torch.Tensor:
        """The same of a tensor that is not quantised."""
        tensor = self._tensor(stored)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedQuantization(
                f"tensor {stored!r} in {self.path} is stored in a dtype that is not supported",
                value=str(tensor.dtype),
                limit="float32, bfloat16, float16, float64",
            )
        return tensor

    def _stored_dtype(self, name: str, stored: Stored) -> torch.dtype:
        if stored.tensor in self._quantised:
            return torch.float32
        kind = self._handles[stored.tensor].get_slice(stored.tensor).get_dtype()
        return _DTYPES.get(kind) or super()._stored_dtype(name, stored)

    def stored_at(self, tensor: str) -> StoredAt | None:
        return self._places.get(tensor)

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        quantised = self._quantised.get(stored.tensor)
        if quantised is not None:
            return self._dequantise(quantised, stored)
        tensor = self._floats(stored.tensor)
        return stored.take(tensor).clone(memory_format=torch.contiguous_format)

    def _read_slices(self, name: str, stored: Stored) -> Iterator[torch.Tensor]:
        quantised, width = self._quantised.get(stored.tensor), stored.shape[-1]
        rows = stored.rows()
        if rows is None or width != self._shapes[name][-1]:
            yield from super()._read_slices(name, stored)
            return
        for some in torch.split(rows.flatten(), max(1, SLICE_ELEMENTS // width)):
            if quantised is not None:
                yield quantised.dequantise(self._tensor, some)
            else:
                yield picked(self._floats(stored.tensor).view(-1, width), some)

    def _dequantise(self, quantised: QuantisedTensor, stored: Stored) -> torch.Tensor:
        rows = stored.rows()
        if rows is None:  # what is taken are parts of rows
            whole = quantised.dequantise(self._tensor).view(quantised.shape)
            return stored.take(whole).clone(memory_format=torch.contiguous_format)
        taken = quantised.dequantise(self._tensor, rows.flatten())
        return taken.view(*rows.shape, quantised.shape[-1])

    def _read_groups(self, name: str, stored: Stored) -> Groups | None:
        quantised, rows = self._quantised.get(stored.tensor), stored.rows()
        if quantised is None or rows is None:
            return None
        return quantised.groups(self._tensor, rows.flatten())

    def _put_together(self, scheme: Scheme) -> None:
        """See tensors that are parts of a quantised one as that one."""
        found = scheme.find({name: self._entry(name) for name in self._handles}, self._tensor)
        self._quantised = found.tensors
        parts = {part for tensor in found.tensors.values() for part in tensor.parts}
        self._parts = found.unused | parts
        self.notes += scheme.notes
        if found.unused:
            self.notes += (f"{len(found.unused)} scales of activations were left out",)

    def _drop_what_the_text_part_lacks(self) -> None:
        counts: dict[str, int] = {}
        for name in list(self._handles):
            layer = _LAYER.match(name)
            kind = next((kind for kind, at in _SKIPPABLE.items() if at.match(name)), None)
            if layer is not None and int(layer[1]) >= self.spec.num_layers:
                kind = f"layers from {self.spec.num_layers} on"
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
            if kind is not None or _REPLACED.search(name):
                del self._handles[name]
        self.notes = tuple(
            f"{count} tensors were left out: {kind}" for kind, count in sorted(counts.items())
        )

    def _drop_copy_of_tied_head(self, head: str) -> None:
        """Some exporters store a tied head too: an equal copy is redundant, any other an error."""
        if head not in self._handles:
            return
        embedding = self._names["embedding"][0][0].tensor
        if embedding in self._handles:
            if not torch.equal(self._tensor(head), self._tensor(embedding)):
                raise WeightsMismatch(
                    f"{head!r} in {self.path} differs from the embedding it is tied to",
                    remedy="set tie_word_embeddings to false in config.json",
                )
        del self._handles[head]


def _text_prefix(stored: Collection[str]) -> Callable[[str], str] | None:
    """Where a multimodal model keeps its text part: a tensor's own name -> its name there."""
    if any(name.startswith("model.language_model.") for name in stored):
        return lambda name: re.sub(r"^model\.", "model.language_model.", name)
    if any(name.startswith("language_model.model.") for name in stored):
        head_outside = _HEAD in stored
        return lambda name: name if name == _HEAD and head_outside else f"language_model.{name}"
    return None


def _placed(names: Names, place: Callable[[str], str]) -> Names:
    return {
        name: tuple(tuple(replace(x, tensor=place(x.tensor)) for x in way) for way in ways)
        for name, ways in names.items()
    }


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


def _places(file: Path) -> dict[str, StoredAt]:
    """Where the tensors of a file lie, of those whose dtype we compute with. The file is known to
    be whole: `_open` has read the same header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {
        name: StoredAt(file, 8 + length + tensor["data_offsets"][0], _DTYPES[tensor["dtype"]])
        for name, tensor in header.items()
        if name != "__metadata__" and tensor["dtype"] in _DTYPES
    }

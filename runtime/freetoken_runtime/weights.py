# SPDX-License-Identifier: Apache-2.0
"""From weight files to a decoder, in the kernel forms that were asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .content_hash import content_hash
from .errors import ModelNotFound
from .gguf_weights import GgufFile
from .layers.attention import Attention
from .layers.embedding import Embedding, TableEmbedding, TiedEmbedding
from .layers.linear import DenseLinear, Linear
from .layers.mlp import Mlp
from .layers.norm import RmsNorm
from .models.decoder import Decoder, DecoderParts, Layer
from .safetensors_weights import SafetensorsFolder
from .spec import LayerSpec, ModelSpec
from .weight_source import WeightSource

Dtype = Literal["float32", "bfloat16"]
Quant = Literal["int8", "int4"]


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with what its loading has to report."""

    decoder: Decoder
    spec: ModelSpec
    content_hash: str  # hex digest of the weight files' bytes
    notes: tuple[str, ...] = ()  # what was not loaded as asked, one sentence each


def open_source(path: Path | str) -> WeightSource:
    """Open a Hugging Face folder or a .gguf file and check it against its architecture, without
    reading weights. ModelNotFound, UnsupportedArchitecture, UnsupportedConfig, WeightsError."""
    path = Path(path)
    if path.is_dir():
        source: WeightSource = SafetensorsFolder(path)
    elif path.is_file():
        source = GgufFile(path)
    else:
        raise ModelNotFound(
            "no model at this path", value=str(path), remedy="pass a model folder or a .gguf file"
        )
    source.check()
    return source


def load(
    path: Path | str,
    *,
    dtype: Dtype = "float32",
    quant: Quant | None = None,
    hash_cache: Path | None = None,
) -> LoadedModel:
    """Load a model. Every parameter is read exactly once. `hash_cache`: see `content_hash`."""
    source = open_source(path)
    decoder = Decoder(source.spec, _Builder(source).parts())
    source.finish()
    return LoadedModel(decoder, source.spec, content_hash(source.files, hash_cache))


class _Builder:
    """Builds layers from a source, one parameter at a time, so that at most one matrix is held
    twice."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._eps = source.spec.norm_eps

    def parts(self) -> DecoderParts:
        spec = self._source.spec
        if spec.tied_head:
            head = self._linear("embedding")
            embedding: Embedding = TiedEmbedding(head)
        else:
            embedding, head = TableEmbedding(self._source.read("embedding")), self._linear("head")
        layers = tuple(self._layer(index, layer) for index, layer in enumerate(spec.layers))
        return DecoderParts(embedding, layers, self._norm("norm"), head)

    def _layer(self, index: int, spec: LayerSpec) -> Layer:
        at = f"layers.{index}."
        normed = spec.mixer.qk_norm
        mixer = Attention(
            spec=spec.mixer,
            qkv=self._linear(at + "q", at + "k", at + "v"),
            output=self._linear(at + "o"),
            q_norm=self._norm(at + "q_norm") if normed else None,
            k_norm=self._norm(at + "k_norm") if normed else None,
        )
        mlp = Mlp(self._linear(at + "gate", at + "up"), self._linear(at + "down"))
        return Layer(
            self._norm(at + "mixer_norm"), mixer, self._norm(at + "feed_forward_norm"), mlp
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._source.read(name).float(), self._eps)

    def _linear(self, *names: str) -> Linear:
        """One linear layer from matrices stacked along their outputs."""
        shapes = [self._source.shape(name) for name in names]
        weight = torch.empty(sum(shape[0] for shape in shapes), shapes[0][1])
        slices = torch.split(weight, [shape[0] for shape in shapes])
        for name, rows in zip(names, slices, strict=True):
            rows.copy_(self._source.read(name))
        return DenseLinear(weight, self._bias(*names))

    def _bias(self, *names: str) -> torch.Tensor | None:
        biases = [f"{name}.bias" for name in names]
        if not self._source.has(biases[0]):
            return None
        return torch.cat([self._source.read(bias).float() for bias in biases])

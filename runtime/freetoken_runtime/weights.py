# SPDX-License-Identifier: Apache-2.0
"""From weight files to a decoder, in the kernel forms that were asked for."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from .config import ResolvedConfig
from .errors import ModelNotFound, UnsupportedQuantization
from .experts.choice import check_level, disk_tier, expert_names, has_experts, own_form, ram_tier
from .experts.records import ExpertForm
from .experts.store import ExpertStore
from .ftw_weights import FtwFolder, is_ftw
from .gguf_weights import GgufFile
from .kernels.dense_linear.cpu import has_onednn
from .layers import attention, gated_delta, kda, mamba, mla, mlp, moe, parallel, short_conv
from .layers.embedding import Embedding, TableEmbedding, TiedEmbedding
from .layers.expert import Experts
from .layers.linear import DenseLinear, IntegerLinear, Linear
from .layers.norm import RmsNorm
from .layers.parts import FeedForward, Mixer, Parts
from .losses import Losses
from .models.decoder import Decoder, DecoderParts, FeedForwardBlock, Layer, MixerBlock
from .plan import MemoryPlan, divide_slots, plan_memory, slots_within
from .reports import Offload
from .safetensors_weights import SafetensorsFolder
from .spec import LayerSpec, ModelSpec
from .specs.attention import AttentionSpec, MlaSpec
from .specs.convolution import ShortConvSpec
from .specs.gated_delta import GatedDeltaSpec, KdaSpec
from .specs.mamba import Mamba2Spec
from .specs.mlp import MlpSpec
from .specs.moe import MoeSpec
from .specs.parallel import ParallelSpec
from .weight_reader import WeightReader
from .weight_source import Matrix, Quant, WeightSource

INT4_GROUP = 32  # as in GGUF; larger groups are no faster (docs/decisions/0012-int4.md)
Dtype = Literal["float32", "bfloat16"]

# What builds a layer, by the type of its spec.
_MIXERS: Mapping[type, Callable[[Any, Parts], Mixer]] = {
    AttentionSpec: attention.build,
    MlaSpec: mla.build,
    GatedDeltaSpec: gated_delta.build,
    KdaSpec: kda.build,
    Mamba2Spec: mamba.build,
    ParallelSpec: parallel.build,
    ShortConvSpec: short_conv.build,
}
_FEED_FORWARDS: Mapping[type, Callable[[Any, Parts], FeedForward]] = {
    MlpSpec: mlp.build,
    MoeSpec: moe.build,
}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with what its loading has to report.

    `formats`: matrix -> how its weights are held, e.g. `layers.*.gate up: int4 in groups of 32`.
    `notes`: what was not done as asked, or deserves to be known, one sentence each. `experts`: the
    slots of those that do not stay in memory.
    """

    decoder: Decoder
    spec: ModelSpec
    content_hash: str  # hex digest of the weight files' bytes
    formats: Mapping[str, str]
    notes: tuple[str, ...]
    experts: ExpertStore = field(default_factory=lambda: ExpertStore("none"))
    quant: Quant | None = None  # of matrices: what was asked, or what the files hold

    def plan(self, config: ResolvedConfig) -> MemoryPlan:
        """How a configuration divides its memory. BudgetTooSmall."""
        weights = self.decoder.size_bytes + self.experts.fixed_bytes
        config = replace(config, quant=self.quant or config.quant)  # as it is held, so it computes
        budget, demands = config.ram_budget_bytes, self.experts.demands()
        return plan_memory(self.spec, config, weights, budget, demands)

    def fingerprint_parts(self) -> dict[str, str]:
        """What decides a state: weights, architecture, rope, context, quantisation."""
        quantisation = json.dumps(dict(self.formats), sort_keys=True)
        return {
            "weights": self.content_hash,
            **self.spec.fingerprint_parts(),
            "quantisation": hashlib.sha256(quantisation.encode()).hexdigest(),
        }


def open_source(path: Path | str) -> WeightSource:
    """Open a Hugging Face folder, a folder of converted weights or a .gguf file and check it
    against its architecture, without reading weights. ModelNotFound, UnsupportedArchitecture,
    UnsupportedConfig, WeightsError, FtwError."""
    path = Path(path)
    if path.is_dir():
        source: WeightSource = FtwFolder(path) if is_ftw(path) else SafetensorsFolder(path)
    elif path.is_file():
        source = GgufFile(path)
    else:
        raise ModelNotFound(
            "no model at this path", value=str(path), remedy="pass a model folder or a .gguf file"
        )
    source.check()
    return source


def load(
    model: Path | str | WeightSource,
    *,
    dtype: Dtype = "float32",
    quant: Quant | None = None,
    hash_cache: Path | None = None,
    offload: Offload = "none",
    expert_slots: int | None = None,
) -> LoadedModel:
    """Load a model from a path or an opened source. Every parameter is read exactly once. `dtype`
    is that of matrices which are not quantised; norms, biases and activations between layers are
    fp32. `hash_cache`: see `content_hash`; `offload`, `expert_slots` (None: those of one row): see
    `EngineConfig`. Some freed buffers of slices stay with malloc until
    `memory.return_freed_memory`. UnsupportedQuantization; errors of `open_source`."""
    _check_choice("dtype", dtype, get_args(Dtype))
    if quant is not None:
        _check_choice("quant", quant, get_args(Quant))
    source = open_source(model) if isinstance(model, str | Path) else model
    quant = usable_quant(source, quant)
    check_level(source, offload)
    builder = Builder(source, dtype, quant, offload)
    served = expert_names(source) if offload == "disk" else ()
    with source.ahead(source.spec.parameter_shapes().keys() - served):
        decoder = Decoder(source.spec, builder.parts())
    source.finish()
    demands = builder.store.demands()
    few = slots_within(demands, 0)
    builder.store.resize(few if expert_slots is None else divide_slots(demands, expert_slots))
    return LoadedModel(
        decoder=decoder,
        spec=source.spec,
        content_hash=source.content_hash(hash_cache),
        formats=_summary(builder.formats),
        notes=(
            *source.notes,
            *builder.all_notes(),
            *_checksum_notes(source),
            *_offload_notes(source, builder.store, quant),
        ),
        experts=builder.store,
        quant=quant,
    )


def _checksum_notes(source: WeightSource) -> tuple[str, ...]:
    if source.finite or not source.files:
        return ()
    return ("weights are read from files without checksums: convert the model to have them",)


def _offload_notes(
    source: WeightSource, store: ExpertStore, quant: Quant | None
) -> tuple[str, ...]:
    if store.level == "none":
        return ()
    if not has_experts(source):
        return ("the model has no experts: all weights stay in memory",)
    if not store.serves:
        return ("experts are no smaller in the file: all of them stay in memory as they compute",)
    if store.level == "disk" and source.quant != quant:
        return (
            f"experts are quantised to {quant} each time they are fetched, which takes longer than "
            f"the read: convert the model to {quant}",
        )
    return ()


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedQuantization(
            f"{name} is not supported", value=value, limit=", ".join(allowed)
        )


def usable_quant(source: WeightSource, quant: Quant | None) -> Quant | None:
    """What was asked, or what the source holds already; UnsupportedQuantization if they differ."""
    if source.quant is not None and quant not in (None, source.quant):
        raise UnsupportedQuantization(
            f"the weights in {source.path} were quantised when they were converted",
            value=quant,
            limit=source.quant,
            remedy="convert the original with this quantisation",
        )
    return source.quant or quant


def _summary(formats: Mapping[str, str]) -> dict[str, str]:
    """`layers.0.o`, `layers.1.o`, … of one format become `layers.*.o`, and so do experts."""
    kinds: dict[str, set[str]] = {}
    for name, kind in formats.items():
        kinds.setdefault(_starred(name), set()).add(kind)
    same = {name for name, found in kinds.items() if len(found) == 1}
    starred = ((_starred(name), name, kind) for name, kind in formats.items())
    return {short if short in same else name: kind for short, name, kind in starred}


def _starred(name: str) -> str:
    """Numbers of layers and experts as stars; names of matrices follow a blank each."""
    return re.sub(r"(?<=layers\.)\d+|(?<=experts\.)\d+", "*", name)


class Builder:
    """Builds layers from a source, and of each matrix some rows at a time. Mutable: `formats` and
    `notes` collect what it did. `make`, `tensor` and `table` are all that takes weights."""

    def __init__(
        self, source: WeightSource, dtype: Dtype, quant: Quant | None, offload: Offload = "none"
    ) -> None:
        self.formats: dict[str, str] = {}
        self.notes: list[str] = []
        self.losses = Losses(source.stored_format)
        self.reader = WeightReader(source, self.losses, INT4_GROUP)
        self.store = ExpertStore(offload)  # of experts that do not stay in memory
        self._source = source
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._quant = quant
        if not has_onednn():
            self.notes.append("this torch has no oneDNN: GEMMs take the slower path of F.linear")

    def parts(self) -> DecoderParts:
        embedding, head = self.ends()
        layers = tuple(self.layer(i, layer) for i, layer in enumerate(self._source.spec.layers))
        return DecoderParts(embedding, layers, self.norm("norm"), head)

    def ends(self) -> tuple[Embedding, Linear]:
        tied = self._source.spec.tied_head
        head = self._head("embedding" if tied else "head")
        return TiedEmbedding(head) if tied else self.table("embedding"), head

    def layer(self, index: int, spec: LayerSpec) -> Layer:
        parts = _LayerParts(self, f"layers.{index}.")
        mixer = feed_forward = None
        if spec.mixer is not None:
            norm, post = parts.norms("mixer", spec.post_norms)
            mixer = MixerBlock(norm, _MIXERS[type(spec.mixer)](spec.mixer, parts), post)
        if spec.feed_forward is not None:
            norm, post = parts.norms("feed_forward", spec.post_norms)
            build = _FEED_FORWARDS[type(spec.feed_forward)]
            feed_forward = FeedForwardBlock(norm, build(spec.feed_forward, parts), post)
        return Layer(mixer, feed_forward, spec.residual_multiplier)

    def norm(self, name: str, offset: float | None = None, eps: float | None = None) -> RmsNorm:
        spec = self._source.spec
        weight = self.tensor(name)
        offset = spec.norm_offset if offset is None else offset
        return RmsNorm(weight + offset if offset else weight, spec.norm_eps if eps is None else eps)

    def tensor(self, name: str) -> torch.Tensor:
        if len(self._source.shape(name)) == 2:
            return self._dense(name, torch.float32)
        return self.read(name).float()

    def table(self, name: str) -> TableEmbedding:
        table = self._dense(name, self._source.dtype(name))
        self.formats[name] = str(table.dtype).removeprefix("torch.")
        return TableEmbedding(table)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def all_notes(self) -> tuple[str, ...]:
        return (*self.notes, *self.losses.notes())

    def _head(self, name: str) -> Linear:
        """The head is at most int8: 4 bits there cost more accuracy than in all layers together
        (docs/decisions/0012-int4.md)."""
        if self._quant == "int4":
            self.notes.append("the head is int8 per channel, not int4")
        head = self.make([name], "int8" if self._quant else None)
        self.formats["head and embedding" if name == "embedding" else "head"] = head.format
        return head

    def linear(self, at: str, *parts: str) -> Linear:
        """One linear layer from matrices stacked along their outputs."""
        names = [at + part for part in parts]
        layer = self.make(names, self._quant)
        self.formats[at + " ".join(parts)] = layer.format
        return layer

    def experts(self, at: str, spec: MoeSpec) -> Experts | None:
        """A layer's experts where they do not stay in memory; None to build them as they are."""
        if self.store.level == "none":
            return None
        at, count = f"{at}experts.", spec.router.num_experts
        width = self._source.spec.hidden_size if spec.latent is None else spec.latent.size
        form = ExpertForm.of(spec.expert, width, self._quant, self._dtype, INT4_GROUP)
        if self.store.level == "ram":
            tier = ram_tier(form, self._source, at, count, self.read)
        else:
            form = own_form(form, self._source, at)
            tier = disk_tier(form, self._source, at, count, self.store.disk)
        if tier is None:
            return None
        kinds = form.formats()
        self.formats |= {f"{at}{e}.{name}": k for e in range(count) for name, k in kinds.items()}
        return self.store.add(tier, count, spec.router.top_k)

    def make(self, names: list[str], quant: Quant | None) -> Linear:
        """A linear layer from matrices stacked along their outputs, in the form of `quant`."""
        weight = self._matrix(names, quant, self._dtype)
        bias = self._bias(names)
        if isinstance(weight, torch.Tensor):
            return DenseLinear(weight, bias)
        return IntegerLinear(weight, bias)

    def _matrix(self, names: list[str], quant: Quant | None, dtype: torch.dtype) -> Matrix:
        """As the source holds it, or made from what it holds; `dtype`: if it is not quantised."""
        weight = self._source.read_matrix(names, quant)
        if weight is not None:
            return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight
        if quant == "int8":
            return self.reader.int8(names)
        if quant == "int4":
            return self.reader.int4(names)
        return self.reader.dense(names, dtype)

    def _dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = self._matrix([name], None, dtype)
        assert isinstance(weight, torch.Tensor)
        return weight

    def _bias(self, names: list[str]) -> torch.Tensor | None:
        biases = [f"{name}.bias" for name in names]
        if not self._source.has(biases[0]):
            return None
        return torch.cat([self.read(bias).float() for bias in biases])

    def read(self, name: str) -> torch.Tensor:
        """A parameter in fp32, bf16 or fp16. WeightsDamaged if it is not finite."""
        return self.reader.read(name)


@dataclass(frozen=True)
class _LayerParts:
    """`layers.parts.Parts` of one layer, or of a layer inside it: `at` is the prefix of names."""

    builder: Builder
    at: str

    def linear(self, *names: str) -> Linear:
        return self.builder.linear(self.at, *names)

    def norm(self, name: str, *, offset: float | None = None, eps: float | None = None) -> RmsNorm:
        return self.builder.norm(self.at + name, offset, eps)

    def tensor(self, name: str) -> torch.Tensor:
        return self.builder.tensor(self.at + name)

    def has(self, name: str) -> bool:
        return self.builder.has(self.at + name)

    def experts(self, spec: MoeSpec) -> Experts | None:
        return self.builder.experts(self.at, spec)

    def within(self, part: str) -> "_LayerParts":
        return _LayerParts(self.builder, f"{self.at}{part}.")

    def norms(self, block: str, post_norms: bool) -> tuple[RmsNorm, RmsNorm | None]:
        """The norms around a block of the layer."""
        post = self.norm(f"{block}_post_norm") if post_norms else None
        return self.norm(f"{block}_norm"), post

# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that computes what a dense model computes, made of that model's own weights.

Every expert of a layer is the layer's MLP with its inner neurons in another order:

    gate_e = gate[p_e]    up_e = up[p_e]    down_e = down[:, p_e]

so all experts compute the same function, and as a Mixtral router's weights sum to 1, so does the
mixture, whatever is routed where. But their bytes differ: taking a matrix of one expert together
with one of another gives nonsense. So a real model shows whether offloading keeps records apart.

p_e permutes whole groups of 32 neurons, and neurons within each group. The 32 weights of a row that
share a scale in the int4 form therefore stay together, and the integer forms of all experts hold
the same values too. Routers are random; what they take is as uneven as with trained ones.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from .errors import UnsupportedConfig
from .models.registry import read_family
from .safetensors_weights import INDEX_NAME
from .safetensors_writer import write_safetensors
from .spec import MAX_LAYERS, ModelSpec
from .specs.attention import AttentionSpec
from .specs.mlp import MlpSpec
from .specs.moe import MoeSpec
from .weight_source import WeightSource
from .weights import INT4_GROUP, open_source

Progress = Callable[[int, int], None]  # bytes written, bytes in total


@dataclass(frozen=True)
class Recipe:
    """`layers`: only so many of the first, for tests; None for all."""

    experts: int = 8
    top_k: int = 2
    layers: int | None = None
    seed: int = 0

    def permutation(self, layer: int, expert: int, inner: int) -> torch.Tensor:
        """[inner] int64: which neuron stands at each place. A last group that is not whole stays
        last."""
        generator = self._generator(layer, 1 + expert)
        whole = inner // INT4_GROUP
        groups = torch.randperm(whole, generator=generator)
        places = [
            int(group) * INT4_GROUP + torch.randperm(INT4_GROUP, generator=generator)
            for group in groups
        ]
        rest = torch.randperm(inner % INT4_GROUP, generator=generator) + whole * INT4_GROUP
        return torch.cat([*places, rest])

    def router(self, layer: int, hidden_size: int) -> torch.Tensor:
        """[experts, hidden] fp32."""
        weights = torch.empty(self.experts, hidden_size)
        return weights.normal_(0.0, hidden_size**-0.5, generator=self._generator(layer, 0))

    def _generator(self, layer: int, place: int) -> torch.Generator:
        # torch's generator takes 32 bits of a seed.
        return torch.Generator().manual_seed((self.seed * MAX_LAYERS + layer) * 1_000 + place)


def upcycle(
    source: Path | str | WeightSource,
    folder: Path | str,
    recipe: Recipe | None = None,
    *,
    on_progress: Progress | None = None,
) -> ModelSpec:
    """Write the mixture as a Hugging Face folder in fp32: a shard per layer, an index, and at last
    config.json. One matrix is in memory at a time. The tokenizer is the caller's business.

    UnsupportedConfig for a model that Mixtral's architecture cannot express, and the errors of
    `open_source`."""
    recipe = recipe or Recipe()
    opened = source if isinstance(source, WeightSource) else open_source(source)
    config = mixtral_config(opened.spec, recipe)
    family, spec = read_family(config)
    _check_same(opened, spec)
    names = {name: ways[0][0].tensor for name, ways in family.names(spec).items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = spec.parameter_shapes()
    total, done = 4 * sum(map(prod, shapes.values())), 0
    weight_map: dict[str, str] = {}
    shards = _shards(spec)
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored = {names[name]: shapes[name] for name in shard}
        weights = _weights(opened, recipe, shard)
        for written in write_safetensors(folder / file, stored, weights):
            done += written
            if on_progress is not None:
                on_progress(done, total)
        weight_map |= dict.fromkeys(stored, file)
    if recipe.layers is None:
        opened.finish()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_durably(folder / INDEX_NAME, json.dumps(index, indent=1).encode())
    _write_durably(folder / "config.json", json.dumps(config, indent=1).encode())
    return spec


def mixtral_config(dense: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """config.json of the mixture that a dense model becomes. UnsupportedConfig for a model that is
    not a plain Llama."""
    mixer, mlp = dense.layers[0].mixer, dense.layers[0].feed_forward
    if not isinstance(mixer, AttentionSpec) or not isinstance(mlp, MlpSpec):
        raise UnsupportedConfig(
            "only models of attention and dense layers become mixtures", value=dense.architecture
        )
    assert mixer.rope is not None
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "vocab_size": dense.vocab_size,
        "hidden_size": dense.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": recipe.layers or dense.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": dense.context_limit,
        "rms_norm_eps": dense.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope.theta},
        "sliding_window": None,
        "tie_word_embeddings": dense.tied_head,
        "num_local_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
    }


def _check_same(source: WeightSource, spec: ModelSpec) -> None:
    """But for its experts, the mixture must be the model in every respect."""
    dense = source.spec
    twins = []
    for layer in spec.layers:
        assert isinstance(layer.feed_forward, MoeSpec)
        inner = layer.feed_forward.expert.intermediate_size
        twins.append(replace(layer, feed_forward=MlpSpec(inner)))
    twin = replace(spec, architecture=dense.architecture, layers=tuple(twins))
    if twin != replace(dense, layers=dense.layers[: spec.num_layers]) or source.quant is not None:
        raise UnsupportedConfig(
            "Mixtral's architecture cannot express this model exactly",
            value=f"{dense.architecture} in {source.path}",
            remedy="use an unconverted Llama without biases, windows or rope scaling",
        )


def _shards(spec: ModelSpec) -> list[list[str]]:
    """Parameters by file: each layer by itself, then what is around them."""
    layers: list[list[str]] = [[] for _ in range(spec.num_layers)]
    ends = []
    for name in spec.parameter_shapes():
        if name.startswith("layers."):
            layers[int(name.split(".")[1])].append(name)
        else:
            ends.append(name)
    return [*layers, ends]


def _weights(source: WeightSource, recipe: Recipe, shard: list[str]) -> Iterator[torch.Tensor]:
    """The tensors of a shard in its order, fp32. The layer's own MLP is read once for all."""
    dense: dict[str, torch.Tensor] = {}
    for name in shard:
        prefix, _, part = name.rpartition(".")
        if part == "router":
            layer = int(prefix.split(".")[1])
            yield recipe.router(layer, source.spec.hidden_size)
        elif ".experts." in prefix:
            _, number, _, expert = prefix.split(".")
            origin = f"layers.{number}.{part}"
            if origin not in dense:
                dense[origin] = source.read(origin).float()
            inner = dense[origin].shape[1 if part == "down" else 0]
            order = recipe.permutation(int(number), int(expert), inner)
            yield dense[origin][:, order] if part == "down" else dense[origin][order]
        else:
            yield source.read(name).float()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())

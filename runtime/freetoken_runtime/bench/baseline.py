# SPDX-License-Identifier: Apache-2.0
"""The baseline: the same weights in transformers' Llama, driven by the tightest loop it allows."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from ..errors import EngineError
from ..spec import ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.mlp import MlpSpec
from ..weights import open_source

_MODULES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class BaselineUnavailable(EngineError):
    """transformers is not installed, or cannot hold this model."""

    code = "baseline_unavailable"


def available() -> bool:
    """Whether transformers is installed (the `dev` extra has it)."""
    return find_spec("transformers") is not None


class Baseline:
    """transformers' Llama with the dequantised weights of `path`, in `dtype`.

    `prefill` and `decode` keep a cache, as serving does, and compute logits of one row only.
    """

    def __init__(self, path: Path, dtype: torch.dtype, threads: int | None = None) -> None:
        _prepare(threads)
        self._model = _build(path, dtype)

    @classmethod
    def of_checkpoint(cls, folder: Path, dtype: torch.dtype, threads: int | None = None) -> Self:
        """Any model that transformers loads by itself from a Hugging Face folder."""
        _prepare(threads)
        from transformers import AutoModelForCausalLM

        made = cls.__new__(cls)
        made._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        return made

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> tuple[int, Any]:
        """The next greedy id, and the cache."""
        out = self._model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax()), out.cache

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """`count` greedy ids after `ids`, and the seconds from the first of them to the last."""
        token, cache = self.prefill(ids)
        made = [token]
        started = time.perf_counter()
        while len(made) < count:
            out = self._model(torch.tensor([[token]]), cache=cache, use_cache=True)
            token = int(out.logits[0, -1].argmax())
            made.append(token)
        return made, time.perf_counter() - started


def _prepare(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    if not available():
        raise BaselineUnavailable(
            "transformers is not installed", remedy="pip install 'freetoken-agent[dev]'"
        )


def _build(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    source = open_source(path)
    if source.spec.architecture != "llama":
        raise BaselineUnavailable(
            "the baseline knows the llama architecture only", value=source.spec.architecture
        )
    model = AutoModelForCausalLM.from_config(_config(source.spec), attn_implementation="sdpa")
    weights = {_their_name(name): source.read(name) for name in source.spec.parameter_shapes()}
    if source.spec.tied_head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
    return model.to(dtype).eval()


def _config(spec: ModelSpec) -> Any:
    from transformers import LlamaConfig

    mixer, mlp = spec.layers[0].mixer, spec.layers[0].feed_forward
    assert isinstance(mixer, AttentionSpec) and isinstance(mlp, MlpSpec), spec.architecture
    assert mixer.rope is not None, spec.architecture
    if mixer.rope.scaling is not None:
        raise BaselineUnavailable("the baseline knows no rope scaling", value=mixer.rope.scaling)
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        max_position_embeddings=spec.context_limit,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": mixer.rope.theta},
        tie_word_embeddings=spec.tied_head,
        attention_bias=mixer.qkv_bias,
    )


def _their_name(name: str) -> str:
    stem, dot, kind = name.rpartition(".") if name.endswith(".bias") else (name, ".", "weight")
    if not stem.startswith("layers."):
        return f"{_MODULES[stem]}{dot}{kind}"
    _, index, part = stem.split(".")
    return f"model.layers.{index}.{_MODULES[part]}{dot}{kind}"

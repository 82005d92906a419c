# SPDX-License-Identifier: Apache-2.0
"""Builders for tests: tiny random checkpoints of each family, and the plainest layer state.

`transformers` is imported by the checkpoint builders only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .batch import Batch, Form, RowGroup, SequenceRows

# Dimensions that divide nothing, so that no kernel can hide behind a round number.
ODD_DIMENSIONS: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class ListState:
    """A sequence's keys and values as plain lists of pieces, one per pass: the reference for
    every cleverer state. Mutable; implements `batch.LayerState`."""

    def __init__(self, num_layers: int) -> None:
        self._past: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_layers)]
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.length = 0

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._new[layer] = (k.clone(), v.clone())

    def pieces(self, layer: int, *, new: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [*self._past[layer], self._new[layer]] if new else list(self._past[layer])

    def commit(self, rows: int) -> None:
        for layer, pair in self._new.items():
            self._past[layer].append(pair)
        self._new = {}
        self.length += rows


def batch_of(parts: Sequence[tuple[ListState, Sequence[int]]], forms: Sequence[Form]) -> Batch:
    """One pass over the next ids of each sequence, each sequence a row group of its own."""
    ids: list[int] = []
    positions: list[int] = []
    sequences, groups = [], []
    for (state, new), form in zip(parts, forms, strict=True):
        start, stop = len(ids), len(ids) + len(new)
        ids += new
        positions += range(state.length, state.length + len(new))
        sequences.append(SequenceRows(state, start, stop))
        groups.append(RowGroup(start, stop, form))
    return Batch(torch.tensor(ids), torch.tensor(positions), sequences, groups)


def build_checkpoint(folder: Path, family: str, *, seed: int = 0, **settings: Any) -> Any:
    """Save a tiny random model of a family (`llama`, `mistral`, `qwen2`, `qwen3`) as a Hugging
    Face folder and return the transformers model, in fp32. Norms and biases are random too, so
    that a forgotten one shows."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **{**ODD_DIMENSIONS, **settings})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return model

# SPDX-License-Identifier: Apache-2.0
"""Builders for tests: tiny random checkpoints of each family, and the plainest layer state.

`transformers` is imported by the checkpoint builders only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .batch import Batch, Form, RowGroup, SequenceRows
from .family_configs import FAMILY_CONFIGS, MULTIMODAL_CONFIGS
from .spec import StateSpec

Pieces = list[tuple[torch.Tensor, torch.Tensor]]
Buffers = tuple[torch.Tensor, ...]

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
    """A sequence's state in its plainest form: rows as lists of pieces, one per pass, and the
    overwritten buffers of every cut. The reference for every cleverer state. Mutable; implements
    `batch.LayerState`.

    `states`: what each layer keeps, or how many layers there are if they keep rows only."""

    def __init__(self, states: int | Sequence[StateSpec]) -> None:
        self._states = [StateSpec()] * states if isinstance(states, int) else list(states)
        self._past: list[Pieces] = [[] for _ in self._states]
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        start = [tuple(torch.zeros(x.shape) for x in state.overwritten) for state in self._states]
        self._kept: dict[int, dict[int, Buffers]] = {0: dict(enumerate(start))}
        self.length = 0

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._new[layer] = (k.clone(), v.clone())

    def pieces(self, layer: int, *, new: bool) -> Pieces:
        return [*self._past[layer], self._new[layer]] if new else list(self._past[layer])

    def fixed(self, layer: int) -> Buffers:
        return self._kept[self.length][layer]

    def keep(self, layer: int, rows: int, buffers: Buffers) -> None:
        shapes = [buffer.shape for buffer in self._states[layer].overwritten]
        assert [tuple(x.shape) for x in buffers] == shapes, (layer, buffers)
        assert all(x.dtype == torch.float32 for x in buffers), layer
        self._kept.setdefault(self.length + rows, {})[layer] = buffers

    def commit(self, ids: Sequence[int]) -> None:
        for layer, pair in self._new.items():
            self._past[layer].append(pair)
        self._new = {}
        self.length += len(ids)
        kept = self._kept.setdefault(self.length, {})
        for layer, state in enumerate(self._states):
            assert layer in kept or not state.overwritten, (layer, "handed over nothing")

    def cut(self, length: int) -> "ListState":
        """The state of the first `length` tokens, which ended a pass or were a cut of one. Shares
        memory with this one: what changes buffers in place shows in both."""
        other = ListState(self._states)
        kept = self._kept.get(length, {})
        for layer, state in enumerate(self._states):
            assert layer in kept or not state.overwritten, (layer, "was not cut at", length)
        other._kept[length] = kept
        other._past = [_first_rows(pieces, length) for pieces in self._past]
        other.length = length
        return other


def _first_rows(pieces: Pieces, count: int) -> Pieces:
    kept: Pieces = []
    for k, v in pieces:
        if count > 0:
            kept.append((k[:count], v[:count]))
        count -= len(k)
    return kept


def batch_of(
    parts: Sequence[tuple[Any, Sequence[int]]],
    forms: Sequence[Form],
    *,
    share_few: bool = False,
    cuts: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """One pass over the next ids of each (state, ids), MANY first. Rows of several sequences share
    a group in the MANY form, and with `share_few` in the FEW form too. `cuts`: of each sequence."""
    ids: list[int] = []
    positions: list[int] = []
    sequences: list[SequenceRows] = []
    groups: list[RowGroup] = []
    for index, ((state, new), form) in enumerate(zip(parts, forms, strict=True)):
        start, stop = len(ids), len(ids) + len(new)
        ids += new
        positions += range(state.length, state.length + len(new))
        at = tuple(cuts[index]) if cuts is not None else ()
        sequences.append(SequenceRows(state, start, stop, at))
        if groups and groups[-1].form is form and (share_few or form is Form.MANY):
            start = groups.pop().start
        groups.append(RowGroup(start, stop, form))
    return Batch(torch.tensor(ids), torch.tensor(positions), sequences, groups)


def family_config(family: str, **settings: Any) -> Any:
    """transformers' configuration of a small model: FAMILY_CONFIGS, with `settings` on top."""
    from transformers import AutoConfig

    given = {**ODD_DIMENSIONS, **FAMILY_CONFIGS.get(family, {})}
    given = {key: value for key, value in given.items() if value is not None}
    return AutoConfig.for_model(family, **{**given, **settings})


def build_checkpoint(folder: Path, family: str, *, seed: int = 0, **settings: Any) -> Any:
    """Save a small random model of a family in FAMILY_CONFIGS as a Hugging Face folder and return
    the transformers model, in fp32. Norms, biases, sinks and router corrections are random too, so
    that a forgotten one shows."""
    from transformers import AutoModelForCausalLM

    config = family_config(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return _randomised(model, folder)


def build_multimodal(folder: Path, model_type: str, *, seed: int = 0) -> Any:
    """The same of a model in MULTIMODAL_CONFIGS: a text model beside a vision tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family, changes, settings = MULTIMODAL_CONFIGS[model_type]
    config = AutoConfig.for_model(
        model_type, text_config=family_config(family, **changes).to_dict(), **settings
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    return _randomised(model, folder)


def _randomised(model: Any, folder: Path) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = model.eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):  # others follow from the config
                buffer.uniform_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


def _randomise(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(-3.0, -2.0)  # decays near one, where transformers' own scans are exact
    elif name.endswith("dt_bias"):
        parameter.uniform_(-4.0, -2.0)
    elif name.endswith("correction_bias"):
        parameter.uniform_(0.0, 0.2)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.3)
    elif parameter.dim() == 1:
        parameter.uniform_(0.5, 1.5)
    else:
        parameter.normal_(0.0, 0.15)

# SPDX-License-Identifier: Apache-2.0
"""For tests of experts: passes to run, and small mixtures in bf16 to run them with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .batch import Form
from .testing import ListState, batch_of, build_checkpoint
from .weights import LoadedModel

TOP_K, EXPERTS = 2, 12  # of every small mixture
Step = tuple[Sequence[int], Sequence[Form]]  # rows of each sequence, and the form of each
# One sequence: a long prompt, a short one, decoding. Four: all of it beside each other.
ALONE: list[Step] = [([70], [Form.MANY]), ([1], [Form.FEW]), ([5], [Form.FEW]), ([1], [Form.FEW])]
FOUR: list[Step] = [
    ([40, 33, 1, 6], [Form.MANY, Form.MANY, Form.FEW, Form.FEW]),
    ([1, 1, 1, 1], [Form.FEW] * 4),
    ([20, 1, 1, 3], [Form.MANY, Form.FEW, Form.FEW, Form.FEW]),
]


def build_half(path: Path, family: str) -> Path:
    """A small model of a family in bf16, so that what a file holds differs from what computes."""
    build_checkpoint(path, family)
    for file in path.glob("*.safetensors"):
        save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file)
    return path


def outputs(model: LoadedModel, steps: Sequence[Step], seed: int = 0) -> list[torch.Tensor]:
    """Final hidden rows and logits of passes that follow each other."""
    generator = torch.Generator().manual_seed(seed)
    states = [ListState(model.spec.states()) for _ in steps[0][0]]
    found = []
    for rows, forms in steps:
        ids = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in rows]
        batch = batch_of(list(zip(states, ids, strict=True)), forms)
        hidden = model.decoder.forward(batch, torch.arange(len(batch.ids)))
        found += [hidden, model.decoder.logits(hidden[-1:])]
        for state, new in zip(states, ids, strict=True):
            state.commit(new)
    return found


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Models that fetch ahead what the next layer will probably want. The oracle is the same model with
all weights in memory, unless a test names another."""

import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.batch import Form
from freetoken_runtime.expert_cases import (
    ALONE,
    EXPERTS,
    TOP_K,
    Step,
    build_half,
    outputs,
    same,
)
from freetoken_runtime.experts.prefetch import Prefetch
from freetoken_runtime.weights import LoadedModel, load

pytestmark = pytest.mark.usefixtures("one_thread")
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def build(family: str) -> Path:
        return build_half(tmp_path_factory.mktemp(family), family)

    return build


def in_slots(path: Path, slots: int) -> LoadedModel:
    """A model whose experts come from its files, and whose free slots are NaN."""
    model = load(path, offload="disk")
    model.experts.resize([slots], poison=True)
    return model


class Guessing(Prefetch):
    """In every short pass, whatever it brings; right or, if `wild`, at random."""

    def __init__(self, model: LoadedModel, *, wild: bool = False) -> None:
        super().__init__(model.experts._supply)
        self._random = random.Random(1) if wild else None

    def begin_step(self, rows: int) -> None:
        super().begin_step(rows)
        self._on = True

    def active(self, rows: int) -> bool:
        return True

    def likely(self, layer: int, experts: Sequence[int]) -> None:
        if self._random is not None:
            experts = self._random.sample(range(EXPERTS), 4)
        super().likely(layer, experts)


@pytest.mark.parametrize("slots", [2, 5, 12, 20, 48])
def test_m16_guesses_change_no_bit(folder: Folders, slots: int) -> None:
    """By the next router and at random, with any number of slots, beside each other and alone."""
    path = folder("mixtral")
    steps: list[Step] = [([1], [Form.FEW])] * 12
    together: list[Step] = [([1] * 4, [Form.FEW] * 4)] * 3
    expected = [outputs(load(path), few) for few in (steps, together, ALONE)]
    for wild in (False, True):
        model = in_slots(path, slots)
        model.experts.prefetch = Guessing(model, wild=wild)
        for few, theirs in zip((steps, together, ALONE), expected, strict=True):
            assert same(outputs(model, few), theirs)
        counts = model.experts.counts
        assert 0 <= counts.prefetched_used <= counts.prefetched <= counts.fetched + slots
        assert counts.prefetched > 0 or slots == TOP_K
        model.experts.close()


def test_guesses_are_those_of_the_next_router(folder: Folders, tmp_path: Path) -> None:
    """Oracle: a model whose layers add nothing: each router sees what the one before it saw, so
    that every guess is right. From then on no layer but the first waits for a miss."""
    path = tmp_path / "still"
    shutil.copytree(folder("mixtral"), path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(("o_proj.weight", "w2.weight", "down_proj", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, file)
    model = in_slots(path, 8)
    model.experts.prefetch = Guessing(model)
    found = outputs(model, [([1], [Form.FEW])] * 20)
    assert same(found, outputs(load(path), [([1], [Form.FEW])] * 20))
    counts = model.experts.counts
    assert counts.prefetched > 20 and counts.prefetch_precision == 1.0
    assert counts.misses <= TOP_K * 20 and counts.hits >= TOP_K * 20 * 3
    assert counts.prefetch_saved_s > 0.0


def test_streaming_passes_make_no_guesses(folder: Folders) -> None:
    """Oracle: the count of guesses. A long pass fetches whole layers ahead already."""
    model = in_slots(folder("mixtral"), 30)
    model.experts.prefetch = Guessing(model)
    outputs(model, [([256], [Form.MANY])])
    assert model.experts.counts.prefetched == 0

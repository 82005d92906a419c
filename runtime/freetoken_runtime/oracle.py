# SPDX-License-Identifier: Apache-2.0
"""A decoder's logits against a reference's, in every way rows can be cut into passes.

Tests assert what this measures, and the table of families in the documentation shows it. It knows
the plainest state only (`testing.ListState`): what the engine makes of states is tested elsewhere.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .batch import Form
from .models.decoder import Decoder
from .testing import ListState, batch_of

LENGTH = 300
STEPS = 90  # rows compared one by one: as many as cross every window and group of a small model
RAGGED = (37, 100, 129, 1, 16)
Part = tuple[ListState, Sequence[int]]


class Oracle:
    """Expected logits of random paths, each by itself in one cold pass of the reference: a model
    of transformers, or anything that answers `model(ids).logits`."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self.path = self.ids(LENGTH, 0)
        self.logits = self.expected(self.path)

    def ids(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self._vocab_size, (count,), generator=generator).tolist()

    def expected(self, ids: Sequence[int]) -> torch.Tensor:
        """[n, vocab] fp32."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0]
        return logits.float()


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the range of the expected logits; NaN is infinitely far."""
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    if not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours - expected).abs().max() / (expected.max() - expected.min()))


def new_state(decoder: Decoder) -> ListState:
    return ListState(decoder.spec.states())


def forward(
    decoder: Decoder, parts: Sequence[Part], cuts: Sequence[Sequence[int]] | None = None
) -> list[torch.Tensor]:
    """One pass over new ids of several sequences, MANY first -> each one's logits, all rows."""
    forms = [Form.FEW if len(ids) < decoder.few_rows else Form.MANY for _, ids in parts]
    batch = batch_of(parts, forms, share_few=decoder.few_rows_batch, cuts=cuts)
    sizes = [len(ids) for _, ids in parts]
    hidden = decoder.forward(batch, torch.arange(sum(sizes)))
    for state, ids in parts:
        state.commit(ids)
    return list(torch.split(decoder.logits(hidden), sizes))


def in_passes(
    decoder: Decoder, state: ListState, ids: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Logits of all rows, in passes of `sizes` rows, the last size repeated."""
    outs, at, index = [], 0, 0
    while at < len(ids):
        size = sizes[min(index, len(sizes) - 1)]
        outs += forward(decoder, [(state, ids[at : at + size])])
        at, index = at + size, index + 1
    return torch.cat(outs)


def _passes(*sizes: int, rows: int = LENGTH) -> Callable[[Decoder, Oracle], float]:
    def measure(decoder: Decoder, oracle: Oracle) -> float:
        ours = in_passes(decoder, new_state(decoder), oracle.path[:rows], sizes)
        return distance(ours, oracle.logits[:rows])

    return measure


def _ragged(decoder: Decoder, oracle: Oracle) -> float:
    """Prefill chunks and decode steps of several sequences in one pass."""
    paths = [oracle.ids(count, seed) for seed, count in enumerate(RAGGED, 1)]
    states = [new_state(decoder) for _ in paths]
    done = [0] * len(paths)
    outs: list[list[torch.Tensor]] = [[] for _ in paths]
    for sizes in ((20, 100, 1, 1, 3), (1, 0, 64, 0, 13), (16, 0, 63, 0, 0), (0, 0, 1, 0, 0)):
        active = [index for index, size in enumerate(sizes) if size]
        active.sort(key=lambda index: sizes[index] < decoder.few_rows)  # MANY first
        parts = [(states[i], paths[i][done[i] : done[i] + sizes[i]]) for i in active]
        for index, logits in zip(active, forward(decoder, parts), strict=True):
            outs[index].append(logits)
            done[index] += sizes[index]
    assert tuple(done) == RAGGED
    pairs = zip(paths, outs, strict=True)
    return max(distance(torch.cat(parts), oracle.expected(path)) for path, parts in pairs)


def _cuts(decoder: Decoder, oracle: Oracle) -> float:
    """One pass whose scans stop at random rows, then, from the state at every cut, a step and the
    rest in one chunk: cold, continued and resumed must all be the same."""
    chosen = sorted(random.Random(7).sample(range(1, LENGTH - 1), 5))
    state = new_state(decoder)
    (ours,) = forward(decoder, [(state, oracle.path)], [chosen])
    worst = distance(ours, oracle.logits)
    for cut in chosen:
        tail = oracle.path[cut:]
        resumed = in_passes(decoder, state.cut(cut), tail, [1, len(tail)])
        worst = max(worst, distance(resumed, oracle.logits[cut:]))
    return worst


MODES: Mapping[str, Callable[[Decoder, Oracle], float]] = {
    "prefill": _passes(LENGTH),
    "chunks of 7": _passes(7),
    "chunks of 64": _passes(64),
    "chunks of 257": _passes(257),
    "decode": _passes(1, rows=STEPS),
    "mixed": _passes(63, 1, 1, 65, 1, 40, 1, 100),
    "ragged": _ragged,
    "resumed": _cuts,
}

# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on the CPU: rows grouped by expert, one call of an expert for all its rows,
by whichever thread takes it.

    chosen [n, k]  --sort-->  expert e: the (row, slot) pairs that chose it
    out    [n, k, N]          what each pair computed, wherever and whenever its expert was served
    y      Σ_j weights[:, j] · out[:, j]        in the order of the slots

Results are kept per (row, slot) and summed in the order of the slots, so that a row's bits depend
neither on the order in which experts are served nor on the rows that share them.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from ...specs.moe import ClampedGlu
from ..activations import sigmoid
from .workers import Job, Workers

PADDED_ROWS = 16  # a GEMM with at least so many rows gives a row the same bits whatever the others


@dataclass(frozen=True)
class ExpertRows:
    """What one expert serves, in the order of rows: pair p is slot p % k of row p // k."""

    expert: int
    pairs: torch.Tensor  # [m] int64, m >= 1


def group_by_expert(chosen: torch.Tensor) -> Iterator[ExpertRows]:
    """chosen [n, k] int64 -> every expert that has rows, ascending."""
    flat = chosen.reshape(-1)
    if len(chosen) == 1:  # a row takes no expert twice; this is every token of a conversation
        numbers = flat.tolist()
        every = torch.split(torch.arange(len(numbers)), 1)
        yield from (ExpertRows(numbers[slot], every[slot]) for slot in flat.argsort().tolist())
        return
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for expert, pairs in zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True):
        yield ExpertRows(expert, pairs)


# Rows [m, H] of one part of the pass, m >= 1, and the part's number -> what an expert makes of them
Compute = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One expert at hand: what computes with it until it is released."""

    expert: int
    compute: Compute
    release: Callable[[], None]


# Experts that have rows, ascending -> each of them once, in any order. Advanced by one thread; it
# may wait until tasks are released.
Serve = Callable[[Sequence[ExpertRows]], Generator[Task]]

_ALONE = Workers()


def mix(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    serve: Serve,
    ends: Sequence[int],
    workers: Workers = _ALONE,
) -> torch.Tensor:
    """x [n, H] fp32, chosen [n, k] int64, weights [n, k] fp32 -> [n, H] fp32. `ends`: where each
    part of the rows ends that is to be computed by itself, ascending, the last one n. Whatever it
    raises, no task is computed or held any more; `WorkerStalled`: one is, but nobody waits."""
    slots = chosen.shape[1]
    out = torch.empty(chosen.numel(), x.shape[1])  # every (row, slot) is written exactly once
    groups = list(group_by_expert(chosen))
    pairs_of = {group.expert: group.pairs for group in groups}
    cuts = [end * slots for end in ends]

    def work(task: Task, pairs: torch.Tensor) -> None:
        for part, of_part in _by_part(pairs, cuts):
            rows = x if len(x) == 1 else x[of_part.div(slots, rounding_mode="floor")]
            out.index_copy_(0, of_part, task.compute(rows, part).float())

    with closing(serve(groups)) as tasks:
        workers.run(
            Job(partial(work, task, pairs_of.pop(task.expert)), task.release) for task in tasks
        )
    assert not pairs_of, list(pairs_of)
    parts, shares = out.view(len(x), slots, -1).unbind(1), torch.split(weights, 1, 1)
    mixed = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        mixed.addcmul_(part, share)
    return mixed


def _by_part(pairs: torch.Tensor, ends: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Ascending pairs, split where parts end; parts without pairs are left out."""
    if len(ends) == 1:
        yield 0, pairs
        return
    cuts = torch.searchsorted(pairs, torch.tensor(ends)).tolist()
    for part, (start, stop) in enumerate(zip([0, *cuts], cuts, strict=False)):
        if start < stop:
            yield part, pairs[start:stop]


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [m, H] with rows of zeros up to PADDED_ROWS."""
    missing = PADDED_ROWS - len(rows)
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (0, 0, 0, missing))


def clamped_glu(rows: torch.Tensor, spec: ClampedGlu) -> torch.Tensor:
    """rows [m, 2I] fp32, gate before up, overwritten -> [m, I]; see `ClampedGlu`."""
    gate, up = rows.chunk(2, -1)
    gate.clamp_(max=spec.limit)
    up.clamp_(-spec.limit, spec.limit).add_(1.0)
    return sigmoid(gate * spec.alpha).mul_(gate).mul_(up)

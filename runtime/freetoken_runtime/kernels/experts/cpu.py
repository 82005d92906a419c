# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on the CPU: rows grouped by expert, one call of an expert for all its rows,
by whichever thread takes it.

    chosen [n, k]  --sort-->  expert e: the (row, slot) pairs that chose it
    out    [n, k, N]          what each pair computed, wherever and whenever its expert was served
    y      Σ_j weights[:, j] · out[:, j]        in the order of the slots
    n = 1                     every token of a conversation: nothing is sorted, picked or scattered

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
from ..working_memory import empty
from .workers import Job, Workers

_SUMMED_ROWS = 64  # so many stay in the cache while slots are added
_STEPS = 8  # numbers of rows that are padded to in steps of one size
PADDED_ROWS = 16  # a GEMM with at least so many rows gives a row the same bits whatever the others


@dataclass(frozen=True)
class Demand:
    """What a pass wants of one expert: to compute so many rows."""

    expert: int
    rows: int


def group_by_expert(chosen: torch.Tensor) -> dict[int, torch.Tensor]:
    """chosen [n, k] int64 -> for every expert that has rows, ascending, its pairs [m] int64 in the
    order of rows: pair p is slot p % k of row p // k."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    return dict(zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True))


# Numbers [m] of rows of one part of the pass, m >= 1, counted from the part's first (None: its only
# row), and the part's number -> what an expert makes of those rows, [m, width]
Compute = Callable[[torch.Tensor | None, int], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One expert at hand: what computes with it until it is released."""

    expert: int
    compute: Compute
    release: Callable[[], None]


# Experts that have rows, ascending -> each of them once, in any order. Advanced by one thread; it
# may wait until tasks are released.
Serve = Callable[[Sequence[Demand]], Generator[Task]]

_ALONE = Workers()


def mix(
    width: int,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    serve: Serve,
    ends: Sequence[int],
    workers: Workers = _ALONE,
) -> torch.Tensor:
    """chosen [n, k] int64, weights [n, k] fp32 -> [n, width] fp32. `ends`: where each part of the
    rows ends that is to be computed by itself, ascending, the last one n. Whatever it raises, no
    task is computed or held any more; `WorkerStalled`: one is, but nobody waits."""
    if len(chosen) == 1:
        of_slots = _of_one_row(chosen[0].tolist(), serve, workers)
    else:
        of_slots = _of_rows(width, chosen, serve, ends, workers)
    shares = weights[:, :, None].unbind(1)
    if len(chosen) <= _SUMMED_ROWS:
        return _summed(of_slots, shares)
    out = empty(len(chosen), width)
    for start in range(0, len(chosen), _SUMMED_ROWS):
        rows = slice(start, start + _SUMMED_ROWS)
        out[rows] = _summed([x[rows] for x in of_slots], [share[rows] for share in shares])
    return out


def _summed(of_slots: Sequence[torch.Tensor], shares: Sequence[torch.Tensor]) -> torch.Tensor:
    mixed = of_slots[0] * shares[0]
    for of_slot, share in zip(of_slots[1:], shares[1:], strict=True):
        mixed.addcmul_(of_slot, share)
    return mixed


def _of_one_row(chosen: Sequence[int], serve: Serve, workers: Workers) -> Sequence[torch.Tensor]:
    """What the expert of each slot makes of the only row, [1, width] fp32 each."""
    slot_of = {expert: slot for slot, expert in enumerate(chosen)}  # a row takes none twice
    made: dict[int, torch.Tensor] = {}

    def work(task: Task, slot: int) -> None:
        made[slot] = task.compute(None, 0)

    def job(task: Task) -> Job:
        return Job(partial(work, task, slot_of.pop(task.expert)), task.release)

    with closing(serve([Demand(expert, 1) for expert in sorted(slot_of)])) as tasks:
        workers.run(map(job, tasks))
    assert not slot_of, list(slot_of)
    return torch.stack([made[slot] for slot in range(len(chosen))]).float().unbind()


def _of_rows(
    width: int, chosen: torch.Tensor, serve: Serve, ends: Sequence[int], workers: Workers
) -> Sequence[torch.Tensor]:
    """What the experts of each slot make of all rows, [n, width] fp32 each."""
    slots = chosen.shape[1]
    out = empty(chosen.numel(), width)  # every (row, slot) is written exactly once
    pairs_of = group_by_expert(chosen)
    starts, cuts = [0, *ends], [end * slots for end in ends]

    def work(task: Task, pairs: torch.Tensor) -> None:
        for part, of_part in _by_part(pairs, cuts):
            numbers = of_part.div(slots, rounding_mode="floor").sub_(starts[part])
            out.index_copy_(0, of_part, task.compute(numbers, part).float())

    def job(task: Task) -> Job:
        return Job(partial(work, task, pairs_of.pop(task.expert)), task.release)

    with closing(serve([Demand(e, len(pairs)) for e, pairs in pairs_of.items()])) as tasks:
        workers.run(map(job, tasks))
    assert not pairs_of, list(pairs_of)
    return out.view(len(chosen), slots, width).unbind(1)


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
    """Rows [m, H] with rows of zeros up to PADDED_ROWS, or to the next of a few numbers: oneDNN
    compiles a kernel for each number of rows, which takes as long as an expert does."""
    step = PADDED_ROWS
    while len(rows) > _STEPS * step:
        step *= 2
    missing = max(-len(rows) % step, PADDED_ROWS - len(rows))
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def clamped_glu(rows: torch.Tensor, spec: ClampedGlu) -> torch.Tensor:
    """rows [m, 2I] fp32, gate before up, overwritten -> [m, I]; see `ClampedGlu`."""
    gate, up = rows.chunk(2, -1)
    gate.clamp_(max=spec.limit)
    up.clamp_(-spec.limit, spec.limit).add_(1.0)
    return sigmoid(gate * spec.alpha).mul_(gate).mul_(up)

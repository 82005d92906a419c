# SPDX-License-Identifier: Apache-2.0
"""One forward pass: rows of several sequences in, hidden rows out. Counts what it forwards.

It decides the kernel form of each sequence's rows from that sequence alone, so that no neighbour
changes a token, and knows nothing of requests.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from .batch import Batch, Form, RowGroup, SequenceRows
from .config import Prefill
from .contention import ThreadGovernor, apart
from .errors import InvalidConfig
from .kernels.int8_linear.cpu import has_exact_sums
from .layers.linear import PARTS
from .models.decoder import Decoder
from .rates import Rates
from .state.digest import Ids
from .state.sequence import Sequence

_MANY: Mapping[Prefill, Form] = {
    "exact": Form.MANY,
    "bfloat16": Form.MANY_ROUNDED,
    "int16": Form.MANY_INT16,
    "int8": Form.MANY_INT8,
}


@dataclass(frozen=True)
class Work:
    """The next ids of one sequence. `wanted`: ascending offsets of the ids whose hidden rows are
    returned and whose state is handed over: the positions of anchors, and the last one. `replay`:
    the ids are the sequence's last ones, forwarded again (`Sequence.begin_replay`)."""

    sequence: Sequence
    ids: Ids
    wanted: tuple[int, ...]
    replay: bool = False


class Runner:
    """Owner thread only. `rows` and `seconds` grow with every pass."""

    def __init__(
        self, decoder: Decoder, governor: ThreadGovernor, prefill: Prefill = "exact"
    ) -> None:
        """InvalidConfig if this machine cannot compute that kind of prefill."""
        if _MANY[prefill] in PARTS and not apart(has_exact_sums):
            raise InvalidConfig(
                "this machine adds products of int8 with saturation",
                value=f'prefill="{prefill}"',
                remedy='use prefill="exact"',
            )
        self._decoder = decoder
        self._many = _MANY[prefill]
        self._governor = governor
        decoder.workers.helpers = governor.most - 1
        self.vocab_size = decoder.spec.vocab_size
        self.few_rows = decoder.few_rows
        self.rates = Rates()
        self.rows = 0
        self.seconds = 0.0

    def calibrate(self, sequence: Sequence) -> None:
        """Take a first measurement of both kernel forms, so that the first plan has a price; also
        starts the compute threads. The rows are not counted. One pass of many rows is enough, as
        whoever loads a model waits for it: what comes later corrects it."""
        for rows in (1, 2 * self.few_rows, 1):
            work = Work(sequence, np.zeros(rows, dtype=np.int32), (rows - 1,))
            self.logits(self.forward([work])[0])
            sequence.truncate(0)
            if self.rows == 1:
                self.rates.clear()  # the first pass pays for caches and threads
        self.rows, self.seconds = 0, 0.0

    def forward(self, works: SequenceOf[Work]) -> list[torch.Tensor]:
        """Forward the ids of each work and make its rows permanent. Returns the wanted hidden rows
        of each, [wanted, H] fp32, in the order given. If it raises, no sequence has changed."""
        self._governor.before_pass()
        started = time.perf_counter()
        begun: list[Sequence] = []
        try:
            for work in works:
                if work.replay:
                    work.sequence.begin_replay()
                else:
                    work.sequence.begin(len(work.ids))
                begun.append(work.sequence)
            batch, starts = self._batch(works)
            rows = [
                start + w for start, work in zip(starts, works, strict=True) for w in work.wanted
            ]
            hidden = self._decoder.forward(batch, torch.tensor(rows, dtype=torch.int64))
        except BaseException:
            for sequence in begun:
                sequence.abort()
            raise
        for work in works:
            work.sequence.commit(work.ids)
        self.rows += len(batch.ids)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        expected_s: float | None = None
        if len(works) == 1:
            count = len(works[0].ids)
            start, many = works[0].sequence.length - count, count >= self.few_rows
            expected_s = self.rates.predict(count, start, many=many, restored_bytes=0)
            self.rates.passed(count, start, seconds, many=many)
        self._governor.after_pass(seconds, expected_s)
        return list(torch.split(hidden, [len(work.wanted) for work in works]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V] fp32; a row's logits do not depend on the rows beside it."""
        started = time.perf_counter()
        logits = self._decoder.logits(hidden)
        self.seconds += time.perf_counter() - started
        return logits

    def _batch(self, works: SequenceOf[Work]) -> tuple[Batch, list[int]]:
        """Works with many rows first; returns also where each work's rows start."""
        few = [len(work.ids) < self.few_rows for work in works]
        starts = [0] * len(works)
        sequences: list[SequenceRows] = []
        groups: list[RowGroup] = []
        ids, positions = [], []
        start = 0
        for index in sorted(range(len(works)), key=few.__getitem__):
            work = works[index]
            stop = start + len(work.ids)
            starts[index] = start
            cuts = tuple(w + 1 for w in work.wanted if w + 1 < len(work.ids))
            sequences.append(SequenceRows(work.sequence, start, stop, cuts))
            form = Form.FEW if few[index] else self._many
            joins = form is not Form.FEW or self._decoder.few_rows_batch
            if joins and groups and groups[-1].form is form:
                groups[-1] = RowGroup(groups[-1].start, stop, form)
            else:
                groups.append(RowGroup(start, stop, form))
            ids.append(work.ids)
            positions.append(np.arange(work.sequence.length, work.sequence.length + len(work.ids)))
            start = stop
        batch = Batch(
            ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            positions=torch.from_numpy(np.concatenate(positions)),
            sequences=sequences,
            groups=groups,
        )
        return batch, starts

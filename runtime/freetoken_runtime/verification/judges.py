# SPDX-License-Identifier: Apache-2.0
"""Two ways to tell whether stored states are right, beside a cold pass over the same path.

In fp32 a state is compared tensor by tensor. Where kernel forms round activations differently,
tensors may differ by more than a fault would, so it is judged by the logits that follow from it.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch

from ..spec import StateSpec
from ..state.anchors import Anchor
from ..state.buffers import StateLayout
from ..state.digest import BLOCK
from ..state.sequence import Sequence
from .differences import SAME, Difference, of_anchors, of_logits, of_rows
from .follower import Follower
from .records import RecordReader, StoredRecord, Unreadable, covering

Verdict = Difference | Unreadable


def is_wrong(verdict: Verdict) -> bool:
    """A record that went while it was looked at is neither right nor wrong."""
    return verdict != "gone" if isinstance(verdict, str) else verdict.excess > 1


@dataclass(frozen=True)
class ColdPass:
    """The path so far, forwarded cold; the last pass began at `start`. `anchors`: what belongs at
    the positions of stored anchors in it, and at its end. `sure`: the leading rows whose experts
    no rounding could have chosen otherwise."""

    sequence: Sequence
    start: int
    anchors: Mapping[int, Anchor]
    layout: StateLayout
    sure: int

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """A copy of the rows of tokens [start, stop), as a block holds them."""
        rows = self.sequence.view().copy_rows(start, stop)
        return {
            name: torch.from_numpy(copied).view(self.layout.dtype_of(name))
            for name, copied in rows.items()
        }


class Judge(Protocol):
    def verdicts(
        self, cold: ColdPass, due: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        """Decide about the records that end within the last pass, one after another: by how much
        they differ where they do most, or why they could not be compared."""


@dataclass(frozen=True)
class Continuation:
    """Judges states by the logits of the ids that follow. `routed`: see `of_logits`."""

    reader: RecordReader
    follower: Follower
    routed: bool

    def compare(self, cold: ColdPass, rows: Sequence, anchor: Anchor, position: int) -> Difference:
        """What differs most in the logits after `rows` and `anchor` from those after cold ones."""
        ours = self.follower.logits(rows, anchor, position)
        theirs = self.follower.logits(cold.sequence, cold.anchors[position], position)
        found = of_logits(ours, theirs, routed=self.routed)
        return max(found, key=lambda difference: difference.excess)

    def alone(self, cold: ColdPass, record: StoredRecord) -> Verdict:
        """One record among cold rows: a block at the end of the pass, an anchor at its place."""
        is_block = record.kind == "block"
        end = cold.sequence.length if is_block else record.stop
        anchor = cold.anchors[end] if is_block else self.reader.read(record)
        if isinstance(anchor, str):
            return anchor
        assert isinstance(anchor, Anchor), record
        start = (record.stop - 1) // BLOCK * BLOCK
        mixed = cold.sequence.fork(start)
        mixed.replay = 0  # rows are loaded behind it, none is forwarded
        try:
            unread = self.load(mixed, cold, end, {record.start: record} if is_block else {})
            return unread.get(record) or self.compare(cold, mixed, anchor, end)
        finally:
            mixed.close()

    def load(
        self, target: Sequence, cold: ColdPass, end: int, blocks: Mapping[int, StoredRecord]
    ) -> dict[StoredRecord, Unreadable]:
        """Append the path's rows up to `end` to `target`: of these blocks by where they start, cold
        ones elsewhere. Returns those that could not be read."""
        ids = cold.sequence.ids
        unread: dict[StoredRecord, Unreadable] = {}
        while (start := target.length) < end:
            record = blocks.get(start)
            stop = min(start - start % BLOCK + BLOCK, end)
            rows = None if record is None else self.reader.read(record)
            if record is not None and isinstance(rows, str):
                unread[record] = rows
            elif record is not None:
                stop = record.stop
            if not isinstance(rows, dict):
                rows = cold.rows(start, stop)
            target.begin(stop - start)
            target.load(rows)
            target.commit(ids[start:stop])
        return unread


@dataclass(frozen=True)
class StateJudge:
    """Tensor by tensor. Behind a row for which an expert was chosen by a hair, rounding may have
    chosen another one when the state was stored: what differs there is judged by its logits."""

    reader: RecordReader
    states: SequenceOf[StateSpec]
    continuation: Continuation

    def verdicts(
        self, cold: ColdPass, due: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        for record in due:
            verdict = self._verdict(cold, record)
            if is_wrong(verdict) and record.stop > cold.sure:
                verdict = self.continuation.alone(cold, record)
            yield record, verdict

    def _verdict(self, cold: ColdPass, record: StoredRecord) -> Verdict:
        stored = self.reader.read(record)
        if isinstance(stored, str):
            return stored
        if isinstance(stored, Anchor):
            found = of_anchors(stored, cold.anchors[record.stop], cold.layout, self.states)
        else:
            rows = cold.rows(record.start, record.stop)
            found = of_rows(stored, rows, cold.layout, self.states)
        # A block in which no group of tokens closes has no rows.
        return max(found, key=lambda difference: difference.excess, default=SAME)


@dataclass(frozen=True)
class LogitsJudge:
    """By the logits of the ids that follow. `stored`: the path's rows as the store has them, cold
    ones where it has none or wrong ones; empty at first, grows with the passes."""

    reader: RecordReader
    continuation: Continuation
    stored: Sequence

    def verdicts(
        self, cold: ColdPass, due: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        yield from self._blocks(cold, [record for record in due if record.kind == "block"])
        for record in due:
            if record.kind == "anchor":
                yield record, self._anchor(cold, record)

    def _anchor(self, cold: ColdPass, record: StoredRecord) -> Verdict:
        anchor = self.reader.read(record)
        if isinstance(anchor, str):
            return anchor
        assert isinstance(anchor, Anchor), record
        return self.continuation.compare(cold, self.stored, anchor, record.stop)

    def _blocks(
        self, cold: ColdPass, blocks: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        """Those of the path together; if they are wrong, and those beside it, one by one."""
        chosen, end = covering(blocks), cold.sequence.length
        unread = self.continuation.load(self.stored, cold, end, chosen)
        if not chosen:
            return
        together = self.continuation.compare(cold, self.stored, cold.anchors[end], end)
        verdicts: dict[StoredRecord, Verdict] = {**unread}
        for record in blocks:
            if record not in verdicts:
                alone = is_wrong(together) or chosen[record.start] is not record
                verdicts[record] = self.continuation.alone(cold, record) if alone else together
        if is_wrong(together):
            if not any(is_wrong(verdict) for verdict in verdicts.values()):
                # Each is within the limits and all together are not: the worst one has to go.
                worst = max(chosen.values(), key=lambda record: _excess(verdicts[record]))
                verdicts[worst] = together
            right = {r.start: r for r in chosen.values() if not is_wrong(verdicts[r])}
            self.stored.truncate(cold.start)
            self.stored.replay = 0
            self.continuation.load(self.stored, cold, end, right)
        yield from verdicts.items()


def _excess(verdict: Verdict) -> float:
    return 0.0 if isinstance(verdict, str) else verdict.excess

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
from .differences import Difference, of_anchors, of_logits, of_rows
from .follower import Follower
from .records import RecordReader, StoredRecord, Unreadable, covering

Verdict = Difference | Unreadable


def is_wrong(verdict: Verdict) -> bool:
    """A record that went while it was looked at is neither right nor wrong."""
    return verdict != "gone" if isinstance(verdict, str) else verdict.excess > 1


@dataclass(frozen=True)
class ColdPass:
    """The path so far, forwarded cold; the last pass began at `start`. `anchors`: what belongs at
    the positions of stored anchors in it, and at its end."""

    sequence: Sequence
    start: int
    anchors: Mapping[int, Anchor]
    layout: StateLayout

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
class StateJudge:
    """Tensor by tensor."""

    reader: RecordReader
    states: SequenceOf[StateSpec]

    def verdicts(
        self, cold: ColdPass, due: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        for record in due:
            yield record, self._verdict(cold, record)

    def _verdict(self, cold: ColdPass, record: StoredRecord) -> Verdict:
        stored = self.reader.read(record)
        if isinstance(stored, str):
            return stored
        if isinstance(stored, Anchor):
            found = of_anchors(stored, cold.anchors[record.stop], cold.layout, self.states)
        else:
            rows = cold.rows(record.start, record.stop)
            found = of_rows(stored, rows, cold.layout, self.states)
        return max(found, key=lambda difference: difference.excess)


@dataclass(frozen=True)
class LogitsJudge:
    """By the logits of the ids that follow. `stored`: the path's rows as the store has them, cold
    ones where it has none or wrong ones; empty at first, grows with the passes. `routed`: see
    `of_logits`."""

    reader: RecordReader
    follower: Follower
    stored: Sequence
    routed: bool

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
        return self._compare(cold, record.stop, anchor)

    def _blocks(
        self, cold: ColdPass, blocks: SequenceOf[StoredRecord]
    ) -> Iterator[tuple[StoredRecord, Verdict]]:
        """Those of the path together; if they are wrong, and those beside it, one by one."""
        chosen = covering(blocks)
        end = cold.sequence.length
        unread = self._load(self.stored, cold, cold.start, chosen)
        if not chosen:
            return
        together = self._compare(cold, end, cold.anchors[end])
        verdicts: dict[StoredRecord, Verdict] = {**unread}
        for record in blocks:
            if record not in verdicts:
                alone = is_wrong(together) or chosen[record.start] is not record
                verdicts[record] = self._alone(cold, record) if alone else together
        if is_wrong(together):
            if not any(is_wrong(verdict) for verdict in verdicts.values()):
                # Each is within the limits and all together are not: the worst one has to go.
                worst = max(chosen.values(), key=lambda record: _excess(verdicts[record]))
                verdicts[worst] = together
            right = {r.start: r for r in chosen.values() if not is_wrong(verdicts[r])}
            self.stored.truncate(cold.start)
            self._load(self.stored, cold, cold.start, right)
        yield from verdicts.items()

    def _alone(self, cold: ColdPass, record: StoredRecord) -> Verdict:
        """A block among cold rows."""
        end = cold.sequence.length
        mixed = cold.sequence.fork(record.start)
        mixed.replay = 0  # rows are loaded behind it, none is forwarded
        try:
            unread = self._load(mixed, cold, record.start, {record.start: record})
            if record in unread:
                return unread[record]
            return self._compare(cold, end, cold.anchors[end], mixed)
        finally:
            mixed.close()

    def _compare(
        self, cold: ColdPass, position: int, anchor: Anchor, rows: Sequence | None = None
    ) -> Difference:
        """What differs most in the logits after a state from after the cold one."""
        ours = self.follower.logits(rows or self.stored, anchor, position)
        theirs = self.follower.logits(cold.sequence, cold.anchors[position], position)
        found = of_logits(ours, theirs, routed=self.routed)
        return max(found, key=lambda difference: difference.excess)

    def _load(
        self, target: Sequence, cold: ColdPass, start: int, blocks: Mapping[int, StoredRecord]
    ) -> dict[StoredRecord, Unreadable]:
        """Append rows [start, end of the pass) to `target`: of these blocks by where they start,
        cold ones elsewhere. Returns those that could not be read."""
        end, ids = cold.sequence.length, cold.sequence.ids
        unread: dict[StoredRecord, Unreadable] = {}
        while start < end:
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
            start = stop
        return unread


def _excess(verdict: Verdict) -> float:
    return 0.0 if isinstance(verdict, str) else verdict.excess

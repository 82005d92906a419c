# SPDX-License-Identifier: Apache-2.0
"""One verification: a cold pass over a path, in chunks, and beside it what a store holds of it.

    store ──records──▶ judge ◀──rows, buffers── cold pass        one chunk per turn of the
                         │                                       owner thread
                         └──wrong──▶ not used from now on, removed at the end

What is wrong in the store may have been taken up: copies in RAM and what was computed from them go
at once. What was written of that has ids, too, and is found when their path is verified.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from ..errors import BudgetTooSmall
from ..models.decoder import Decoder
from ..owner import Owner
from ..reports import Finding, Verification
from ..runner import Runner, Work
from ..specs.moe import MoeSpec
from ..state.anchors import Anchor
from ..state.buffers import StateLayout
from ..state.digest import BLOCK, Ids
from ..state.disk import DiskStates
from ..state.keeper import StateKeeper
from ..state.prefix import PrefixIndex, Resident, shared_rows
from ..state.sequence import Sequence
from .follower import FOLLOWING, Follower
from .judges import (
    ColdPass,
    Continuation,
    Judge,
    LogitsJudge,
    StateJudge,
    Verdict,
    is_wrong,
)
from .records import RecordReader, StoredRecord, beyond, records_of

# Of a router's logits or scores, between the last expert taken and the best one left: below it
# rounding may choose.
CLOSE_MARGIN = 3e-6


@dataclass(frozen=True)
class Tools:
    """What a verification works with. `exact`: all arithmetic is fp32, so that states are compared
    themselves."""

    decoder: Decoder
    runner: Runner
    keeper: StateKeeper
    index: PrefixIndex
    disk: DiskStates | None
    exact: bool


class Run:
    """One path's verification. Mutable; everything but `drive` and `report` belongs to the owner
    thread."""

    def __init__(
        self, tools: Tools, ids: Ids, positions: frozenset[int] | None, chunk: int
    ) -> None:
        """`positions`: of the anchors to check, with the rows before them; None: all there is.
        `chunk`: rows of one pass, about."""
        self._tools = tools
        self._ids = ids
        self._positions = positions
        self._chunk = max(BLOCK, chunk - chunk % BLOCK)  # so that no block is cut
        self._layout = StateLayout.of(tools.decoder.spec.states(), torch.float32)
        self._findings: list[Finding] = []
        self._counts = {"block": 0, "anchor": 0}
        self._largest = 0.0
        self._forwarded = 0
        self._removed = 0
        self._complete = False
        self._sure = 0  # see `ColdPass`
        self._judged: set[bytes] = set()
        self._wrong_from: int | None = None  # the first row that may have come from a wrong record
        self._private: list[Resident] = []  # sequences that nobody else sees

    def drive(
        self,
        owner: Owner,
        on_progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Verification:
        """Take the steps in the owner's thread, one at a time, until they end or `cancelled` says
        so; what was found until then counts. For a caller's thread."""
        writer = self._tools.keeper.writer
        if writer is not None:
            writer.drain()  # what waits may be a copy of what is wrong
        steps = self._steps()
        try:
            while cancelled is None or not cancelled():
                progress = owner.call(lambda: next(steps, None))
                if progress is None:
                    break
                if on_progress is not None:
                    on_progress(*progress)
        finally:
            owner.call(steps.close)
        return self._report()

    def _report(self) -> Verification:
        return Verification(
            input_tokens=len(self._ids),
            compared="states" if self._tools.exact else "logits",
            blocks=self._counts["block"],
            anchors=self._counts["anchor"],
            findings=tuple(self._findings),
            largest=self._largest,
            forwarded_tokens=self._forwarded,
            sure_tokens=self._sure,
            removed_records=self._removed,
            complete=self._complete,
        )

    def _steps(self) -> Generator[tuple[int, int]]:
        """Between two of them other requests go on. Yields rows done and rows in all."""
        disk = self._tools.disk
        stored = [] if disk is None else records_of(disk, self._ids)
        records = [record for record in stored if self._is_chosen(record)]
        if disk is not None and records:
            try:
                yield from self._compare(disk, records)
            finally:
                for resident in self._private:
                    resident.sequence.close()
                self._expel(disk)
        self._complete = True

    def _compare(self, disk: DiskStates, records: list[StoredRecord]) -> Iterator[tuple[int, int]]:
        total = max(record.stop for record in records)
        yield 0, total
        cold, judge = self._sequence(total), self._judge(disk, total)
        while cold.length < total:
            start, stop = cold.length, min(cold.length + self._chunk, total)
            due = [record for record in records if start < record.stop <= stop]
            passed = self._forward(cold, due, stop)
            yield stop, total
            for record, verdict in judge.verdicts(passed, due):
                self._take(disk, record, verdict)
                yield stop, total

    def _forward(self, cold: Sequence, due: list[StoredRecord], stop: int) -> ColdPass:
        start = cold.length
        positions = sorted({r.stop for r in due if r.kind == "anchor"} | {stop})
        wanted = tuple(position - start - 1 for position in positions)
        margins: list[torch.Tensor] = []
        self._tools.decoder.observe_routing(margins.append)
        try:
            hidden = self._tools.runner.forward([Work(cold, self._ids[start:stop], wanted)])[0]
        finally:
            self._tools.decoder.observe_routing(None)
        if margins and self._sure == start:
            close = torch.stack(margins).amin(0) < CLOSE_MARGIN
            self._sure += int(close.int().argmax()) if close.any() else stop - start
        elif not margins:
            self._sure = stop
        self._forwarded += stop - start
        anchors = {
            position: Anchor(row, cold.fixed_at(position))
            for position, row in zip(positions, hidden, strict=True)
        }
        return ColdPass(cold, start, anchors, self._layout, self._sure)

    def _is_chosen(self, record: StoredRecord) -> bool:
        if self._positions is None:
            return True
        if record.kind == "anchor":
            return record.stop in self._positions
        return record.start < max(self._positions, default=0)

    def _sequence(self, rows: int) -> Sequence:
        resident = self._tools.keeper.acquire_cold(rows)
        if resident is None:
            raise BudgetTooSmall(
                "the path does not fit into the memory budget beside what is in use",
                value=f"{rows} tokens",
                remedy="raise ram_budget_bytes, unpin paths, or verify when less runs",
            )
        self._private.append(resident)
        return resident.sequence

    def _judge(self, disk: DiskStates, total: int) -> Judge:
        tools, spec = self._tools, self._tools.decoder.spec
        reader = RecordReader(disk, self._layout, spec.hidden_size)
        routed = any(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers)
        follower = Follower(tools.runner, self._ids, spec.context_limit)
        continuation = Continuation(reader, follower, routed)
        if tools.exact:
            return StateJudge(reader, spec.states(), continuation)
        stored = self._sequence(total + 2 * FOLLOWING)
        return LogitsJudge(reader, continuation, stored)

    def _take(self, disk: DiskStates, record: StoredRecord, verdict: Verdict) -> None:
        if verdict == "gone":
            return
        self._counts[record.kind] += 1
        if record.stop == record.end:
            self._judged.add(record.digest)
        if is_wrong(verdict):
            self._findings.append(_finding(record, verdict))
            disk.records.distrust(record.digest)
            start = record.start if record.kind == "block" else record.stop - 1
            self._forget(start)
            if record.kind == "block" or self._layout.fixed_bytes:
                self._wrong_from = (
                    start if self._wrong_from is None else min(start, self._wrong_from)
                )
        elif not isinstance(verdict, str):
            self._largest = max(self._largest, verdict.excess)

    def _expel(self, disk: DiskStates) -> None:
        """Remove what is wrong and, of what was not compared, all that goes on from there: it may
        have been computed from it."""
        if not self._findings:
            return
        if self._wrong_from is not None:
            for digest in beyond(disk, self._ids, self._wrong_from, self._judged):
                disk.records.distrust(digest)
        self._removed = disk.records.expel()

    def _forget(self, start: int) -> None:
        """Let go of what RAM holds of the path from row `start` on: it may have come from the wrong
        record, and cannot be told from what did not. A running request keeps it until its end."""
        keeper, stem = self._tools.keeper, self._ids[: start + 1]
        if keeper.writer is not None:
            keeper.writer.cancel(stem)
        for resident in self._tools.index:
            if shared_rows(resident.sequence.ids, stem) < len(stem):
                continue
            known = resident.forget_from
            resident.forget_from = start if known is None else min(start, known)
            resident.persisted_rows = 0
            if not resident.running:
                keeper.release(resident)


def _finding(record: StoredRecord, verdict: Verdict) -> Finding:
    if isinstance(verdict, str):
        return Finding(record.kind, record.start, record.stop, verdict)
    return Finding(
        record.kind,
        record.start,
        record.stop,
        "differs",
        buffer=verdict.buffer,
        layer=verdict.layer,
        difference=verdict.size,
        limit=verdict.limit,
    )

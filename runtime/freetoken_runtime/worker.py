# SPDX-License-Identifier: Apache-2.0
"""What the owner thread does between two looks at its queue: start, forward, sample, finish.

A fault reaches the request that caused it and nobody else: when a pass over several sequences
raises, each is tried alone. Nothing here may be called from another thread but `waiting` and
`running`.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from freetoken_storage.errors import FreetokenError

from .errors import BudgetTooSmall, EngineFault
from .generation import HANDOVER_TOKENS
from .reports import FinishReason, PathMiss
from .runner import Runner, Work
from .sampler import Sampler
from .scheduler import Candidate, Scheduler
from .state.anchors import Rank
from .state.digest import Ids, as_ids
from .state.keeper import StateKeeper
from .state.prefix import shared_rows
from .task import Moment, Task

_log = logging.getLogger(__name__)
SHARED_ROWS = 64  # so many rows must be in work for another request to wait for them
RESERVED_TOKENS = 512  # output rows that get room at the start; more is made while decoding


class Worker:
    """The requests in progress. Owner thread only. `anchor_interval`: decoded text gets an anchor
    at every multiple of it; None for models that need none."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        keeper: StateKeeper,
        context_limit: int,
        anchor_interval: int | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._keeper = keeper
        self._context_limit = context_limit
        self._anchor_interval = anchor_interval
        self.between_passes: Callable[[], None] = lambda: None
        self._waiting: deque[Task] = deque()
        self._tasks: list[Task] = []
        self.reused_rows = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def accept(self, task: Task) -> None:
        """Queue a task; it starts when there is room for it."""
        self._waiting.append(task)

    def step(self) -> bool:
        """One pass. False when nobody can go on until something changes."""
        self._end_cancelled()
        self._start_waiting()
        candidates = [
            Candidate(missing=task.missing, ready=task.stream.has_room) for task in self._tasks
        ]
        rows = self._scheduler.next_rows(candidates)
        if not rows:
            if self._keeper.writer is not None:
                self._keeper.writer.rest(False)
            return False
        if self._keeper.writer is not None:
            self._keeper.writer.rest(any(not task.missing for task in self._tasks))
        self.between_passes()
        chosen = [(self._tasks[index], count) for index, count in rows.items()]
        self._forward([(task, self._work(task, count)) for task, count in chosen])
        return True

    def abandon(self) -> None:
        """End everything as cancelled: the engine closes."""
        for task in [*self._tasks, *self._waiting]:
            self._end(task, "cancelled")
        self._waiting.clear()

    def fail_all(self, error: FreetokenError) -> None:
        """The thread is about to end: tell every consumer, touch nothing else."""
        for task in [*self._tasks, *self._waiting]:
            task.stream.fail(error, task.usage())

    # -- starting

    def _start_waiting(self) -> None:
        for task in list(self._waiting):
            if self._is_in_work(task):
                continue
            try:
                started = self._start(task)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: it must survive
                self._waiting.remove(task)
                self._fail(task, error)
                continue
            if not started:
                return
            self._waiting.remove(task)

    def _is_in_work(self, task: Task) -> bool:
        """Whether a prompt in progress is about to forward a part of this one, which then need not
        be forwarded twice: the task waits until it is there."""
        if task.request.cold:
            return False
        known = task.stream.plan.reused_tokens
        for other in self._tasks:
            if not other.missing or other.request.cold:
                continue
            ids = other.request.ids
            shared = shared_rows(ids, task.request.ids)
            if self._anchor_interval is not None:
                anchors = (*other.request.anchors, len(ids))
                shared = max((p for p in anchors if p <= shared), default=0)
            if other.running.sequence.length < shared and known + SHARED_ROWS <= shared:
                return True
        return False

    def _start(self, task: Task) -> bool:
        """Restore what can be reused. False if the task must wait for others to finish."""
        request = task.request
        sampling = request.sampling
        extra = min(sampling.max_tokens, RESERVED_TOKENS) if sampling is not None else 0
        extra = min(extra, self._context_limit - len(request.ids))
        if request.cold:
            task.resident = self._keeper.acquire_cold(len(request.ids))
        else:
            acquired = self._keeper.acquire(request.ids, extra)
            if acquired is not None:
                task.resident = acquired.resident
                task.reused = acquired.reused
                planned = task.stream.plan
                task.miss = planned.miss
                if acquired.reused != planned.reused_tokens:
                    task.miss = self._keeper.why(request.ids, acquired)
                    task.changed = _difference(planned.reused_tokens, acquired.reused, task.miss)
                if acquired.row is not None:
                    task.hidden = task.rows = acquired.row.unsqueeze(0)
        if task.resident is None:
            if self._tasks:
                return False
            raise BudgetTooSmall(
                "the path does not fit into the memory budget",
                value=f"{len(request.ids)} tokens",
                remedy="raise ram_budget_bytes, unpin paths or shorten the context",
            )
        self._keeper.promote(task.resident, request.anchors)
        self.reused_rows += task.reused
        self._tasks.append(task)
        if sampling is not None:
            task.sampler = Sampler(sampling, self._runner.vocab_size, request.ids.tolist())
        if not task.missing:
            self._prompt_done(task)
        return True

    # -- a pass

    def _certain(self, task: Task) -> list[int]:
        """What will be sampled after the last token in any case: it is forwarded with it, in the
        form of few rows."""
        sampling, sampler = task.request.sampling, task.sampler
        assert sampling is not None and sampler is not None
        length = len(task.request.ids) + len(task.output)
        room = min(sampling.max_tokens - len(task.output), self._context_limit - length + 1)
        return sampler.certain(min(self._runner.few_rows, HANDOVER_TOKENS, room) - 1)

    def _work(self, task: Task, rows: int) -> Work:
        """The next rows of a task and those whose hidden row is wanted: anchors and the last."""
        sequence = task.running.sequence
        start = sequence.length
        if sequence.replay:
            return Work(sequence, sequence.ids[start - sequence.replay :], (), replay=True)
        if not task.missing:
            sampled = as_ids([*task.output[-1:], *self._certain(task)])
            return Work(sequence, sampled, tuple(range(len(sampled))))
        ids: Ids = task.request.ids[start : start + rows]
        wanted = {p - start - 1 for p in task.request.anchors if start < p <= start + rows}
        return Work(sequence, ids, tuple(sorted(wanted | {rows - 1})))

    def _forward(self, works: SequenceOf[tuple[Task, Work]]) -> None:
        """Forward and go on with each task; if the pass raises, with each alone."""
        try:
            for task, work in works:
                self._make_room(task, work)
            hidden = self._runner.forward([work for _, work in works])
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must survive
            if len(works) == 1:
                self._fail(works[0][0], error)
                return
            for pair in works:
                self._forward([pair])
            return
        decoding = []
        for (task, work), rows in zip(works, hidden, strict=True):
            try:
                if self._advance(task, work, rows):
                    decoding.append(task)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: it must survive
                self._fail(task, error)
        self._sample(decoding)

    def _make_room(self, task: Task, work: Work) -> None:
        needed = 0 if work.replay else work.sequence.room_needed(len(work.ids))
        if needed and not self._keeper.make_room(needed):
            raise BudgetTooSmall(
                "the path has outgrown the memory budget",
                value=f"{work.sequence.length + len(work.ids)} tokens",
                remedy="raise ram_budget_bytes, unpin paths or run fewer requests at once",
            )

    def _advance(self, task: Task, work: Work, hidden: torch.Tensor) -> bool:
        """Take the rows of a pass into account; whether the task samples next."""
        request, resident = task.request, task.running
        if not work.replay:
            task.hidden = task.rows = hidden[-1:]
        if task.missing:
            start = work.sequence.length - len(work.ids)
            task.prefilled += len(work.ids)
            for offset, row in zip(work.wanted, hidden, strict=True):
                position = start + offset + 1
                if position in request.anchors:
                    self._keeper.capture(resident, position, row, request.anchors[position])
            if request.on_progress is not None:
                request.on_progress(task.prefilled, task.prefilled + task.missing)
            if task.missing:
                return False
            self._prompt_done(task, sample=False)
            return task in self._tasks
        task.rows = hidden
        start = work.sequence.length - len(work.ids)
        for position, (token_id, row) in enumerate(zip(work.ids, hidden, strict=True), start + 1):
            if int(token_id) in request.anchor_after:
                self._keeper.capture(resident, position, row)
            elif self._anchor_interval is not None and position % self._anchor_interval == 0:
                self._keeper.capture(resident, position, row, Rank.INTERIOR)
            if request.anchor_before:
                fixed = work.sequence.fixed_at(position)
                task.recent.append(Moment(position, row, fixed))
        return True

    def _prompt_done(self, task: Task, *, sample: bool = True) -> None:
        """The prompt's end is an anchor; then sample, or stop if that was all."""
        request, resident = task.request, task.running
        assert task.hidden is not None
        assert task.reused + task.prefilled == len(request.ids), (task.reused, task.prefilled)
        if not request.cold:
            self._keeper.capture(resident, len(request.ids), task.hidden[0])
        if request.want_logits:
            task.logits = self._runner.logits(task.hidden)[0]
        if task.sampler is None:
            self._finish(task, "length")
            return
        if self._keeper.writer is not None:
            self._keeper.writer.rest(True)  # from here on a token is waited for
        self._keeper.persist(resident)
        if sample:
            self._sample([task])

    def _sample(self, tasks: SequenceOf[Task]) -> None:
        """A token for each row of each task: all but its last row were forwarded because the token
        was certain. A row's logits do not depend on the rows beside it."""
        if not tasks:
            return
        rows = [task.rows for task in tasks if task.rows is not None]
        logits = self._runner.logits(torch.cat(rows))
        for task, of_task in zip(tasks, torch.split(logits, [len(r) for r in rows]), strict=True):
            try:
                for row in of_task:
                    self._take_token(task, row)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: it must survive
                self._fail(task, error)

    def _take_token(self, task: Task, logits: torch.Tensor) -> None:
        sampling, sampler = task.request.sampling, task.sampler
        assert sampling is not None and sampler is not None
        token = sampler.sample(logits)
        task.count(token.id)
        self._anchor_behind(task, token.id)
        task.stream.put(token, task.usage())
        if sampler.is_stop(token.id):
            self._finish(task, "stop")
        elif (
            len(task.output) >= sampling.max_tokens
            or len(task.request.ids) + len(task.output) > self._context_limit
        ):
            self._finish(task, "length")

    def _anchor_behind(self, task: Task, token_id: int) -> None:
        """Make the anchor that this id gets before itself, if decoding has just passed there."""
        back = task.request.anchor_before.get(token_id)
        if back is None:
            return
        wanted = task.running.sequence.length - back  # the id itself is not forwarded yet
        for moment in task.recent:
            if moment.position == wanted:
                self._keeper.keep(task.running, moment.position, moment.row, moment.fixed)

    # -- ending

    def _end_cancelled(self) -> None:
        for task in [t for t in self._tasks if t.stream.cancelled]:
            self._end(task, "cancelled")
        for task in [t for t in self._waiting if t.stream.cancelled]:
            self._waiting.remove(task)
            self._end(task, "cancelled")

    def _end(self, task: Task, reason: FinishReason) -> None:
        try:
            self._finish(task, reason)
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must survive
            self._fail(task, error)

    def _finish(self, task: Task, reason: FinishReason) -> None:
        """The generation's end is an anchor, cancelled or not."""
        self._let_go(task, keep_row=True)
        task.stream.finish(reason, task.usage())

    def _fail(self, task: Task, error: BaseException) -> None:
        self._let_go(task, keep_row=False)
        if not isinstance(error, FreetokenError):
            _log.error("a request failed inside the engine", exc_info=error)
            fault = EngineFault("a request failed inside the engine", value=repr(error))
            fault.__cause__ = error
            error = fault
        task.stream.fail(error, task.usage())

    def _let_go(self, task: Task, *, keep_row: bool) -> None:
        resident, task.resident = task.resident, None
        if task in self._tasks:
            self._tasks.remove(task)
        if resident is None:
            return
        if task.request.cold:
            resident.sequence.close()
            return
        if keep_row and task.hidden is not None and resident.sequence.length:
            self._keeper.capture(resident, resident.sequence.length, task.hidden[0])
        self._keeper.persist(resident)
        self._keeper.release(resident)


def _difference(planned: int, reused: int, miss: PathMiss | None) -> str:
    """What made the work differ from the plan that the caller was shown, in reused tokens."""
    if reused > planned:
        return f"another request computed {reused - planned} tokens of the path"
    cause = "evicted" if miss is None else miss.cause
    return f"{planned - reused} tokens were lost: {cause}"

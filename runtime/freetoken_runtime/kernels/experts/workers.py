# SPDX-License-Identifier: Apache-2.0
"""Threads that compute experts beside the one that asks, each with one compute thread of its own.

A team of compute threads works on one matrix at a time and waits for its slowest member at each:
beside a busy process that is milliseconds for every operation. Threads that take whole experts
meet once a layer, and the one that was kept from its core has taken fewer of them.

    asking thread   takes jobs as they come, gives them away, does one whenever enough are waiting
    helpers         take a job, do it, release it, until there are no more
    the end         of a round: all jobs done and released, or the error of one that failed

Where the machine is quiet a team is at least as fast (docs/decisions/0077-cpu-experts.md), so
helpers work only while the asking thread has no team, or leaves it for a long pass that fetches.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from weakref import finalize

import torch

from ...contention import compute_alone
from ...errors import WorkerStalled

TIMEOUT_S = 60.0  # an expert takes milliseconds, with thousands of rows seconds
_LEAVING_S = 10.0  # a thread without a job leaves at once
_WAITING_PER_HELPER = 2  # jobs that are there for a helper to take


@dataclass(frozen=True)
class Job:
    """Done once, by any thread, then released. After a failure jobs are only released."""

    work: Callable[[], None]
    release: Callable[[], None]


class _Round:
    """The jobs of one `Workers.run`. `failure`: the first one; nothing is begun after it."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Job | None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.ended = threading.Semaphore(0)  # once for each helper
        self.abandoned = False
        self.inference = torch.is_inference_mode_enabled()

    def do(self, job: Job) -> None:
        try:
            if self.failure is None:
                job.work()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
            self.failure = self.failure or error
        finally:
            if not self.abandoned:  # else the expert is not this round's any more
                job.release()

    def do_one(self) -> bool:
        """False if none is waiting."""
        try:
            job = self.waiting.get_nowait()
        except Empty:
            return False
        assert job is not None
        self.do(job)
        return True

    def help(self) -> None:
        """In a helper: until the round ends."""
        with torch.inference_mode(self.inference):
            while (job := self.waiting.get()) is not None:
                self.do(job)
        self.ended.release()


class Workers:
    """Any thread may ask; while one does, others compute alone. Threads start when they are first
    needed, and end with this object. `helpers`: how many, beside the thread that asks; may be set
    at any time and counts from the next start."""

    def __init__(self, helpers: int = 0, *, timeout_s: float = TIMEOUT_S) -> None:
        self.helpers = helpers
        self.timeout_s = timeout_s
        self._helpers: list[_Helper] = []  # that run
        self._asking = threading.Lock()
        finalize(self, _end, self._helpers)

    def run(self, jobs: Iterable[Job]) -> None:
        """Do every job once and release it. Raises what a job or the iterable raised, when no
        thread is at a job any more; WorkerStalled if one does not come back."""
        if not self.helpers or torch.get_num_threads() > 1 or not self._asking.acquire(False):
            return _alone(jobs)
        try:
            self._share(jobs, _Round())
        finally:
            self._asking.release()

    @contextmanager
    def instead_of_team(self) -> Iterator[None]:
        """While the block runs, the asking thread has no team, so that helpers work. For long
        passes whose experts are being fetched: threads of ours then use the team's cores."""
        own = torch.get_num_threads()
        if self.helpers:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(own)

    def close(self) -> None:
        """End the threads; the next round that needs some has new ones."""
        with self._asking:
            _end(self._helpers)

    def _share(self, jobs: Iterable[Job], round_: _Round) -> None:
        self._start()
        for helper in self._helpers:
            helper.rounds.put(round_)
        try:
            for job in jobs:
                round_.waiting.put(job)
                if round_.waiting.qsize() > _WAITING_PER_HELPER * len(self._helpers):
                    round_.do_one()
                if round_.failure is not None:
                    break
            while round_.do_one():
                pass
        except BaseException as error:
            round_.failure = round_.failure or error
            raise
        finally:
            self._join(round_)
        if round_.failure is not None:
            raise round_.failure

    def _join(self, round_: _Round) -> None:
        """Wait for the helpers. Those that do not come back are left to themselves: the next round
        has others."""
        for _ in self._helpers:
            round_.waiting.put(None)
        for _ in self._helpers:
            if not round_.ended.acquire(timeout=self.timeout_s):
                round_.abandoned = True
                _dismiss(self._helpers)
                raise WorkerStalled(
                    "a thread that computes an expert does not come back",
                    value=f"{self.timeout_s:g} s",
                    remedy="the request can be repeated; if it happens again, load the model again",
                ) from round_.failure

    def _start(self) -> None:
        while len(self._helpers) < self.helpers:
            rounds: SimpleQueue[_Round | None] = SimpleQueue()
            thread = threading.Thread(
                target=_help, args=(rounds,), name="freetoken-worker", daemon=True
            )
            thread.start()
            self._helpers.append(_Helper(thread, rounds))


@dataclass(frozen=True)
class _Helper:
    thread: threading.Thread
    rounds: "SimpleQueue[_Round | None]"


def _alone(jobs: Iterable[Job]) -> None:
    for job in jobs:
        try:
            job.work()
        finally:
            job.release()


def _help(rounds: "SimpleQueue[_Round | None]") -> None:
    compute_alone()  # as the asking thread does: new threads of anybody's begin with that
    while (round_ := rounds.get()) is not None:
        round_.help()
        del round_  # nothing of it is kept while there is nothing to do


def _end(helpers: list[_Helper]) -> None:
    """End the threads. They are waited for: one that is still on its way out of torch when the
    process ends aborts it."""
    for thread in _dismiss(helpers):
        if thread is not threading.current_thread():  # the last reference may go in a helper
            thread.join(_LEAVING_S)


def _dismiss(helpers: list[_Helper]) -> list[threading.Thread]:
    """Tell them to end, some perhaps in vain. Returns their threads."""
    threads = []
    while helpers:
        helper = helpers.pop()
        helper.rounds.put(None)
        threads.append(helper.thread)
    return threads

# SPDX-License-Identifier: Apache-2.0
"""Threads that fill slots while others compute.

They keep no team of compute threads: see `contention`.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier, Lock

import torch

from freetoken_storage.weights_direct import DirectReader

from ..contention import compute_alone

SWITCH_S = 1e-4


class Fetcher:
    """Runs jobs in the order of their submission, a few at a time. Threads start with the first."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: set[Future[None]] = set()
        self._lock = Lock()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._pool is None:
                self._pool = _started(self.threads)
            future = self._pool.submit(job)
            self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    def close(self, timeout_s: float) -> bool:
        """End the threads; the next job starts them anew. False if a job is still going on then:
        one whose disk does not answer may never end, and nobody waits for it."""
        with self._lock:
            pool, self._pool = self._pool, None
            jobs = list(self._jobs)
        if pool is None:
            return True
        pool.shutdown(wait=False, cancel_futures=True)
        return not wait(unfinished(jobs), timeout_s).not_done


class Disk:
    """A reader that is opened when it is first used, and again after it was closed.

    A read that is done waits for the interpreter's lock. Beside a thread that is busy in Python it
    waits for up to a switch interval, and O_DIRECT reads fall from 1.4 to 0.3 GB/s; with a short
    interval they keep their speed. So the process has one while a reader is open.
    """

    def __init__(self, make: Callable[[], DirectReader] = DirectReader) -> None:
        self._make = make
        self._reader: DirectReader | None = None
        self._usual_s = 0.0
        self._lock = Lock()

    def reader(self) -> DirectReader:
        with self._lock:
            if self._reader is None:
                self._reader = self._make()
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SWITCH_S))
            return self._reader

    def close(self) -> None:
        """Nobody reads any more."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is None:
                return
            if self._usual_s > SWITCH_S:  # else another one set it, and will set it back
                sys.setswitchinterval(self._usual_s)
        reader.close()


def unfinished(jobs: Iterable[Future[None] | None]) -> list[Future[None]]:
    """Those to wait for. One that was cancelled is done, but nobody ever tells those who wait."""
    return [job for job in jobs if job is not None and not job.done()]


def _started(threads: int) -> ThreadPoolExecutor:
    """New threads of anybody's begin with the last number of compute threads that was set: that is
    made good here."""
    own = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "freetoken-experts", compute_alone)
    ready = Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(own)
    return pool

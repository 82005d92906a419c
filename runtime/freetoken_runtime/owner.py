# SPDX-License-Identifier: Apache-2.0
"""The owner thread: the only one that calls torch and changes sequences.

    caller threads ──requests, commands──▶ owner ──tokens──▶ each request's Handover
                                             └──frozen views──▶ persister

Between two passes it takes new requests, ends cancelled ones and runs commands. What a request
needs done is in `tasks.py`; this file decides when.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .errors import EngineClosed
from .generation import Handover
from .reports import ReusePlan
from .task import Request, Task
from .worker import Worker

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Owner:
    """Runs requests on its own thread until `close`. `submit` and `call` are for any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._arrived: deque[Task] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._woken = False
        self._refusing = False  # no new requests
        self._closing = False  # no new commands either
        self._thread = threading.Thread(target=self._run, name="freetoken-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def waiting(self) -> int:
        """Requests that have not been started."""
        return len(self._arrived) + self._worker.waiting

    def submit(self, request: Request, plan: ReusePlan) -> Task:
        """Queue a request. EngineClosed."""
        task = Task(request, Handover(plan, self.wake))
        with self._changed:
            self._check_open(self._refusing)
            self._arrived.append(task)
            self._changed.notify()
        return task

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` in the owner thread, between two passes, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)

        with self._changed:
            self._check_open(self._closing)
            self._commands.append(run)
            self._changed.notify()
        return future.result()

    def wake(self) -> None:
        """Something changed that the owner may wait for: room in a hand-over, a cancel."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def end_requests(self) -> None:
        """End every request as cancelled and take no more. Commands are still run."""
        with self._changed:
            self._refusing = True
        self.call(self._worker.abandon)

    def close(self) -> None:
        """Stop the thread. Safe to repeat."""
        with self._changed:
            self._refusing = self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_open(self) -> None:
        """EngineClosed if it is closed."""
        self._check_open(self._closing)

    def _check_open(self, closed: bool) -> None:
        if closed:
            raise EngineClosed("the engine is closed", remedy="load it again")

    def _run(self) -> None:
        busy = False
        while self._take(busy):
            busy = self._worker.step()
        self._worker.abandon()

    def _take(self, busy: bool) -> bool:
        """Wait for work unless there is some; hand it to the worker. False when closing."""
        with self._changed:
            while not (busy or self._arrived or self._commands or self._woken or self._closing):
                self._changed.wait()
            self._woken = False
            arrived, commands = list(self._arrived), list(self._commands)
            self._arrived.clear()
            self._commands.clear()
            closing = self._closing
        for command in commands:
            command()
        for task in arrived:
            self._worker.accept(task)
        return not closing

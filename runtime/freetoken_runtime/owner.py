# SPDX-License-Identifier: Apache-2.0
"""The owner thread: the only one that calls torch and changes sequences.

    caller threads ──requests, commands──▶ owner ──tokens──▶ each request's Handover
                                             └──frozen views──▶ persister

Between two passes it takes new requests, ends cancelled ones and runs commands. What a request
needs done is in `tasks.py`; this file decides when.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import EngineClosed, EngineFault, WrongThread
from .generation import Handover
from .reports import ReusePlan
from .task import Request, Task
from .worker import Worker

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Command:
    """What a caller wants done in the owner thread, and where it waits for the result."""

    run: Callable[[], Any]
    future: Future[Any]

    def __call__(self) -> None:
        try:
            self.future.set_result(self.run())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            self.future.set_exception(error)


class Owner:
    """Runs requests on its own thread until `close`. `submit` and `call` are for any thread but
    that one: a callback that waited for its own thread would wait for ever."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._arrived: deque[Task] = deque()
        self._commands: deque[_Command] = deque()
        self._woken = False
        self._refusing = False  # no new requests
        self._closing = False  # no new commands either
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="freetoken-engine", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def inherited(self) -> bool:
        """Whether this process got the engine through fork(): its threads did not come along."""
        return os.getpid() != self._pid

    @property
    def waiting(self) -> int:
        """Requests that have not been started."""
        return len(self._arrived) + self._worker.waiting

    def submit(self, request: Request, plan: ReusePlan) -> Task:
        """Queue a request. EngineClosed."""
        self._check_process()
        task = Task(request, Handover(plan, self.wake, self.check_caller))
        with self._changed:
            self._check_open(self._refusing)
            self._arrived.append(task)
            self._changed.notify()
        return task

    def call(self, command: Callable[[], T]) -> T:
        """Run `command` in the owner thread, between two passes, and return its result."""
        self.check_caller()
        future: Future[T] = Future()
        with self._changed:
            self._check_open(self._closing)
            self._commands.append(_Command(command, future))
            self._changed.notify()
        return future.result()

    def check_caller(self) -> None:
        """Whoever is about to wait for the owner thread asks first. WrongThread in that very
        thread (a callback), EngineClosed in a forked child."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise WrongThread(
                "a callback of the engine waits for the engine",
                remedy="hand the work to another thread, or do it when the generation has ended",
            )

    def wake(self) -> None:
        """Something changed that the owner may wait for: room in a hand-over, a cancel."""
        if self.inherited:
            return  # nobody to wake; the lock may have been held at the moment of the fork
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
        self._thread.join()

    def end(self) -> None:
        """`close` for an engine that was left without one: its last reference went, or the process
        ends. A thread that is still inside torch while its libraries go would abort the process."""
        if not self.inherited and threading.current_thread() is not self._thread:
            self.close()

    def check_open(self) -> None:
        """EngineClosed if it is closed."""
        self._check_open(self._closing)

    def _check_process(self) -> None:
        if self.inherited:
            raise EngineClosed(
                "the engine was loaded by another process and inherited through fork()",
                value=f"process {os.getpid()}",
                limit=f"process {self._pid}",
                remedy="load it in this process",
            )

    def _check_open(self, closed: bool) -> None:
        if closed:
            raise EngineClosed("the engine is closed", remedy="load it again")

    def _run(self) -> None:
        busy = False
        try:
            while self._take(busy):
                busy = self._worker.step()
            self._worker.abandon()
        except BaseException as error:  # noqa: BLE001 - the thread's end: nobody may wait for ever
            _log.critical("the engine's thread has ended", exc_info=error)
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing more will come."""
        fault = EngineFault("the engine's thread has ended", value=repr(error), remedy="load again")
        fault.__cause__ = error
        with self._changed:
            self._refusing = self._closing = True
            arrived, commands = list(self._arrived), list(self._commands)
        for command in commands:
            command.future.set_exception(fault)
        for task in arrived:
            self._worker.accept(task)
        self._worker.fail_all(fault)

    def _take(self, busy: bool) -> bool:
        """Wait for work unless there is some; hand it to the worker. False when closing. Requests
        go first: a command that ends everything must find them."""
        with self._changed:
            while not (busy or self._arrived or self._commands or self._woken or self._closing):
                self._changed.wait()
            self._woken = False
            arrived, commands = list(self._arrived), list(self._commands)
            self._arrived.clear()
            self._commands.clear()
            closing = self._closing
        for task in arrived:
            self._worker.accept(task)
        for command in commands:
            command()
        return not closing

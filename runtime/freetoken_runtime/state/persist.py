# SPDX-License-Identifier: Apache-2.0
"""Write-behind: frozen views of paths go to the snapshot store on a thread of their own.

    enqueue ──▶ queue, one job per resident ──▶ blocks, in path order ──▶ anchors

Blocks go before the anchor that makes them worth finding. The thread rests while tokens decode
(writing triples decode time) unless somebody waits or too much has piled up. It reads rows that
never change and calls no torch but copies.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freetoken_storage.errors import FreetokenError

from ..errors import EngineFault
from .anchors import Anchor
from .digest import BLOCK, Ids
from .disk import DiskStates
from .lookup import History
from .prefix import Resident, shared_rows
from .spans import PathView

_log = logging.getLogger(__name__)
BACKLOG_BYTES = 256 << 20  # beyond this it writes while tokens decode


@dataclass(frozen=True)
class _Job:
    resident: Resident
    view: PathView
    anchors: Mapping[int, Anchor]


class Persister:
    """Writes to one store until `close`. Thread-safe."""

    def __init__(self, disk: DiskStates, history: History, token_bytes: int) -> None:
        self._disk = disk
        self._history = history
        self._token_bytes = token_bytes
        self._changed = threading.Condition()
        self._queue: OrderedDict[Resident, _Job] = OrderedDict()
        self._active: _Job | None = None
        self._dropped: _Job | None = None  # the active job, when it shall end early
        self._decoding = False
        self._hurrying = 0  # callers that wait
        self._closing = False
        self._errors = 0
        self._reported = 0
        self._last_error: FreetokenError | None = None
        self.written_bytes = 0
        self._thread = threading.Thread(target=self._run, name="freetoken-persist", daemon=True)
        self._thread.start()

    # -- for the owner thread

    def enqueue(self, resident: Resident, view: PathView, anchors: Mapping[int, Anchor]) -> None:
        """Write the view's blocks, then the anchors. A queued job of the same resident is
        replaced: a path only grows while it is queued."""
        with self._changed:
            self._queue[resident] = _Job(resident, view, anchors)
            self._changed.notify_all()

    def rest(self, decoding: bool) -> None:
        """Tokens are being decoded, or no longer."""
        if decoding is not self._decoding:
            with self._changed:
                self._decoding = decoding
                self._changed.notify_all()

    def drain(self, resident: Resident | None = None) -> None:
        """Return when what was enqueued, for this resident or at all, is written or has failed."""
        if resident is None:
            self._wait(lambda: bool(self._queue) or self._active is not None)
        else:
            self._wait(lambda: resident in self._queue or self._is_active(resident))

    def cancel(self, ids: Ids) -> None:
        """Drop queued paths that begin with `ids`; a path being written ends after its block."""
        with self._changed:
            for resident, job in list(self._queue.items()):
                if shared_rows(job.view.ids, ids) == len(ids):
                    del self._queue[resident]
            active = self._active
            if active is None or shared_rows(active.view.ids, ids) < len(ids):
                return
            self._dropped = active
            self._changed.notify_all()
            while self._active is active:
                self._changed.wait()

    # -- for any thread

    def failed(self, error: FreetokenError) -> None:
        """Keep a write error for the next flush."""
        with self._changed:
            self._errors += 1
            self._last_error = error

    @property
    def backlog_bytes(self) -> int:
        """Bytes of KV rows that wait, at most: some may be in the store already."""
        with self._changed:
            return self._backlog()

    @property
    def last_error(self) -> FreetokenError | None:
        """A write error that no flush has reported yet."""
        return self._last_error if self._errors > self._reported else None

    def flush(self) -> None:
        """Return when everything enqueued so far would survive a power loss. Raises the first
        error of a write since the last flush; what it concerned is not on disk."""
        with self._changed:
            reported = self._reported
        self.drain()
        with self._changed:
            error, failed = self._last_error, self._errors > reported
            self._reported = self._errors
        if failed and error is not None:
            raise error
        self._disk.snapshots.flush()

    def close(self) -> None:
        """Write what waits and stop. Errors are logged: nobody is left to be told."""
        try:
            self.flush()
        except FreetokenError as error:
            _log.warning("states were not written: %s", error)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- inside

    def _is_active(self, resident: Resident) -> bool:
        return self._active is not None and self._active.resident is resident

    def _wait(self, pending: Callable[[], bool]) -> None:
        with self._changed:
            self._hurrying += 1
            self._changed.notify_all()
            while pending():
                self._changed.wait()
            self._hurrying -= 1

    def _backlog(self) -> int:
        jobs = [*self._queue.values(), *([self._active] if self._active is not None else [])]
        rows = sum(max(0, len(job.view.ids) - job.resident.persisted_rows) for job in jobs)
        return rows * self._token_bytes

    def _resting(self) -> bool:
        return self._decoding and not self._hurrying and self._backlog() <= BACKLOG_BYTES

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """Write the next job. Nothing may hold its rows once it counts as done: whoever waits for
        that wants their memory."""
        job = self._next()
        if job is None:
            return False
        error = self._attempt(job)
        del job
        if error is not None:
            self.failed(error)
        with self._changed:
            self._active = None
            self._dropped = None
            self._changed.notify_all()
        return True

    def _attempt(self, job: _Job) -> FreetokenError | None:
        """Write a job; returns what went wrong, without the frames that hold the job's rows."""
        try:
            self._write(job)
        except FreetokenError as fault:
            fault.__cause__ = fault.__context__ = None
            return fault.with_traceback(None)
        except Exception as fault:  # noqa: BLE001 - the thread's edge: it must survive
            _log.error("writing a state failed", exc_info=fault)
            return EngineFault("writing a state failed", value=repr(fault))
        return None

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._closing and (not self._queue or self._resting()):
                self._changed.wait()
            if not self._queue:
                return None
            _, self._active = self._queue.popitem(last=False)
            return self._active

    def _may_go_on(self, job: _Job) -> bool:
        """Between two blocks: rest if need be. False when the job was dropped."""
        with self._changed:
            while self._resting() and self._dropped is not job and not self._closing:
                self._changed.wait()
            return self._dropped is not job

    def _write(self, job: _Job) -> None:
        ids = job.view.ids
        self._disk.register()
        names = self._disk.boundaries(ids)
        start = self._disk.stored_blocks(names) * BLOCK
        while start < len(ids):
            if not self._may_go_on(job):
                return
            self.written_bytes += self._disk.write_block(job.view, names, start)
            start = min(start + BLOCK, len(ids))
            self._persisted(job, min(start, len(ids) - 1))  # whole only with the anchors
        if not self._may_go_on(job):
            return
        self._disk.write_anchors(ids, names, job.anchors)
        self._persisted(job, len(ids))
        self._history.remember(names[1:])
        self._disk.pins.refresh(ids)

    def _persisted(self, job: _Job, rows: int) -> None:
        job.resident.persisted_rows = max(job.resident.persisted_rows, rows)

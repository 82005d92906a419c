# SPDX-License-Identifier: Apache-2.0
"""One thread waits, many tell: a slot was filled, or what was handed out came back."""

import time
from collections.abc import Callable
from threading import Condition


class Changes:
    """Counts what happened. Who waits reads `count`, looks for itself, and waits for another count:
    what happens in between is not missed. Thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = Condition()
        self._out = 0  # leases that are handed out
        self._idle_from_s = 0.0  # when the last of them came back

    def tell(self, _: object = None) -> None:
        """Something happened. The argument is for those who call back with one."""
        with self._condition:
            self._told()

    def wait(self, seen: int, timeout_s: float) -> float | None:
        """Until the count is another one than was seen. Of the seconds that took, those in which
        nobody used what was handed out; None if nothing happened in time."""
        started_s = time.perf_counter()
        with self._condition:
            if not self._condition.wait_for(lambda: self.count != seen, timeout_s):
                return None
            idle_from_s = max(started_s, self._idle_from_s)
            return 0.0 if self._out else max(0.0, time.perf_counter() - idle_from_s)

    def lend(self, lease: "Lease") -> None:
        """It is handed out."""
        with self._condition:
            assert not lease.ended and not lease.lent_s
            self._out += 1
            lease.lent_s = time.perf_counter()

    def end(self, lease: "Lease") -> None:
        """It came back, or is not needed any more. Once: what comes later changes nothing."""
        with self._condition:
            if lease.ended:
                return
            lease.ended = True
            lease.give_back()
            if lease.lent_s:
                lease.back_s = time.perf_counter()
                self._out -= 1
                if not self._out:
                    self._idle_from_s = lease.back_s
            self._told()

    def _told(self) -> None:
        self.count += 1
        self._condition.notify_all()


class Lease:
    """What one layer of one pass keeps for itself until `release`, which any thread may call, also
    late, when others have it. `lent_s`, `back_s`: when it was handed out and came back, on the
    clock of `perf_counter`; 0 if not. Changed by `Changes` only."""

    def __init__(self, changes: Changes, give_back: Callable[[], None]) -> None:
        self.give_back = give_back
        self.ended = False
        self.lent_s = self.back_s = 0.0
        self._changes = changes

    def lend(self) -> None:
        self._changes.lend(self)

    def release(self) -> None:
        self._changes.end(self)

# SPDX-License-Identifier: Apache-2.0
"""How far a prompt has come, from the engine's thread to the reader's.

The engine computes nothing while it reports, so a report is two assignments and at most one notice:
the reader makes the event. Between two passes an event that was made here cost 0.2 ms.
"""

from collections import deque
from collections.abc import Callable


class Progress:
    """The newest count. `report` belongs to one thread, `take` to another."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, int]] = deque(maxlen=1)
        self._noticed = False
        self.notify: Callable[[], None] | None = None  # called in the reporting thread

    def report(self, done: int, total: int) -> None:
        """So many rows of so many. A reader that has not looked since the last notice gets no
        second one, and finds the newest count when it does."""
        self._newest.append((done, total))
        if not self._noticed and self.notify is not None:
            self._noticed = True
            self.notify()

    def take(self) -> tuple[int, int] | None:
        """The newest count, once. The order matters: a report that comes in between is noticed
        again, perhaps for nothing; the other way round its notice could be lost."""
        self._noticed = False
        return self._newest.popleft() if self._newest else None

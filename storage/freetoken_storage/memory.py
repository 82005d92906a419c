# SPDX-License-Identifier: Apache-2.0
"""MemoryDatabase: the same surface and the same refusals as `Database`; nothing outlives `close`.

Its halves are plain dicts on purpose, written apart from the stored ones: the conformance suite
holds each against the other.
"""

from typing import Self

from .life import Life
from .memory_sessions import MemorySessions
from .memory_snapshots import MemorySnapshots
from .meta import check_meta
from .records import Sessions, Snapshots
from .verification import VerifyReport


class MemoryDatabase:
    """A store in RAM. Thread-safe; a context manager. `sessions`, `snapshots`, `notices` and
    `read_only` are those of a `Database`."""

    sessions: Sessions
    snapshots: Snapshots

    def __init__(self, *, read_only: bool = False, disk_budget_bytes: int | None = None) -> None:
        self.read_only = read_only
        self.notices: list[str] = []
        self._life = Life(read_only)
        self._meta: dict[str, bytes] = {}
        self.sessions = self._sessions = MemorySessions(self._life)
        self.snapshots = self._snapshots = MemorySnapshots(self._life, disk_budget_bytes)

    def get_meta(self, key: str) -> bytes | None:
        with self._life.read():
            return self._meta.get(check_meta(key))

    def set_meta(self, key: str, value: bytes) -> None:
        with self._life.write():
            self._meta[check_meta(key, value)] = bytes(value)

    def sizes(self) -> dict[str, int]:
        """Bytes that the states hold; sessions are not counted."""
        return {"sessions": 0, "states": self.snapshots.size_bytes()}

    def verify(self) -> VerifyReport:
        """What is there; RAM has no faults to find."""
        with self._life.read():
            counts = self._sessions.counts() | self._snapshots.counts()
            return VerifyReport(counts=counts)

    def compact(self) -> bool:
        """True: deleted values have left already."""
        with self._life.write():
            return True

    def close(self) -> None:
        """Forget everything. Closing twice is allowed."""
        with self._life.lock:
            self._life.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

# SPDX-License-Identifier: Apache-2.0
"""What is counted of experts, by all threads that have to do with them."""

from dataclasses import replace
from threading import Lock
from typing import Any

from ..reports import ExpertStats, Offload


class Tally:
    """Counts that only grow. Thread-safe."""

    def __init__(self, level: Offload) -> None:
        self._level: Offload = level
        self._counts: dict[str, Any] = {}  # by the names of the fields
        self._lock = Lock()

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def stats(self) -> ExpertStats:
        with self._lock:
            return replace(ExpertStats(self._level), **self._counts)

# SPDX-License-Identifier: Apache-2.0
"""Which stored states of pinned paths are protected from eviction, kept up as more is stored."""

import threading
from collections.abc import Callable, Sequence

from freetoken_storage.records import Snapshots

from .digest import Ids
from .prefix import shared_rows


class DiskPins:
    """Thread-safe. `targets` tells the digests to protect for a path, as far as it is stored."""

    def __init__(self, snapshots: Snapshots, targets: Callable[[Ids], list[bytes]]) -> None:
        self._snapshots = snapshots
        self._targets = targets
        self._lock = threading.Lock()
        self._paths: dict[str, list[Ids]] = {}

    def pin(self, owner: str, paths: Sequence[Ids]) -> None:
        """Protect what is stored of these paths, now and later, replacing `owner`'s earlier pins;
        no paths unpin."""
        with self._lock:
            if paths:
                self._paths[owner] = list(paths)
            else:
                self._paths.pop(owner, None)
        self._pin(owner, paths)

    def refresh(self, ids: Ids) -> None:
        """More of this path is stored: extend the pins that concern it."""
        with self._lock:
            owners = {
                owner: paths
                for owner, paths in self._paths.items()
                if any(shared_rows(path, ids) for path in paths)
            }
        for owner, paths in owners.items():
            self._pin(owner, paths)

    def _pin(self, owner: str, paths: Sequence[Ids]) -> None:
        self._snapshots.pin(owner, [digest for ids in paths for digest in self._targets(ids)])

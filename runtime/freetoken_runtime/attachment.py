# SPDX-License-Identifier: Apache-2.0
"""The store that an engine keeps its states in: taken up, written to, let go of."""

import threading

from freetoken_storage.errors import StoreMismatch

from .owner import Owner
from .state.disk import DiskStates
from .state.keeper import StateKeeper
from .state.lookup import History, Lookup
from .state.persist import Persister


class Attachment:
    """At most one store at a time. Thread-safe, but not for the owner thread. `lock` is held while
    the store changes; closing an engine holds it, too."""

    def __init__(self, owner: Owner, keeper: StateKeeper, lookup: Lookup, history: History) -> None:
        self._owner = owner
        self._keeper = keeper
        self._lookup = lookup
        self._history = history
        self.lock = threading.Lock()
        self.persister: Persister | None = None

    def take(self, disk: DiskStates, token_bytes: int) -> None:
        """Keep states there from now on, those in RAM included. StoreMismatch if another store is
        attached."""
        with self.lock:
            if self._lookup.disk is not None:
                if self._lookup.disk.snapshots is not disk.snapshots:
                    raise StoreMismatch(
                        "the model keeps its states in another store",
                        remedy="close that store first, or load the model again",
                    )
                return
            self._owner.check_open()
            persister = Persister(disk, self._history, token_bytes)
            self.persister = persister

            def start() -> None:
                self._keeper.writer = persister
                self._lookup.disk = disk
                self._keeper.persist_all()

            self._owner.call(start)

    def drop(self) -> None:
        """Write what waits and let go of the store, if there is one. The caller holds `lock`."""
        persister, self.persister = self.persister, None
        if persister is None:
            return

        def stop() -> None:
            self._keeper.persist_all()
            self._keeper.writer = None
            self._lookup.disk = None

        self._owner.call(stop)
        persister.close()
        self._owner.call(self._keeper.forget_persisted)

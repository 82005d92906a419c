# SPDX-License-Identifier: Apache-2.0
"""What the keeper of states asks of others: who counts memory, and who writes to the store."""

from collections.abc import Mapping
from typing import Protocol

from .anchors import Anchor
from .buffers import Meter
from .digest import Ids
from .prefix import Resident
from .spans import PathView


class Budget(Protocol):
    """What the keeper asks of `memory.MemoryBudget`."""

    anchors: Meter

    @property
    def anchor_limit_bytes(self) -> int: ...

    def missing(self, size_bytes: int) -> int: ...

    def lend(self, size_bytes: int, worth: float) -> bool: ...


class Writer(Protocol):
    """What the keeper asks of `persist.Persister`."""

    def enqueue(self, resident: Resident, view: PathView, anchors: Mapping[int, Anchor]) -> None:
        """Write the view's blocks, then the anchors, in the background."""

    def rest(self, decoding: bool) -> None:
        """Tokens are being decoded, or no longer."""

    def drain(self, resident: Resident | None = None) -> None:
        """Return when what was enqueued, for this resident or at all, is written or has failed."""

    def cancel(self, ids: Ids) -> None:
        """Drop queued paths that begin with `ids`; wait for one that is being written."""

# SPDX-License-Identifier: Apache-2.0
"""Which sequences look at which buffers: what is shared stays shared when a buffer moves."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from .buffers import KVBuffer, Pool

if TYPE_CHECKING:
    from .sequence import Sequence


class Spaces:
    """The buffers of an engine and which sequences look at them. Owner thread only."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.zeros = pool.layout.zeros()  # the overwritten buffers at the start of every path
        self._holders: WeakKeyDictionary[KVBuffer, WeakSet[Sequence]]
        self._holders = WeakKeyDictionary()

    def hold(self, buffer: KVBuffer, sequence: "Sequence") -> None:
        self._holders.setdefault(buffer, WeakSet()).add(sequence)

    def drop(self, buffer: KVBuffer, sequence: "Sequence") -> None:
        holders = self._holders.get(buffer)
        if holders is not None:
            holders.discard(sequence)

    def holders(self, buffer: KVBuffer) -> int:
        """How many sequences look at a buffer."""
        return len(self._holders.get(buffer, ()))

    def move(self, old: KVBuffer, capacity: int) -> KVBuffer:
        """Copy the used rows of `old` into a buffer of `capacity` rows and let every sequence look
        at the copy, so that what was shared stays shared. `old` is freed with its last view."""
        holders = list(self._holders.get(old, ()))
        assert all(holder.writes_to() is not old for holder in holders), "moved while written"
        used = self.used_rows(old)
        new = self.pool.allocate(max(capacity, used), old.origin)
        new.copy_rows(old, 0, used, at=new.claim(used))
        for sequence in holders:
            sequence.repoint(old, new)
        return new

    def bytes_for(self, rows: int) -> int:
        """Bytes of a new buffer with room for `rows` rows."""
        return self.pool.layout.capacity_bytes(self.pool.capacity_for(rows))

    def tighten(self, buffer: KVBuffer) -> None:
        """Copy the rows in use to a buffer of their size if they are less than half of this one."""
        used = self.used_rows(buffer)
        promised = max((holder.reserved for holder in self._holders.get(buffer, ())), default=0)
        if 0 < used and self.pool.capacity_for(used + promised) < buffer.capacity / 2:
            self.move(buffer, used)

    def used_rows(self, buffer: KVBuffer) -> int:
        """How many rows of the buffer a sequence looks at, at most."""
        holders = self._holders.get(buffer, ())
        return max((q.rows_of(buffer) for q in holders), default=0)

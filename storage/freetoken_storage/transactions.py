# SPDX-License-Identifier: Apache-2.0
"""What sessions and snapshots need of a database: ordered bytes under bytes, in transactions.

`database.py` implements it over LMDB; nothing else knows which database is below.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reader:
    """An open read transaction of some process, and the commit it sees."""

    pid: int
    commit: int


class Transaction(Protocol):
    """One transaction, used by one thread. Memoryviews point into the database and are valid until
    the transaction ends or writes; copy what outlives it."""

    def get(self, key: bytes) -> memoryview | None:
        """The value under `key`, or None."""

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Every (key, value) whose key starts with `prefix`, in key order. The transaction must
        not write while a scan runs."""

    def put(self, key: bytes, value: bytes) -> None:
        """Write `value` (at most 1 MiB) under `key`, replacing what was there."""

    def delete(self, key: bytes) -> bool:
        """Remove `key`; False if it was absent."""

    def pages_in_use(self) -> int:
        """Pages that hold data as this transaction sees it, free ones not counted."""


class Environment(Protocol):
    """One database file. Both contexts raise StoreClosed or StoreForked when misused."""

    @property
    def read_only(self) -> bool: ...

    @property
    def page_bytes(self) -> int: ...

    def read(self) -> AbstractContextManager[Transaction]:
        """A consistent view; it never blocks a writer and no writer blocks it."""

    def write(self) -> AbstractContextManager[Transaction]:
        """The one write transaction; commits when the block ends, aborts when it raises.
        StoreReadOnly, StoreFull."""

    def sync(self) -> None:
        """Return when everything committed so far would survive a power loss."""

    def reap_readers(self) -> None:
        """Forget readers of killed processes: they keep old pages from being reused."""

    def readers(self) -> list[Reader]:
        """The read transactions that are open now, in this process and in others."""

    def reusable_bytes(self, readers: Sequence[Reader]) -> int:
        """Bytes of free pages that the write transaction may use: pages stay as they are while a
        reader could still look at them. Inside a `write` block."""

    def room_bytes(self) -> int:
        """How much the file can still grow, as the disk and the process's limits allow."""

    def reserve(self, growth_bytes: int) -> None:
        """On a disk that is nearly full, have the blocks allocated that this much growth needs, and
        a few more, so that a later commit can still delete something. Inside a `write` block;
        StoreFull."""

    def file_bytes(self) -> int:
        """Bytes of the file that hold pages, free ones counted."""

# SPDX-License-Identifier: Apache-2.0
"""Whether an in-memory store is open and may be written."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import StoreClosed, StoreReadOnly


class Life:
    """Whether the store is open and writable; shared by its parts.

    Both contexts hold the one lock of the store."""

    def __init__(self, read_only: bool = False) -> None:
        self.read_only = read_only
        self.closed = False
        self.lock = threading.RLock()

    @contextmanager
    def read(self) -> Iterator[None]:
        with self.lock:
            if self.closed:
                raise StoreClosed("the store is closed", remedy="open it again")
            yield

    @contextmanager
    def write(self) -> Iterator[None]:
        with self.read():
            if self.read_only:
                raise StoreReadOnly("the store was opened for reading only")
            yield

# SPDX-License-Identifier: Apache-2.0
"""For tests and for stores that keep nothing: the in-memory store."""

from .memory import MemoryDatabase

__all__ = ["MemoryDatabase"]

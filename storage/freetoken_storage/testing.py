# SPDX-License-Identifier: Apache-2.0
"""For tests: the in-memory store, the checks every store must pass, and ways to hurt a store."""

from .faults import file_size_limit, flip_bytes, truncate
from .memory import MemoryDatabase
from .session_conformance import SESSION_CHECKS, AnyDatabase, Check, grow, refused
from .snapshot_conformance import (
    BUDGET_BYTES,
    BUDGET_CHECKS,
    SNAPSHOT_CHECKS,
    digest,
    present,
    read_back,
    snapshot,
)

__all__ = [
    "BUDGET_BYTES",
    "BUDGET_CHECKS",
    "SESSION_CHECKS",
    "SNAPSHOT_CHECKS",
    "AnyDatabase",
    "Check",
    "MemoryDatabase",
    "digest",
    "file_size_limit",
    "flip_bytes",
    "grow",
    "present",
    "read_back",
    "refused",
    "snapshot",
    "truncate",
]

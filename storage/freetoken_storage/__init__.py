# SPDX-License-Identifier: Apache-2.0
"""Bytes on disk: sessions and snapshots in LMDB. It knows no torch, no model and no KV."""

from .database import Database
from .memory import MemoryDatabase

__all__ = ["Database", "MemoryDatabase"]

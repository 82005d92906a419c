# SPDX-License-Identifier: Apache-2.0
"""Bytes on disk: sessions and snapshots in LMDB. It knows no torch, no model and no KV."""

from .database import Database
from .memory import MemoryDatabase
from .verification import Fault, VerifyReport, verify_store

__all__ = ["Database", "Fault", "MemoryDatabase", "VerifyReport", "verify_store"]

# SPDX-License-Identifier: Apache-2.0
"""How much of the disk the states may use. Sessions are never limited; they only take room away."""

import os
from dataclasses import dataclass
from pathlib import Path

from .transactions import Environment

# Pages of a file that was filled and emptied many times lie in runs that do not always fit, and the
# file grows although enough of it is free: up to 3 % of it in 12,000 random replacements, and up to
# 300 KiB where it holds only a few snapshots. This much of a budget stays unused, so that the file
# itself stays inside it.
FRAGMENTATION_SHARE = 16
FRAGMENTATION_BYTES = 512 << 10
# The states stop growing while this much of the disk is free, so that sessions can still commit.
RESERVE_BYTES = 64 << 20
RESERVE_SHARE = 10


@dataclass(frozen=True)
class Limit:
    """Bytes of pages that the states may have in use; `by_disk`: the disk, not the budget, says
    so."""

    size_bytes: int
    by_disk: bool


class DiskBudget:
    """The limit of the states, from the caller's budget and from the room on the disk."""

    def __init__(
        self, folder: Path, budget_bytes: int | None, sessions: Environment, states: Environment
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._sessions = sessions
        self._states = states

    def limit(self) -> Limit:
        """What holds now."""
        disk = os.statvfs(self._folder)
        reserve_bytes = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // RESERVE_SHARE)
        growth_bytes = max(0, disk.f_bavail * disk.f_frsize - reserve_bytes)
        disk_bytes = self._states.file_bytes() + growth_bytes
        if self._budget_bytes is None:
            return Limit(disk_bytes, by_disk=True)
        own_bytes = self._budget_bytes - self._sessions.file_bytes()
        own_bytes -= own_bytes // FRAGMENTATION_SHARE + FRAGMENTATION_BYTES
        return Limit(max(0, min(disk_bytes, own_bytes)), by_disk=disk_bytes < own_bytes)

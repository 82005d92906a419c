# SPDX-License-Identifier: Apache-2.0
"""How much of the disk the states may use. Sessions are never limited; they only take room away."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreFull
from .transactions import Environment, Reader

# Pages of a file that was filled and emptied many times lie in runs that do not always fit, and the
# file grows although enough of it is free: up to 3 % of it in 12,000 random replacements, and up to
# 300 KiB where it holds only a few snapshots. This much of a budget stays unused, so that the file
# itself stays inside it.
FRAGMENTATION_SHARE = 16
FRAGMENTATION_BYTES = 512 << 10
# The states stop growing while this much of the disk is free, so that sessions can still commit.
RESERVE_BYTES = 64 << 20
RESERVE_SHARE = 10
COMMIT_BYTES = 128 << 10  # what a commit writes besides its values, several times over


@dataclass(frozen=True)
class Limit:
    """Bytes of pages that the states may have in use; `by_disk`: the disk, not the budget, says
    so. `file_bytes`: how large their file may become, free pages counted."""

    size_bytes: int
    by_disk: bool
    file_bytes: int


class PagesHeld(StoreFull):
    """No room now, and evicting would make none: readers keep what is freed from being used."""


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
            return Limit(disk_bytes, by_disk=True, file_bytes=disk_bytes)
        file_bytes = self._budget_bytes - self._sessions.file_bytes()
        own_bytes = file_bytes - file_bytes // FRAGMENTATION_SHARE - FRAGMENTATION_BYTES
        return Limit(
            max(0, min(disk_bytes, own_bytes)),
            by_disk=disk_bytes < own_bytes,
            file_bytes=min(disk_bytes, file_bytes),
        )

    def check_readers(self, needed_bytes: int) -> None:
        """PagesHeld if a write of `needed_bytes`, and of the pages that every commit writes, would
        grow the file beyond its limit because of readers. Inside a `write` block.

        Pages that were free before the oldest reader began can be used; what is freed beside it
        cannot, so an eviction would only lose states."""
        limit_bytes = self.limit().file_bytes
        growth_bytes = needed_bytes + COMMIT_BYTES
        room_bytes = limit_bytes - self._states.file_bytes()
        if growth_bytes <= room_bytes:
            return
        self._states.reap_readers()
        readers = self._states.readers()
        if readers and growth_bytes > room_bytes + self._states.reusable_bytes(readers):
            raise PagesHeld(
                "no room for states: a reader is holding old pages, so that freed ones cannot be "
                "used again",
                value=f"{needed_bytes} bytes needed, {_described(readers)}",
                limit=f"{limit_bytes} bytes for the states' file",
                remedy="try again when the reader has finished, or raise the disk budget",
            )


def _described(readers: list[Reader]) -> str:
    """`3 readers: 2 in process 17, 1 in process 4"""
    counts = Counter(reader.pid for reader in readers)
    places = [
        f"{count} in {'this ' if pid == os.getpid() else ''}process {pid}"
        for pid, count in counts.items()
    ]
    return f"{len(readers)} reader{'s'[: len(readers) > 1]}: {', '.join(places)}"

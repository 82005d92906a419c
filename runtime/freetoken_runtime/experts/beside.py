# SPDX-License-Identifier: Apache-2.0
"""How long what was computed from where it lies kept those who compute."""

from .waiting import Lease


class Beside:
    """The experts of one layer that were computed in place: the rows of each, and its lease."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._leases: list[Lease] = []

    def add(self, rows: int, lease: Lease) -> None:
        self.rows.append(rows)
        self._leases.append(lease)

    def seconds(self) -> float:
        """In which any of it was being computed: experts that several threads compute at once
        count once."""
        total = until = 0.0
        for lease in sorted(self._leases, key=lambda lease: lease.lent_s):
            total += max(0.0, lease.back_s - max(until, lease.lent_s))
            until = max(until, lease.back_s)
        return total

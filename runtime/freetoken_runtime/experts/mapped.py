# SPDX-License-Identifier: Apache-2.0
"""Experts in the page cache: the records of converted weights, mapped into memory.

The cache takes nothing of the budget and gives way to whoever needs memory; what gave way is read
again, at a fifth of a disk's speed. A record's checksum is verified once, when it is first used.
"""

from ..ftw_weights import FtwFolder
from ..layers.expert import Expert
from .fetch import Disk
from .records import ExpertForm
from .tiers import RecordExperts


class MappedExperts(RecordExperts):
    """In another form than computes: converted on the way into a slot."""

    near = True

    def load(self, expert: int, memory: memoryview) -> int:
        name = f"{self._at}{expert}"
        self._convert(name, self._source.file.mapped(name), memory)
        return 0

    @property
    def scratch_bytes(self) -> int:
        return self.form.largest_bytes


class DirectExperts(MappedExperts):
    """In the form that computes (docs/decisions/0078-where-experts-are-computed.md)."""

    def __init__(self, form: ExpertForm, source: FtwFolder, at: str, disk: Disk) -> None:
        super().__init__(form, source, at, disk)
        self._seen: dict[int, Expert] = {}

    def seen(self, expert: int) -> bool:
        return expert in self._seen

    def in_place(self, expert: int) -> Expert:
        seen = self._seen.get(expert)
        if seen is None:
            record = self._source.file.mapped(f"{self._at}{expert}")
            seen = self._seen[expert] = self.form.expert(record)
        return seen

    @property
    def scratch_bytes(self) -> int:
        return 0

# SPDX-License-Identifier: Apache-2.0
"""What states in RAM are expected to save, in seconds per second of work, and which must stay.

    price         forwarding a path's own rows again; reading them back where a store has them
    likelihood    paths are used again soon or hardly ever: of all uses, one of the path that was
                  used n uses ago comes with a probability that falls as 1 / (n + 1)

times the uses per second, in the last minutes of work. Owner thread only.
"""

from collections.abc import Iterable, Sequence
from math import inf, log
from typing import Protocol
from weakref import WeakSet

from .anchors import AnchoredPath, retained
from .prefix import PrefixIndex, Resident
from .sequence import GROWTH_ROWS
from .spaces import Spaces

_HALF_S = 60.0  # of work, after which past uses count half
_PRIOR_S = 10.0  # one use in so many seconds, until there are more
_RESTORE_S_PER_BYTE = 1e-9  # until something was restored


class Speeds(Protocol):
    """What `rates.Rates` knows."""

    def predict(self, rows: int, start: int, *, many: bool, restored_bytes: int) -> float: ...


class Worth:
    """Of the paths in the index, and of those that nobody else sees."""

    def __init__(self, spaces: Spaces, index: PrefixIndex, speeds: Speeds) -> None:
        self._spaces = spaces
        self._index = index
        self._speeds = speeds
        self._uses, self._seconds = 1.0, _PRIOR_S
        self._used = 0  # uses so far
        self._worked_s = 0.0
        self._unseen: WeakSet[Resident] = WeakSet()

    def watched(self, resident: Resident) -> Resident:
        """The same; it counts as long as it lives, although it is not in the index."""
        self._unseen.add(resident)
        return resident

    def elapsed(self, worked_s: float) -> None:
        """So many seconds of work have gone by in all."""
        used = max((resident.last_used for resident in self._index), default=self._used)
        seconds = worked_s - self._worked_s
        keep = 0.5 ** (seconds / _HALF_S)
        self._uses = keep * self._uses + used - self._used
        self._seconds = keep * self._seconds + seconds
        self._used, self._worked_s = used, worked_s

    def idle(self) -> list[Resident]:
        """What may go."""
        return self._index.victims()

    def of(self, resident: Resident, *, stored: bool) -> tuple[int, float]:
        """Bytes that would be free without an idle path, and seconds per second that it saves.
        `stored`: a store will have it."""
        rows, size_bytes = self._own(resident)
        if stored:
            price_s = self._speeds.predict(0, 0, many=True, restored_bytes=size_bytes)
            price_s = max(price_s, size_bytes * _RESTORE_S_PER_BYTE)
        else:
            start = resident.sequence.length - rows
            price_s = self._speeds.predict(rows, start, many=True, restored_bytes=0)
        return size_bytes, price_s * self._uses_per_s(resident)

    def of_first(self, residents: Sequence[Resident], *, stored: bool) -> float:
        """What a byte of the first path saves; without end where there is none."""
        if not residents:
            return inf
        size_bytes, saved = self.of(residents[0], stored=stored)
        return saved / size_bytes

    def of_anchors(self, resident: Resident) -> float:
        """What a byte of a path's anchors saves, the next edit being as likely in one place as in
        another: without one of n anchors, every nth edit forwards half a gap more."""
        sequence = resident.sequence
        count = len(sequence.anchors)
        size_bytes = sum(anchor.size_bytes for anchor in sequence.anchors.values())
        if not size_bytes:
            return 0.0
        gap = sequence.length // count
        spared_s = self._speeds.predict(gap, sequence.length // 2, many=True, restored_bytes=0)
        return spared_s / 2 * self._uses_per_s(resident) / size_bytes

    def next_growth_bytes(self) -> int:
        """What the next turn of a path that runs, or of the one used last, allocates at most: it
        may have to copy the rows that it adds to."""
        residents = list(self._index)
        last = max((resident.last_used for resident in residents), default=0)
        near = [r for r in residents if r.running or r.last_used == last]
        sizes = [r.sequence.spans[-1].buffer.size_bytes for r in near if r.sequence.spans]
        return max(sizes, default=0) + self._spaces.bytes_for(GROWTH_ROWS)

    def protected_bytes(self) -> int:
        """What cannot go: rows of paths that run or are pinned, and of their anchors those that
        thinning leaves."""
        kept = [r for r in self._index if r.running or r.pinned_by]
        buffers = {
            id(span.buffer): span.buffer.size_bytes
            for resident in (*kept, *self._unseen)
            for span in resident.sequence.spans
        }
        return sum(buffers.values()) + self._anchor_bytes(kept)

    def _anchor_bytes(self, kept: Iterable[Resident]) -> int:
        paths = [
            AnchoredPath(r.sequence.anchors, r.sequence.length, lasting=bool(r.pinned_by))
            for r in kept
        ]
        places = [set(path.anchors) for path in paths]
        if self._spaces.pool.layout.fixed_bytes:
            places = retained(paths, 0)
        left = {
            id(anchor): anchor.size_bytes
            for path, positions in zip(paths, places, strict=True)
            for anchor in (path.anchors[p] for p in positions)
        }
        return sum(left.values())

    def _uses_per_s(self, resident: Resident) -> float:
        ago = max(0, self._used - resident.last_used)
        return self._uses / self._seconds / (1 + ago) / (1 + log(1 + len(self._index)))

    def _own(self, resident: Resident) -> tuple[int, int]:
        """Rows and bytes that are this path's alone."""
        sequence = resident.sequence
        own = [span for span in sequence.spans if self._spaces.holders(span.buffer) == 1]
        size_bytes = sum({id(s.buffer): s.buffer.size_bytes for s in own}.values())
        size_bytes += sum(anchor.size_bytes for anchor in sequence.anchors.values())
        return sum(span.rows for span in own), max(1, size_bytes)

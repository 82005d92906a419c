# SPDX-License-Identifier: Apache-2.0
"""Room to compute experts from where they lie, if their form there is not the one that computes.

take      by who serves; a few at a time
convert   by who computes with it, before it does: `Conversion`
put       by whoever is done
"""

from collections.abc import Callable
from threading import Lock

from freetoken_storage.weights_direct import AlignedBuffer

from ..layers.expert import Expert
from .records import ExpertForm

POISON = b"\xff"  # NaN in every floating dtype


class Scratch:
    """Room for one expert, which is in no slot."""

    def __init__(self, form: ExpertForm) -> None:
        self.memory = AlignedBuffer(form.layout.size_bytes).view
        self.expert: Expert = form.expert(self.memory)


class Scratches:
    """As many as `limit` of one form, made when they are first wanted. Thread-safe. `poison`: what
    was given back is NaN until it is written again; for tests."""

    def __init__(self, form: ExpertForm, limit: int) -> None:
        self.poison = False
        self._form = form
        self._unmade = limit
        self._free: list[Scratch] = []
        self._lock = Lock()

    def take(self) -> Scratch | None:
        """None while all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._unmade:
                return None
            self._unmade -= 1
        scratch = Scratch(self._form)
        self._spoil(scratch)
        return scratch

    def put(self, scratch: Scratch) -> None:
        self._spoil(scratch)
        with self._lock:
            self._free.append(scratch)

    def _spoil(self, scratch: Scratch) -> None:
        if self.poison:
            scratch.memory[:] = POISON * len(scratch.memory)


class Conversion:
    """Writes an expert into a scratch when it is first called. One thread at a time."""

    def __init__(self, load: Callable[[int, memoryview], int], expert: int, into: Scratch) -> None:
        self._load: Callable[[int, memoryview], int] | None = load
        self._expert = expert
        self._memory = into.memory

    def __call__(self) -> None:
        if self._load is not None:
            self._load(self._expert, self._memory)
            self._load = None

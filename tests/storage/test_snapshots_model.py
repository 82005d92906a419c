# SPDX-License-Identifier: Apache-2.0
"""Random programs of snapshot operations against a model: a list in order of use."""

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import StoreFull
from freetoken_storage.records import Snapshot
from freetoken_storage.testing import AnyDatabase, digest, read_back, snapshot

BUDGET_BYTES = 4 << 20  # of 7 MB that all labels hold together
LABELS = [f"n{i}" for i in range(14)]
FREEING_BYTES = 100_000  # that removing or pinning may add to the file beside an open reader
SIZES = (0, 70_000, 500_000, 900_000, 1_300_000)


def parent_of(label: str) -> str | None:
    """A fixed forest: n0 and n7 are roots, n1 … n6 and n8 … n13 hang in chains and forks."""
    index = LABELS.index(label)
    return None if index % 7 == 0 else LABELS[(index // 7) * 7 + (index % 7 - 1) // 2]


@cache
def made(label: str) -> Snapshot:
    size_bytes = SIZES[LABELS.index(label) % len(SIZES)]
    return snapshot(label, parent_of(label), size_bytes)


@dataclass(frozen=True)
class Op:
    kind: str
    labels: tuple[str, ...]
    owner: str


class Model:
    """`used`: labels that should be there, least recently used first."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.pins: dict[str, set[str]] = {}
        self.evicted = 0
        self.refused = 0

    def children(self, label: str) -> list[str]:
        return [other for other in self.used if parent_of(other) == label]

    def use(self, label: str) -> None:
        if label in self.used:
            self.used.remove(label)
            self.used.append(label)

    def victim(self, spared: set[str]) -> str | None:
        """Who goes next: the least recently used that has no child and no protection."""
        kept = spared.union(*self.pins.values())
        free = (x for x in self.used if x not in kept and not self.children(x))
        return next(free, None)

    def evict_down_to(self, present: set[str], spared: set[str]) -> None:
        """Evict in the one legal order until what is left is what the store still has."""
        while set(self.used) != present:
            gone = self.victim(spared)
            assert gone is not None, f"{set(self.used) - present} went, though protected"
            assert gone not in present, f"{gone} should have gone before {self.used}"
            self.used.remove(gone)
            self.evicted += 1

    def put(self, store: AnyDatabase, labels: Iterable[str]) -> None:
        new = list(dict.fromkeys(labels))
        spared = set(new)
        for label in new:
            above = parent_of(label)
            while above is not None and above in self.used:
                spared.add(above)
                above = parent_of(above)
        try:
            store.snapshots.put([made(label) for label in new])
        except StoreFull:
            assert stored_labels(store) == set(self.used), "a refused put changed something"
            self.refused += 1
            return
        known = [label for label in new if label in self.used]
        present = stored_labels(store)
        assert set(new) <= present
        self.evict_down_to(present - (set(new) - set(known)), spared)
        for label in new:
            if label in known:
                self.use(label)
            else:
                self.used.append(label)

    def remove(self, labels: Iterable[str]) -> int:
        gone: set[str] = set()
        pending = list(labels)
        while pending:
            label = pending.pop()
            if label not in gone:
                gone.add(label)
                pending += [
                    other for other in LABELS if parent_of(other) == label and other in self.used
                ]
        removed = [label for label in self.used if label in gone]
        self.used = [label for label in self.used if label not in gone]
        return len(removed)


def stored_labels(store: AnyDatabase) -> set[str]:
    return {label for label in LABELS if store.snapshots.contains(digest(label))}


ops = st.builds(
    Op,
    kind=st.sampled_from(
        ["put"] * 8
        + ["touch", "touch", "remove", "pin", "pin", "unpin", "unpin", "reopen", "hold", "release"]
    ),
    labels=st.lists(st.sampled_from(LABELS), min_size=1, max_size=4).map(tuple),
    owner=st.sampled_from(["one", "two"]),
)


def run_program(program: list[Op], store: AnyDatabase, folder: Path | None) -> None:
    model = Model()
    reader = ExitStack()  # beside an open reader nothing that is freed can be used again
    held, allowed_bytes = False, BUDGET_BYTES
    try:
        for op in program:
            digests = [digest(label) for label in op.labels]
            if op.kind in ("hold", "release", "reopen"):
                reader.close()
                held = op.kind == "hold"
            if op.kind == "hold":
                reader.enter_context(store.snapshots.reader())
            elif op.kind == "put":
                model.put(store, op.labels)
            elif op.kind == "touch":
                store.snapshots.touch(digests)
                for label in op.labels:
                    model.use(label)
            elif op.kind == "remove":
                assert store.snapshots.remove(digests) == model.remove(op.labels)
            elif op.kind == "pin":
                store.snapshots.pin(op.owner, digests)
                model.pins[op.owner] = set(op.labels)
            elif op.kind == "unpin":
                store.snapshots.pin(op.owner, [])
                model.pins.pop(op.owner, None)
            elif folder is not None:
                store.close()
                store = Database(folder, disk_budget_bytes=BUDGET_BYTES)
            if held and op.kind in ("remove", "pin", "unpin"):
                allowed_bytes += FREEING_BYTES  # they must not fail for want of room
            check(model, store, allowed_bytes)
    finally:
        reader.close()
        store.close()


def check(model: Model, store: AnyDatabase, allowed_bytes: int) -> None:
    assert stored_labels(store) == set(model.used)
    for label in model.used:
        assert store.snapshots.children(digest(label)) == sorted(
            digest(child) for child in model.children(label)
        )
    for label in model.used[:1] + model.used[-2:]:
        read_back(store, made(label))
    assert sum(store.sizes().values()) <= allowed_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ops, min_size=15, max_size=50))
def test_random_programs_stored(program: list[Op]) -> None:
    """Oracle: the list model; evictions may stop anywhere but must come in its order, and the files
    stay inside the budget."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        run_program(program, Database(path, disk_budget_bytes=BUDGET_BYTES), path)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ops, min_size=15, max_size=50))
def test_random_programs_in_memory(program: list[Op]) -> None:
    """Oracle: the same list model."""
    run_program(program, MemoryDatabase(disk_budget_bytes=BUDGET_BYTES), None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ops, min_size=20, max_size=120))
def test_many_random_programs_stored(program: list[Op]) -> None:
    """Oracle: the same, over longer programs, where a fragmented file could outgrow the budget."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        run_program(program, Database(path, disk_budget_bytes=BUDGET_BYTES), path)

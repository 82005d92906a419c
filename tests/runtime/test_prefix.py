# SPDX-License-Identifier: Apache-2.0
"""The index of paths in RAM and the routes found through it. Oracle: tuples compared one by one."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.state.anchors import Anchor
from freetoken_runtime.state.buffers import Pool, RowShape, StateLayout
from freetoken_runtime.state.digest import as_ids, fingerprint
from freetoken_runtime.state.lookup import MAX_REMEMBERED, History, Lookup
from freetoken_runtime.state.prefix import PrefixIndex, Resident, shared_rows
from freetoken_runtime.state.sequence import Sequence
from freetoken_runtime.state.spaces import Spaces

SPACES = Spaces(Pool(StateLayout([RowShape(1, 2, 2, torch.float32)])))
paths = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def resident(ids: list[int], anchors: tuple[int, ...] = ()) -> Resident:
    """A path in RAM with rows at these ends."""
    sequence = Sequence(SPACES)
    if ids:
        sequence.begin(len(ids))
        sequence.commit(ids)
    sequence.anchors = {position: Anchor(torch.zeros(2), ()) for position in anchors}
    return Resident(sequence)


@given(paths, paths)
def test_shared_rows_is_the_common_prefix(a: list[int], b: list[int]) -> None:
    """Against os.path.commonprefix."""
    assert shared_rows(as_ids(a), as_ids(b)) == len(os.path.commonprefix([a, b]))


@pytest.mark.parametrize("at", [0, 1, 255, 256, 257, 4095, 4096, 4097, 9999])
def test_shared_rows_of_long_paths(at: int) -> None:
    """The look at the first ids is widened until the difference is found."""
    a = np.arange(10000, dtype=np.int32)
    b = a.copy()
    b[at] = -1
    assert shared_rows(a, b) == at
    assert shared_rows(a, a[: at + 1]) == at + 1


@given(st.lists(st.tuples(paths, st.booleans()), max_size=6), paths)
def test_match_finds_the_longest_and_prefers_a_known_row(
    known: list[tuple[list[int], bool]], ids: list[int]
) -> None:
    """Against a loop over tuples."""
    index = PrefixIndex()
    for path, whole in known:
        index.add(resident(path, (len(path),) if whole else ()))
    shares = [len(os.path.commonprefix([path, ids])) for path, _ in known]
    best = max(shares, default=0)
    match = index.match(as_ids(ids))
    assert match.rows == best
    assert match.row_known == any(whole and path == ids for path, whole in known)
    assert match.goes_on == any(
        share == best and share < len(path) and share < len(ids)
        for share, (path, _) in zip(shares, known, strict=True)
    )
    assert match.usable == (best if match.row_known else min(best, len(ids) - 1))
    if best:
        assert match.deepest is not None
        found = match.deepest.sequence.ids.tolist()
        assert len(os.path.commonprefix([found, ids])) == best


def test_victims_are_idle_unpinned_on_disk_and_old_first() -> None:
    """The order in which paths give way."""
    index = PrefixIndex()
    names = {}
    for name, persisted in (("old", 0), ("stored", 3), ("stored2", 3), ("new", 0), ("run", 3)):
        entry = resident([1, 2, 3])
        entry.persisted_rows = persisted
        index.add(entry)
        names[id(entry)] = name
        if name == "run":
            entry.running = True
        if name == "stored":
            first_stored = entry
    pinned = resident([1])
    pinned.pinned_by.add("me")
    index.add(pinned)
    index.touch(first_stored)
    order = [names[id(entry)] for entry in index.victims()]
    assert order == ["stored2", "stored", "old", "new"]


def test_subsumed_paths() -> None:
    """Idle paths that another path begins with."""
    index = PrefixIndex()
    entries = [resident(ids) for ids in ([1, 2], [1, 2, 3], [1, 3], [1, 2, 3, 4])]
    for entry in entries:
        index.add(entry)
    assert index.subsumed_by(entries[1]) == [entries[0]]
    entries[0].running = True
    assert index.subsumed_by(entries[1]) == []


def test_history_is_bounded_and_forgets() -> None:
    """The oldest names go first; forgotten ones are gone."""
    history = History()
    history.remember(i.to_bytes(4, "big") for i in range(MAX_REMEMBERED + 5))
    assert (4).to_bytes(4, "big") not in history and (5).to_bytes(4, "big") in history
    history.forget([(5).to_bytes(4, "big"), b"unknown"])
    assert (5).to_bytes(4, "big") not in history


def test_a_plan_over_a_long_path_takes_milliseconds() -> None:
    """8,000 ids against fifty residents: the best of ten takes at most 5 ms."""
    index = PrefixIndex()
    base = np.random.default_rng(0).integers(0, 1000, 8000)
    for number in range(50):
        ids = base.copy()
        ids[7000 + number] = -1
        index.add(resident(ids.tolist()))
    lookup = Lookup(fingerprint({}).digest, index, History())
    path = as_ids(base.tolist())
    times = []
    for _ in range(10):
        started = time.perf_counter()
        route = lookup.route(path)
        times.append(time.perf_counter() - started)
    assert route.reused == 7049
    assert min(times) <= 0.005


def test_matching_while_another_thread_changes_the_index() -> None:
    """Readers never fail while paths come, grow and go."""
    index = PrefixIndex()
    stop = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        ids = as_ids([1, 2, 3] * 40)
        try:
            while not stop.is_set():
                assert 0 <= index.match(ids).rows <= len(ids)
        except BaseException as fault:  # noqa: BLE001 - reported below
            faults.append(fault)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        entry = resident([1, 2])
        index.add(entry)
        for _ in range(5):
            entry.sequence.begin(20)
            entry.sequence.commit([3, 1, 2, 3] * 5)
        entry.sequence.truncate(3)
        index.remove(entry)
        entry.sequence.close()
    stop.set()
    reader.join()
    assert faults == []

# SPDX-License-Identifier: Apache-2.0
"""Both stores pass one suite. Oracle: the expectations written in the suite itself."""

from pathlib import Path

import pytest

from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.testing import (
    BUDGET_BYTES,
    BUDGET_CHECKS,
    SESSION_CHECKS,
    SNAPSHOT_CHECKS,
    AnyDatabase,
    Check,
)

STORES = ("lmdb", "memory")


def make(kind: str, folder: Path, budget_bytes: int | None = None) -> AnyDatabase:
    if kind == "memory":
        return MemoryDatabase(disk_budget_bytes=budget_bytes)
    return Database(folder / "store", disk_budget_bytes=budget_bytes)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("check", SESSION_CHECKS + SNAPSHOT_CHECKS, ids=lambda c: c.__name__)
def test_conformance(kind: str, check: Check, tmp_path: Path) -> None:
    """Oracle: each check's own asserts, written from the contract in records.py."""
    with make(kind, tmp_path) as store:
        check(store)
        assert store.notices == []


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("check", BUDGET_CHECKS, ids=lambda c: c.__name__)
def test_conformance_under_a_budget(kind: str, check: Check, tmp_path: Path) -> None:
    """Oracle: as above; in addition the files never outgrow the budget."""
    with make(kind, tmp_path, BUDGET_BYTES) as store:
        check(store)
        assert sum(store.sizes().values()) <= BUDGET_BYTES
        assert store.verify().ok


@pytest.mark.parametrize("check", SESSION_CHECKS, ids=lambda c: c.__name__)
def test_what_a_check_left_reads_the_same_after_reopening(check: Check, tmp_path: Path) -> None:
    """Oracle: the handle that wrote it, before it was closed."""

    def everything(store: AnyDatabase) -> object:
        sessions = store.sessions
        return [
            (
                record,
                list(sessions.nodes(record.name)),
                list(sessions.all_segments(record.name)),
                [(branch, sessions.log(record.name, branch.name)) for branch in branches],
            )
            for record in sessions.list()
            for branches in [sessions.branches(record.name)]
        ]

    with make("lmdb", tmp_path) as store:
        check(store)
        before = everything(store)
    with make("lmdb", tmp_path) as store:
        assert everything(store) == before

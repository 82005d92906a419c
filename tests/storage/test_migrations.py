# SPDX-License-Identifier: Apache-2.0
"""Older formats become the current one, whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from freetoken_storage import Database, keys, migrations, values
from freetoken_storage.errors import StoreDamaged, StoreLocked, StoreNewer, StoreReadOnly
from freetoken_storage.migrations import Format
from freetoken_storage.testing import grow, read_back, snapshot
from freetoken_storage.transactions import Transaction


def double_bodies(txn: Transaction) -> None:
    """A synthetic step: in format 2 every session body is stored twice over."""
    for key in [key for key, _ in txn.scan(keys.BODY)]:
        body = values.load(txn, key, "a body")
        assert body is not None
        values.save(txn, key, body * 2)


def add_marker(txn: Transaction) -> None:
    """A synthetic step: format 3 keeps one more value."""
    values.save(txn, keys.meta(b"migrated"), b"yes")


def fail(txn: Transaction) -> None:
    double_bodies(txn)
    raise StoreDamaged("the step found something it does not understand")


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A closed store of format 1, which the tests declare to be old."""
    with Database(tmp_path / "store") as store:
        store.sessions.create("s", b"body")
        grow(store, "ab")
        store.snapshots.put([snapshot("x")])
    return tmp_path / "store"


def current(monkeypatch: pytest.MonkeyPatch, version: int, **steps: migrations.Step) -> None:
    """Make `version` the current format of the sessions."""
    form = Format(
        migrations.SESSIONS.name,
        version,
        {int(name.removeprefix("from_")): step for name, step in steps.items()},
    )
    monkeypatch.setattr("freetoken_storage.database.SESSIONS", form)


def test_two_steps(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the steps do to what was stored; the second opening migrates nothing; the
    unchanged program refuses the result as newer."""
    with monkeypatch.context() as patch:
        current(patch, 3, from_1=double_bodies, from_2=add_marker)
        for _ in range(2):
            with Database(old_store) as store:
                assert store.sessions.get("s").body == b"bodybody"
                assert store.get_meta("migrated") == b"yes"
                assert len(store.sessions.path("s", 2)) == 2
                read_back(store, snapshot("x"))
    with pytest.raises(StoreNewer, match="format 3"):
        Database(old_store)


def test_a_failing_step_changes_nothing(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the stored format before; steps that succeeded stay, the failed one left no trace."""
    with monkeypatch.context() as patch:
        current(patch, 3, from_1=add_marker, from_2=fail)
        with pytest.raises(StoreDamaged, match="does not understand"):
            Database(old_store)
    with monkeypatch.context() as patch:
        current(patch, 2, from_1=fail)  # it is at 2 by now: the step does not run
        with Database(old_store) as store:
            assert store.sessions.get("s").body == b"body"
            assert store.get_meta("migrated") == b"yes"


def test_migrating_needs_a_writer_that_is_alone(
    old_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error's type; the store stays in its format."""
    current(monkeypatch, 2, from_1=double_bodies)
    with pytest.raises(StoreReadOnly, match="migrated first"):
        Database(old_store, read_only=True)
    script = (
        "import sys; from freetoken_storage import Database\n"
        "with Database(sys.argv[1]): print('open', flush=True); sys.stdin.readline()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(old_store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    with pytest.raises(StoreLocked, match="another process"):
        Database(old_store)
    child.communicate("\n", timeout=30)
    with Database(old_store) as store:
        assert store.sessions.get("s").body == b"bodybody"


def test_formats_have_every_step() -> None:
    """Oracle: the rule that any version from 1 on can be opened."""
    with pytest.raises(AssertionError, match="steps"):
        Format("x", 3, {1: add_marker})
    for form in (migrations.SESSIONS, migrations.STATES):
        assert set(form.steps) == set(range(1, form.version))

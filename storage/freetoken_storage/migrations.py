# SPDX-License-Identifier: Apache-2.0
"""Format versions of the two databases, and how an older one becomes the current one.

The value under keys.FORMAT is (name, version). Each step of `Format.steps` takes a database from
its version to the next, inside the transaction that also writes the new version number: a crash
leaves the old version, whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import keys, values
from .errors import StoreDamaged, StoreLocked, StoreNewer, StoreReadOnly
from .transactions import Environment, Transaction

Step = Callable[[Transaction], None]


@dataclass(frozen=True)
class Format:
    """What a database must be: `steps[v]` migrates from version v to v + 1."""

    name: str
    version: int
    steps: Mapping[int, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected = set(range(1, self.version))
        assert set(self.steps) == expected, f"{self.name}: steps {set(self.steps)} of {expected}"


SESSIONS = Format("freetoken sessions", 1)
STATES = Format("freetoken states", 1)


def stored_version(environment: Environment, form: Format) -> int | None:
    """The version found, or None in an empty database. StoreDamaged if it is not ours, StoreNewer
    if a newer program wrote it."""
    what = f"the format record of {form.name!r}"
    with environment.read() as txn:
        payload = values.load(txn, keys.FORMAT, what)
        if payload is None:
            if next(iter(txn.scan(b"")), None) is not None:
                raise StoreDamaged(
                    "the database holds something else", limit=f"expected {form.name!r}"
                )
            return None
    name, version = values.unpack(payload, 2, what)
    if name != form.name:
        raise StoreDamaged("the database is of another kind", value=name, limit=form.name)
    if version > form.version:
        raise StoreNewer(
            f"{form.name!r} was written by a newer program",
            value=f"format {version}",
            limit=f"format {form.version}",
            remedy="update freetoken-agent",
        )
    found: int = version
    return found


def upgrade(environment: Environment, form: Format, *, alone: bool) -> None:
    """Bring a database to the current format. `alone`: no other process has the store open."""
    version = stored_version(environment, form)
    if version == form.version:
        return
    if environment.read_only:
        raise StoreReadOnly(
            f"{form.name!r} must be migrated first",
            value=f"format {version}",
            limit=f"format {form.version}",
            remedy="open the store once for writing",
        )
    if version is not None and not alone:
        raise StoreLocked(
            f"{form.name!r} must be migrated, and another process has the store open",
            value=f"format {version}",
            remedy="close the other process",
        )
    if version is None:
        with environment.write() as txn:
            _write_version(txn, form, form.version)
        return
    for old in range(version, form.version):
        with environment.write() as txn:
            form.steps[old](txn)
            _write_version(txn, form, old + 1)


def _write_version(txn: Transaction, form: Format, version: int) -> None:
    values.save(txn, keys.FORMAT, values.pack(form.name, version))

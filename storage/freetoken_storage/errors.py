# SPDX-License-Identifier: Apache-2.0
"""The root of every error of the project, and the errors of the storage layer.

FreetokenError
└── StorageError
    ├── StoreFull            a disk or budget limit was reached; nothing was lost
    ├── StoreLocked          another process holds the store exclusively
    ├── StoreAlreadyOpen     this process has the store open
    ├── StoreForked          the handle was inherited through fork()
    ├── StoreReadOnly        a write on a store or folder that cannot be written
    ├── StoreClosed          the handle was closed
    ├── StoreNewer           written by a newer format
    ├── StoreDamaged         truncated, foreign or altered bytes
    ├── StoreMismatch        the store belongs to another model
    ├── GgufDamaged          no whole GGUF file (defined in `gguf`)
    ├── WriteFailed          the disk refused a write for another reason than space
    ├── InvalidName          a session or branch name that cannot be a key
    ├── InvalidRecord        a record that would not fit the store, or an unknown node
    ├── SessionExists / SessionNotFound / BranchExists / BranchNotFound
    └── SessionConflict      the branch moved since this handle read it
"""

from typing import ClassVar


class FreetokenError(Exception):
    """What went wrong, the offending value, the limit it broke and the remedy, in one message.

    `code` is stable across releases; messages are for people. They are made of `what`, `value`,
    `limit` and `remedy`, each None where there is none.
    """

    code: ClassVar[str] = "freetoken_error"

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        limit: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.value = value
        self.limit = limit
        self.remedy = remedy
        parts = [what]
        if value is not None:
            parts.append(f"got {value!r}")
        if limit is not None:
            parts.append(f"limit: {limit}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class StorageError(FreetokenError):
    """Any fault of the storage layer."""

    code = "storage_error"


class StoreFull(StorageError):
    """No room on the disk or in the budget. The store keeps what it had acknowledged."""

    code = "store_full"


class StoreLocked(StorageError):
    """Another process holds the store exclusively."""

    code = "store_locked"


class StoreAlreadyOpen(StorageError):
    """This process already has the store open; LMDB allows one handle per process."""

    code = "store_already_open"


class StoreForked(StorageError):
    """The handle came through fork(); LMDB handles must be opened by the process using them."""

    code = "store_forked"


class StoreReadOnly(StorageError):
    """A write on a store that was opened, or can only be opened, for reading."""

    code = "store_read_only"


class StoreClosed(StorageError):
    """The handle was closed."""

    code = "store_closed"


class StoreNewer(StorageError):
    """The store was written by a newer format than this program knows."""

    code = "store_newer"


class StoreDamaged(StorageError):
    """Stored bytes are truncated, foreign or altered. They were not used."""

    code = "store_damaged"


class StoreMismatch(StorageError):
    """The store is attached to a different model."""

    code = "store_mismatch"


class InvalidName(StorageError):
    """A name that cannot be a key: empty, longer than 128 bytes, or with control characters."""

    code = "invalid_name"


class WriteFailed(StorageError):
    """The disk refused a write, and not for lack of space. What had been acknowledged is kept."""

    code = "write_failed"


class InvalidRecord(StorageError):
    """A record that contradicts what is stored (an unknown parent, a taken segment id) or that
    breaks a limit of the format. Nothing was written."""

    code = "invalid_record"


class SessionExists(StorageError):
    """A session of that name exists."""

    code = "session_exists"


class SessionNotFound(StorageError):
    """No session of that name."""

    code = "session_not_found"


class BranchExists(StorageError):
    """A branch of that name exists in the session."""

    code = "branch_exists"


class BranchNotFound(StorageError):
    """No branch of that name in the session."""

    code = "branch_not_found"


class SessionConflict(StorageError):
    """The branch was moved by another handle; `reload()` and repeat the edit."""

    code = "session_conflict"

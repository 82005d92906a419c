# SPDX-License-Identifier: Apache-2.0
"""Paths that can be none, and the operating system's errors, as ours."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import StorageError, StoreFull, StoreReadOnly

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
SHOWN_CHARACTERS = 300  # of a path


def store_path(path: str | os.PathLike[str]) -> Path:
    """The path of a store's folder, if it can be one. Looks at nothing on the disk; StorageError.

    `Path("")` is the current folder: an empty string is more likely a setting that was never made.
    """
    text = os.fspath(path)
    if not text:
        raise StorageError(
            "the path of the store is empty",
            value=text,
            remedy='name a folder; "." is the current one',
        )
    try:
        unusable = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        unusable = True
    if unusable:
        raise StorageError(
            "the path of the store has characters that no path can have",
            value=shown(text),
            remedy="name a folder",
        )
    return Path(path)


def shown(path: str) -> str:
    """A path as messages show it."""
    return path if len(path) <= SHOWN_CHARACTERS else path[:SHOWN_CHARACTERS] + "…"


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise OSError as StoreFull, StoreReadOnly or StorageError, naming the file."""
    try:
        yield
    except OSError as error:
        what = f"the store's folder cannot be used: {error.strerror}"
        value = shown(str(error.filename or folder))
        if error.errno in NO_ROOM:
            raise StoreFull(what, value=value, remedy="free disk space") from error
        if error.errno in NOT_ALLOWED:
            raise StoreReadOnly(
                what,
                value=value,
                remedy="change its permissions, or open it with read_only=True if it can be read",
            ) from error
        raise StorageError(
            what, value=value, remedy="check each part of the path, and the disk"
        ) from error

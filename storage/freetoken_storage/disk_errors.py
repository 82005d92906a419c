# SPDX-License-Identifier: Apache-2.0
"""The operating system's errors as ours."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import StorageError, StoreFull, StoreReadOnly

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise OSError as StoreFull, StoreReadOnly or StorageError, naming the file."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror}"
        if error.errno in NO_ROOM:
            raise StoreFull(what, remedy="free disk space") from error
        if error.errno in NOT_ALLOWED:
            raise StoreReadOnly(
                what, remedy="open it with read_only=True, or change its permissions"
            ) from error
        raise StorageError(what, remedy="check the folder") from error

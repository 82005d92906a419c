# SPDX-License-Identifier: Apache-2.0
"""Ways to hurt a store, for tests of whoever builds on it. Each works on closed files, except
`file_size_limit`."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLIPPED = 0x55


def flip_bytes(path: Path, fraction: float, count: int = 1) -> int:
    """Alter `count` bytes from `fraction` (0 to 1) of a file on; returns the first offset."""
    size_bytes = path.stat().st_size
    offset = min(int(size_bytes * fraction), size_bytes - count)
    with path.open("r+b") as file:
        file.seek(offset)
        altered = bytes(byte ^ FLIPPED for byte in file.read(count))
        file.seek(offset)
        file.write(altered)
    return offset


def truncate(path: Path, fraction: float) -> int:
    """Cut a file to `fraction` of its length; returns the new length."""
    size_bytes = int(path.stat().st_size * fraction)
    os.truncate(path, size_bytes)
    return size_bytes


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size_bytes`, as if the disk were full. It holds for
    the whole process, so keep the block short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

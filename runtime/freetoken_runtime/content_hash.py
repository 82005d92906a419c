# SPDX-License-Identifier: Apache-2.0
"""Content hash of weight files, remembered per file as long as the file is untouched.

The memory is a JSON file of {"device:inode:size:mtime_ns:ctime_ns": hex}. It is a convenience: if
it cannot be read or written, files are hashed again.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_MAX_ENTRIES = 1000
_HEX = re.compile(r"[0-9a-f]{64}")


def content_hash(files: Sequence[Path], cache: Path | None = None) -> str:
    """SHA-256 over the digests of the files, in the order of their names. `cache`: where file
    digests are remembered (its folder is made); None hashes every time."""
    known = _read(cache)
    digests = {}
    for file in sorted(files, key=lambda path: path.name):
        key = _identity(file)
        digest = known.get(key) or _hash_file(file)
        if _identity(file) == key:  # unchanged while it was read
            known[key] = digest
        digests[key] = digest
    if cache is not None and _read(cache) != known:
        _write(cache, known)
    return hashlib.sha256("\n".join(digests.values()).encode()).hexdigest()


def _identity(file: Path) -> str:
    status = file.stat()
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(str(part) for part in parts)


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _read(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return {}
    try:
        stored = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {k: v for k, v in stored.items() if isinstance(v, str) and _HEX.fullmatch(v)}


def _write(cache: Path, known: Mapping[str, str]) -> None:
    newest = dict(list(known.items())[-_MAX_ENTRIES:])
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a read-only home is no reason not to load
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(newest), encoding="utf-8")
        temporary.replace(cache)

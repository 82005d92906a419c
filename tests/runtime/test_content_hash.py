# SPDX-License-Identifier: Apache-2.0
"""The content hash and its memory."""

import hashlib
import os
from pathlib import Path

import pytest

from freetoken_runtime import content_hash as module
from freetoken_runtime.content_hash import content_hash


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in (("b.bin", b"second" * 1000), ("a.bin", b"first")):
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def test_the_hash_is_of_the_bytes_in_order_of_names(files: list[Path]) -> None:
    """Oracle: hashlib over whole files."""
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    expected = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    assert content_hash(files) == content_hash(files[::-1]) == expected


def test_c40_one_changed_byte_changes_the_hash_despite_a_memory(
    files: list[Path], tmp_path: Path
) -> None:
    """Oracle: the hash without memory; same size and, as far as can be forged, same mtime."""
    cache = tmp_path / "cache" / "hashes.json"
    before = content_hash(files, cache)
    status = files[1].stat()
    data = bytearray(files[1].read_bytes())
    data[100] ^= 1
    files[1].write_bytes(data)
    os.utime(files[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = content_hash(files, cache)
    assert after != before and after == content_hash(files)


def test_an_untouched_file_is_not_read_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a count of file hashes; a touched file is read again."""
    cache = tmp_path / "hashes.json"
    hashed: list[str] = []
    original = module._hash_file

    def counting(file: Path) -> str:
        hashed.append(file.name)
        return original(file)

    monkeypatch.setattr(module, "_hash_file", counting)
    first = content_hash(files, cache)
    assert content_hash(files, cache) == first and hashed == ["a.bin", "b.bin"]
    os.utime(files[0])
    assert content_hash(files, cache) == first and hashed == ["a.bin", "b.bin", "a.bin"]
    replaced = files[1].read_bytes()
    files[1].unlink()
    files[1].write_bytes(replaced)  # another inode
    assert content_hash(files, cache) == first and hashed[3:] == ["b.bin"]


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff\xfe", b'{"x": 3, "y": "short"}'])
def test_a_damaged_memory_is_no_harm(files: list[Path], tmp_path: Path, content: bytes) -> None:
    """Oracle: the hash without memory; the memory is good again afterwards."""
    cache = tmp_path / "hashes.json"
    cache.write_bytes(content)
    assert content_hash(files, cache) == content_hash(files)
    assert len(module._read(cache)) == 2


def test_a_memory_that_cannot_be_written_is_no_harm(files: list[Path], tmp_path: Path) -> None:
    """Oracle: the hash without memory."""
    (tmp_path / "blocked").write_text("a file where a folder should be")
    assert content_hash(files, tmp_path / "blocked" / "hashes.json") == content_hash(files)


def test_the_memory_stays_small(files: list[Path], tmp_path: Path) -> None:
    """Oracle: the cap, and the newest entries in it."""
    cache = tmp_path / "hashes.json"
    module._write(cache, {f"0:0:0:0:{index}": "0" * 64 for index in range(3000)})
    content_hash(files, cache)
    known = module._read(cache)
    assert len(known) == module._MAX_ENTRIES
    assert all(module._identity(file) in known for file in files)

# SPDX-License-Identifier: Apache-2.0
"""LMDB's file layout, read with plain reads: no page of a file that does not hold what its header
promises may ever be touched through a memory map, where the answer is SIGBUS.

Both first pages are headers ("meta pages"), the one with the higher transaction number counts:

    page header 16                          meta, from byte 16
    pgno:8 pad:2 flags:2 lower:2 upper:2    magic:4 version:4 address:8 map size:8
                                            free list tree:48  main tree:48  last page:8  txn id:8
    a tree                                  page size or pad:4 flags:2 depth:2 branch pages:8
                                            leaf pages:8 overflow pages:8 entries:8 root:8
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreDamaged

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
NO_PAGE = 2**64 - 1

_PAGE = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_META = struct.Struct(f"<IIQQ{_TREE.size}s{_TREE.size}sQQ")
FLAG_META = 0x08


@dataclass(frozen=True)
class Tree:
    """One B+ tree as its header describes it."""

    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True)
class Header:
    """The newer of the two meta pages."""

    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txn_id: int

    @property
    def file_bytes(self) -> int:
        """How long the file must be at least."""
        return (self.last_page + 1) * self.page_bytes


def read_header(path: Path) -> Header:
    """Read and check the header of a database file. StoreDamaged names the file."""
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        first = file.read(_PAGE.size + _META.size)
        page_bytes = _page_bytes(path, first, file_bytes)
        file.seek(page_bytes)
        second = file.read(_PAGE.size + _META.size)
    headers = [_parse(path, page, page_bytes) for page in (first, second)]
    header = max(headers, key=lambda found: found.txn_id)
    if header.file_bytes > file_bytes:
        raise StoreDamaged(
            f"{path} is truncated",
            value=f"{file_bytes} bytes",
            limit=f"its header promises {header.file_bytes} bytes",
        )
    return header


def _page_bytes(path: Path, first: bytes, file_bytes: int) -> int:
    if len(first) < _PAGE.size + _META.size:
        raise StoreDamaged(f"{path} is too short to be a database", value=f"{file_bytes} bytes")
    page_bytes: int = _TREE.unpack(_META.unpack_from(first, _PAGE.size)[4])[0]
    if page_bytes not in (1 << exponent for exponent in range(9, 17)):
        raise StoreDamaged(f"{path} is not a database", value=f"page size {page_bytes}")
    if file_bytes < 2 * page_bytes:
        raise StoreDamaged(f"{path} is truncated", value=f"{file_bytes} bytes")
    return page_bytes


def _parse(path: Path, page: bytes, page_bytes: int) -> Header:
    _, _, flags, _, _ = _PAGE.unpack_from(page)
    magic, version, _, _, free, main, last_page, txn_id = _META.unpack_from(page, _PAGE.size)
    if magic != MAGIC or not flags & FLAG_META:
        raise StoreDamaged(f"{path} is not a database", value=f"magic {magic:#x}")
    if version != DATA_VERSION:
        raise StoreDamaged(f"{path} is of another LMDB version", value=version, limit=DATA_VERSION)
    return Header(page_bytes, _parse_tree(free), _parse_tree(main), last_page, txn_id)


def _parse_tree(raw: bytes) -> Tree:
    _, _, depth, branch, leaf, overflow, entries, root = _TREE.unpack(raw)
    return Tree(depth, branch, leaf, overflow, entries, root)

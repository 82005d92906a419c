# SPDX-License-Identifier: Apache-2.0
"""LMDB's file header, read with plain reads: no page of a file that does not hold what its header
promises may ever be touched through a memory map, where the answer is SIGBUS.

Both first pages are headers ("meta pages"); a commit writes the page of its number's parity, so the
two numbers are neighbours and the higher one counts:

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
FIRST_PAGE = 2  # the first that is no meta page

PAGE = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_META = struct.Struct(f"<IIQQ{_TREE.size}s{_TREE.size}sQQ")
_META_END = PAGE.size + _META.size
FLAG_META = 0x08
FREE_TREE_FLAGS = 0x08  # integer keys
MAIN_TREE_FLAGS = 0x00


@dataclass(frozen=True)
class Tree:
    """One B+ tree as its header describes it."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True)
class Header:
    """A meta page."""

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
    """The newest header of a database file, checked. StoreDamaged names the file."""
    return max(_read_headers(path), key=lambda header: header.txn_id)


def read_header_of(path: Path, txn_id: int) -> Header | None:
    """The header that commit `txn_id` wrote; None if two later commits have replaced it."""
    return next((header for header in _read_headers(path) if header.txn_id == txn_id), None)


def _read_headers(path: Path) -> list[Header]:
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        first = file.read(_META_END)
        page_bytes = _page_bytes(path, first, file_bytes)
        file.seek(page_bytes)
        second = file.read(_META_END)
    headers = [_parse(path, index, page, page_bytes) for index, page in enumerate((first, second))]
    numbers = [header.txn_id for header in headers]
    if numbers != [0, 0] and (abs(numbers[0] - numbers[1]) != 1 or numbers[0] % 2):
        raise StoreDamaged(f"{path} has contradicting headers", value=f"commits {numbers}")
    newest = max(headers, key=lambda header: header.txn_id)
    if newest.file_bytes > file_bytes:
        raise StoreDamaged(
            f"{path} is truncated",
            value=f"{file_bytes} bytes",
            limit=f"its header promises {newest.file_bytes} bytes",
        )
    return headers


def _page_bytes(path: Path, first: bytes, file_bytes: int) -> int:
    if len(first) < _META_END:
        raise StoreDamaged(f"{path} is too short to be a database", value=f"{file_bytes} bytes")
    page_bytes: int = _TREE.unpack(_META.unpack_from(first, PAGE.size)[4])[0]
    if page_bytes not in (1 << exponent for exponent in range(9, 17)):
        raise StoreDamaged(f"{path} is not a database", value=f"page size {page_bytes}")
    if file_bytes < FIRST_PAGE * page_bytes:
        raise StoreDamaged(f"{path} is truncated", value=f"{file_bytes} bytes")
    return page_bytes


def _parse(path: Path, number: int, page: bytes, page_bytes: int) -> Header:
    page_number, _, flags, _, _ = PAGE.unpack_from(page)
    magic, version, _, _, free, main, last_page, txn_id = _META.unpack_from(page, PAGE.size)
    if (magic, flags, page_number) != (MAGIC, FLAG_META, number):
        raise StoreDamaged(f"{path} is not a database", value=f"magic {magic:#x}")
    if version != DATA_VERSION:
        raise StoreDamaged(f"{path} is of another LMDB version", value=version, limit=DATA_VERSION)
    header = Header(page_bytes, _parse_tree(free), _parse_tree(main), last_page, txn_id)
    for tree in (header.free, header.main):
        if tree.branch_pages + tree.leaf_pages + tree.overflow_pages > last_page + 1:
            raise StoreDamaged(f"{path} has a tree of more pages than it has", value=last_page + 1)
    if (header.free.flags, header.main.flags) != (FREE_TREE_FLAGS, MAIN_TREE_FLAGS):
        raise StoreDamaged(f"{path} has trees of a foreign kind", value=hex(header.main.flags))
    return header


def _parse_tree(raw: bytes) -> Tree:
    return Tree(*_TREE.unpack(raw)[1:])

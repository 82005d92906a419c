# SPDX-License-Identifier: Apache-2.0
"""Is every page where the header and its parent say it is? Read with plain reads, so that a damaged
file is an answer and not a crash: LMDB trusts its pages and would follow a flipped offset anywhere.

    page header 16   pgno:8 pad:2 flags:2 lower:2 upper:2    overflow: pages:4 instead of the last
    offsets          2 bytes for each node, from byte 16 up to `lower`, in key order
    node             lo:2 hi:2 flags:2 key size:2, key, data, at an even offset in [upper, page end)
      leaf           data size lo | hi << 16; with flag BIG the data is the number of the first of
                     the overflow pages that hold it after one page header
      branch         child page lo | hi << 16 | flags << 32; the first key of a page is not used

The values themselves carry checksums (values.py) and are not looked at here.
"""

import os
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .errors import StoreDamaged
from .pages import FIRST_PAGE, NO_PAGE, PAGE, Header, Tree

# An opening audits no more than this: about 2 s, 200 MiB of keys and short values. What is beyond
# is left to `verify`.
MAX_TREE_PAGES = 50_000
MAX_OVERFLOW_HEADERS = 10_000

FLAG_BRANCH = 0x01
FLAG_LEAF = 0x02
FLAG_OVERFLOW = 0x04
NODE_BIG = 0x01

_NODE = struct.Struct("<HHHH")
_OVERFLOW = struct.Struct("<QHHI")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class Limits:
    """How many pages of trees, and how many first pages of long values, an audit reads."""

    tree_pages: int
    overflow_headers: int


AT_OPENING = Limits(MAX_TREE_PAGES, MAX_OVERFLOW_HEADERS)
EVERYTHING = Limits(2**63, 2**63)


class _LimitReached(Exception):
    """Enough was read."""


@dataclass(frozen=True)
class LeafNode:
    """A key with its data, inline or on overflow pages."""

    key: bytes
    data: bytes
    size_bytes: int
    overflow_page: int | None


class PageAudit:
    """One pass over the trees of a file."""

    def __init__(self, path: Path, header: Header, limits: Limits) -> None:
        self._path = path
        self._header = header
        self._limits = limits
        self._claimed = bytearray(header.last_page + 1)
        self._tree_pages = 0
        self._overflow_headers = 0
        self._file = -1

    def run(self) -> bool:
        """Whether everything was read. StoreDamaged names the first page that contradicts
        another."""
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._claim(0, FIRST_PAGE, "the header")
            for _ in self._walk(self._header.main, "main", _as_bytes):
                pass
            for node in self._walk(self._header.free, "free list", _as_number):
                self._claim_free(node)
        except _LimitReached:
            return False
        finally:
            os.close(self._file)
        return True

    def free_pages(self, before: int) -> int:
        """How many pages the commits with lower numbers than `before` freed, and no later one
        took. Nobody may write meanwhile. StoreDamaged."""
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return sum(
                self._free_count(node)
                for node in self._walk(self._header.free, "free list", _as_number)
                if _NUMBER.unpack(node.key)[0] < before
            )
        finally:
            os.close(self._file)

    def _free_count(self, node: LeafNode) -> int:
        data = node.data
        if node.overflow_page is not None:
            data = self._read(node.overflow_page)[PAGE.size :]
        count: int = _NUMBER.unpack_from(data)[0]
        return count

    def _fault(self, what: str, page: int) -> StoreDamaged:
        return StoreDamaged(f"{self._path}: {what}", value=f"page {page}")

    def _read(self, page: int, count: int = 1) -> bytes:
        size_bytes = self._header.page_bytes
        data = os.pread(self._file, count * size_bytes, page * size_bytes)
        if len(data) != count * size_bytes:
            raise self._fault("the file ends inside a page", page)
        return data

    def _claim(self, first: int, count: int, what: str) -> None:
        end = first + count
        if count < 1 or end > len(self._claimed):
            raise self._fault(f"{what} lies outside the file", first)
        if self._claimed.count(1, first, end):
            raise self._fault(f"{what} lies where something else is", first)
        self._claimed[first:end] = b"\x01" * count

    def _walk(self, tree: Tree, name: str, order: Callable[[bytes], bytes]) -> Iterator[LeafNode]:
        """Every leaf node of a tree, its pages checked and claimed, its counts compared."""
        if (tree.root == NO_PAGE) != (tree.depth == 0) or (tree.depth == 0) != (tree.entries == 0):
            raise self._fault(f"the root of the {name} tree contradicts its size", tree.root)
        branch_pages = leaf_pages = overflow_pages = entries = 0
        pending: list[tuple[int, int, bytes | None, bytes | None]] = []
        if tree.depth:
            pending.append((tree.root, tree.depth, None, None))
        while pending:
            number, depth, low, high = pending.pop()
            self._tree_pages += 1
            if self._tree_pages > self._limits.tree_pages:
                raise _LimitReached
            self._claim(number, 1, f"a page of the {name} tree")
            page = self._read(number)
            offsets = self._offsets(page, number, FLAG_LEAF if depth == 1 else FLAG_BRANCH)
            if depth > 1:
                branch_pages += 1
                pending += self._children(page, number, offsets, depth, (low, high), order)
                continue
            leaf_pages += 1
            entries += len(offsets)
            nodes = [self._leaf_node(page, number, offset) for offset in offsets]
            self._check_order([node.key for node in nodes], number, low, high, order)
            for node in nodes:
                if node.overflow_page is not None:
                    overflow_pages += self._claim_overflow(node)
                yield node
        found = (branch_pages, leaf_pages, entries)
        if found != (tree.branch_pages, tree.leaf_pages, tree.entries):
            raise self._fault(f"the {name} tree has other pages than its header says", tree.root)
        exact = self._overflow_headers < self._limits.overflow_headers
        if exact and overflow_pages != tree.overflow_pages:
            raise self._fault(f"the {name} tree has other long values than it says", tree.root)

    def _offsets(self, page: bytes, number: int, expected_flags: int) -> tuple[int, ...]:
        own_number, _, flags, lower, upper = PAGE.unpack_from(page)
        if own_number != number or flags != expected_flags:
            raise self._fault("a page is not what its parent says", number)
        count, odd = divmod(lower - PAGE.size, 2)
        if odd or count < 1 or lower > upper or upper > len(page):
            raise self._fault("a page has an impossible fill", number)
        offsets: tuple[int, ...] = struct.unpack_from(f"<{count}H", page, PAGE.size)
        if min(offsets) < upper or max(offsets) > len(page) - _NODE.size:
            raise self._fault("a node lies outside its page", number)
        return offsets

    def _leaf_node(self, page: bytes, number: int, offset: int) -> LeafNode:
        low, high, flags, key_bytes = _NODE.unpack_from(page, offset)
        size_bytes = low | high << 16
        start = offset + _NODE.size + key_bytes
        inline_bytes = _NUMBER.size if flags == NODE_BIG else size_bytes
        if flags not in (0, NODE_BIG) or offset % 2 or start + inline_bytes > len(page):
            raise self._fault("a node does not fit its page", number)
        key = page[offset + _NODE.size : start]
        data = page[start : start + inline_bytes]
        overflow = _NUMBER.unpack(data)[0] if flags == NODE_BIG else None
        return LeafNode(key, data, size_bytes, overflow)

    def _children(
        self,
        page: bytes,
        number: int,
        offsets: tuple[int, ...],
        depth: int,
        bounds: tuple[bytes | None, bytes | None],
        order: Callable[[bytes], bytes],
    ) -> list[tuple[int, int, bytes | None, bytes | None]]:
        """(page, depth, lower bound, upper bound) of each child, the last first."""
        children, keys = [], []
        for offset in offsets:
            low, high, flags, key_bytes = _NODE.unpack_from(page, offset)
            start = offset + _NODE.size
            if offset % 2 or start + key_bytes > len(page):
                raise self._fault("a node does not fit its page", number)
            children.append(low | high << 16 | flags << 32)
            keys.append(page[start : start + key_bytes])
        self._check_order(keys[1:], number, *bounds, order)
        edges = [bounds[0], *keys[1:], bounds[1]]
        spans = zip(children, edges[:-1], edges[1:], strict=True)
        return [(child, depth - 1, low, high) for child, low, high in spans][::-1]

    def _check_order(
        self,
        keys: list[bytes],
        number: int,
        low: bytes | None,
        high: bytes | None,
        order: Callable[[bytes], bytes],
    ) -> None:
        try:
            ranks = [order(key) for key in keys]
        except ValueError as error:
            raise self._fault("a key has an impossible length", number) from error
        if not all(left < right for left, right in pairwise(ranks)):
            raise self._fault("the keys of a page are out of order", number)
        below = ranks and low is not None and ranks[0] < order(low)
        above = ranks and high is not None and ranks[-1] >= order(high)
        if below or above:
            raise self._fault("the keys of a page do not belong below its parent", number)

    def _claim_overflow(self, node: LeafNode) -> int:
        """Claim the pages of a long value; returns how many."""
        first = node.overflow_page
        assert first is not None
        count = -(-(PAGE.size + node.size_bytes) // self._header.page_bytes)
        readable = first <= self._header.last_page
        if readable and self._overflow_headers < self._limits.overflow_headers:
            self._overflow_headers += 1
            own_number, _, flags, own_count = _OVERFLOW.unpack_from(self._read(first))
            if own_number != first or flags != FLAG_OVERFLOW or own_count < count:
                raise self._fault("a long value is not where its key says", first)
            count = own_count  # a value that was replaced by a shorter one keeps its pages
        self._claim(first, count, "a long value")
        return count

    def _claim_free(self, node: LeafNode) -> None:
        """Claim the pages of one entry of the free list: their number, then they, descending."""
        data = node.data
        if node.overflow_page is not None:
            count = -(-(PAGE.size + node.size_bytes) // self._header.page_bytes)
            data = self._read(node.overflow_page, count)[PAGE.size : PAGE.size + node.size_bytes]
        if node.size_bytes % _NUMBER.size or not node.size_bytes:
            raise self._fault("an entry of the free list has an impossible length", FIRST_PAGE)
        count, *pages = array("Q", data)
        if count > len(pages):
            raise self._fault("an entry of the free list is cut short", FIRST_PAGE)
        for page in pages[:count]:
            self._claim(page, 1, "a free page")


def _as_bytes(key: bytes) -> bytes:
    return key


def _as_number(key: bytes) -> bytes:
    """Little-endian numbers in the order of their values."""
    if len(key) != _NUMBER.size:
        raise ValueError("not a number")
    return key[::-1]

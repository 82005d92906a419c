# SPDX-License-Identifier: Apache-2.0
"""Reads past the page cache: any extent of any file, at any depth, whole or refused."""

import ctypes
import os
import random
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken_storage.weights import FtwError, FtwTruncated
from freetoken_storage.weights_direct import (
    HUGE_PAGE_BYTES,
    AlignedBuffer,
    Buffers,
    DirectReader,
    Extent,
)

SIZE = 300_007  # ends within a block


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("direct") / "file"
    content = random.Random(3).randbytes(SIZE)
    path.write_bytes(content)
    return path, content


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    wanted=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), min_size=1, max_size=6
    ),
    depth=st.integers(1, 9),
    piece=st.sampled_from((1, 4096, 20_000, 1 << 20)),
)
def test_any_extents_at_any_depth(
    stored: tuple[Path, bytes], wanted: list[tuple[int, int]], depth: int, piece: int
) -> None:
    """All submitted before the first is awaited. Oracle: the bytes that were written."""
    path, content = stored
    extents = [Extent(path, start, min(length, SIZE - start)) for start, length in wanted]
    buffers = [AlignedBuffer(extent.room) for extent in extents]
    with DirectReader(depth, piece_bytes=piece) as reader:
        pending = [
            reader.submit(extent, buffer.view)
            for extent, buffer in zip(extents, buffers, strict=True)
        ]
        for extent, read in reversed(list(zip(extents, pending, strict=True))):
            assert read.result() == content[extent.offset : extent.offset + extent.length]


def test_nothing_is_written_beside_the_extents_blocks(stored: tuple[Path, bytes]) -> None:
    """A buffer larger than needed: what lies behind the last block stays."""
    path, content = stored
    extent = Extent(path, 5000, 9000)
    buffer = AlignedBuffer(extent.room + 8192)
    buffer.view[extent.room :] = b"\x5a" * 8192
    with DirectReader(3, piece_bytes=4096) as reader:
        assert reader.read(extent, buffer.view) == content[5000:14_000]
    assert bytes(buffer.view[extent.room :]) == b"\x5a" * 8192


class ShortReads:
    """`os.preadv` that returns less than was asked for, as the system may: real reads of fewer
    bytes, at most `limit`, also in the middle of a block."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls = 0

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        (buffer,) = buffers
        return min(os.preadv(descriptor, [buffer], offset), self.limit + self.calls % 3 * 511)


@pytest.mark.parametrize("limit", [4096, 4097, 5000, 65_536])
def test_m7_a_short_read_is_completed(stored: tuple[Path, bytes], limit: int) -> None:
    """Every read ends early; the next one goes on, from a whole block. Oracle: the bytes."""
    path, content = stored
    preadv = ShortReads(limit)
    extent = Extent(path, 777, SIZE - 777)
    buffer = AlignedBuffer(extent.room)
    with DirectReader(2, piece_bytes=50_000, preadv=preadv) as reader:
        assert reader.read(extent, buffer.view) == content[777:]
    assert preadv.calls > SIZE // (limit + 1022) - 1


def test_m7_a_read_that_cannot_be_completed_is_refused(
    stored: tuple[Path, bytes], tmp_path: Path
) -> None:
    """By one that makes no progress, by the end of the file, by a file that shrinks, by none."""
    path, content = stored
    buffer = AlignedBuffer(SIZE + 8192)

    def stuck(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return min(os.preadv(descriptor, buffers, offset), 100)

    with DirectReader(1, preadv=stuck) as reader, pytest.raises(FtwTruncated, match="file"):
        reader.read(Extent(path, 0, 8192), buffer.view)
    with DirectReader(4, piece_bytes=4096) as reader:
        with pytest.raises(FtwTruncated, match="file is truncated"):
            reader.read(Extent(path, 0, SIZE + 1), buffer.view)
        with pytest.raises(FtwTruncated, match="absent is missing"):
            reader.read(Extent(tmp_path / "absent", 0, 10), buffer.view)
        with pytest.raises(FtwError, match="cannot be read"):
            reader.read(Extent(tmp_path, 0, 10), buffer.view)
        shrinking = tmp_path / "shrinking"
        shrinking.write_bytes(content)
        assert reader.read(Extent(shrinking, 9, 100_000), buffer.view) == content[9:100_009]
        os.truncate(shrinking, 50_000)
        with pytest.raises(FtwTruncated, match="shrinking"):
            reader.read(Extent(shrinking, 9, 100_000), buffer.view)
        assert reader.read(Extent(path, 1, 99), buffer.view) == content[1:100], "and goes on"


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_m7_a_failed_read_leaves_its_buffer_alone(stored: tuple[Path, bytes], broken: int) -> None:
    """One of three pieces fails, the others are slow: `read` raises only when none of them goes on,
    whichever thread reads it. Oracle: the pieces that have ended by then."""
    path, _ = stored
    ended: list[int] = []

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        piece = offset // 40_960
        if piece == broken:
            ended.append(piece)
            return 0
        time.sleep(0.05)
        ended.append(piece)
        return os.preadv(descriptor, buffers, offset)

    buffer = AlignedBuffer(3 * 40_960)
    with DirectReader(4, piece_bytes=40_960, preadv=slow) as reader:
        with pytest.raises(FtwTruncated, match="truncated"):
            reader.read(Extent(path, 0, 3 * 40_960), buffer.view)
        assert sorted(ended) == [0, 1, 2]


def test_m27_direct_reads_take_no_page_faults(tmp_path: Path) -> None:
    """200 MiB through a buffer of 1 MiB: as a mapping this would be 51,200 pages. The first round
    is not counted: threads, descriptors."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(5).randbytes(4 << 20))
    buffer = AlignedBuffer(1 << 20)
    with DirectReader(2, piece_bytes=1 << 19) as reader:

        def rounds(count: int) -> None:
            for index in range(count):
                reader.read(Extent(path, (index % 4) << 20, 1 << 20), buffer.view)

        rounds(8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        rounds(200)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200
        if not reader.buffered:
            cached = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
            rounds(4)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_inblock - cached >= 4 << 11, (
                "the disk is read each time"
            )


def test_a_file_system_without_direct_reads_is_read_through_the_cache_and_said() -> None:
    """Oracle: `buffered`, and the bytes; /proc has no direct reads."""
    path = Path("/proc/self/status")
    buffer = AlignedBuffer(4096)
    with DirectReader(1) as reader:
        assert bytes(reader.read(Extent(path, 0, 5), buffer.view)) == b"Name:"
        assert reader.buffered == {path}


def test_buffers_begin_on_pages_and_misuse_is_noticed(stored: tuple[Path, bytes]) -> None:
    path, _ = stored
    buffer = AlignedBuffer(10_000)
    assert len(buffer.view) == 12_288 and not any(buffer.view)
    with DirectReader(1) as reader:
        with pytest.raises(AssertionError, match="page boundary"):
            reader.submit(Extent(path, 0, 10), buffer.view[8:])
        with pytest.raises(AssertionError, match="Extent"):
            reader.submit(Extent(path, 4000, 10_000), buffer.view)
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(Extent(path, 0, 10), buffer.view)


@pytest.mark.parametrize("size", [5_000, 700_000, 2_953_216, 9_437_184])
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.integers(-12, 12), min_size=1, max_size=8))
def test_buffers_are_nobody_elses_until_they_are_given_back(size: int, steps: list[int]) -> None:
    """So many taken, or given back. Oracle: what its owner wrote into the ends of each."""
    buffers = Buffers(size)
    taken: list[tuple[memoryview, bytes]] = []
    written = 0
    for step in steps:
        for _ in range(step):
            view = buffers.take()
            assert len(view) == buffers.size_bytes and buffers.size_bytes - size < 4096
            assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % 4096 == 0
            written += 1
            mark = written.to_bytes(8, "little")
            view[:8] = view[-8:] = mark
            taken.append((view, mark))
        for _ in range(min(-step, len(taken))):
            buffers.give(taken.pop(written % len(taken))[0])
        assert all(view[:8] == mark == view[-8:] for view, mark in taken)


def in_memory(view: memoryview, kind: str) -> int:
    """Bytes of the mappings that hold a buffer, as the system counts them."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            start, stop = (int(bound, 16) for bound in bounds.groups())
            inside = start < address + len(view) and address < stop
        elif inside and line.startswith(f"{kind}:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system tells no sizes")
def test_memory_that_is_given_back_goes_at_once() -> None:
    """Oracle: the system's count, before and after, while neighbours in the mapping stay."""
    buffers = Buffers(2_953_216)
    views = [buffers.take() for _ in range(5)]
    before = in_memory(views[2], "Rss")
    assert before >= buffers.size_bytes
    buffers.give(views[2])
    assert before - in_memory(views[2], "Rss") >= buffers.size_bytes - 2 * 4096
    again = buffers.take()
    assert in_memory(again, "Rss") >= buffers.size_bytes


def huge_pages_on_request() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text()


@pytest.mark.skipif(not huge_pages_on_request(), reason="the system has no huge pages on request")
def test_buffers_lie_in_huge_pages() -> None:
    """Oracle: the system's count, of five experts that nearly fill seven of them. One may be
    missing where memory is short."""
    buffers = Buffers(2_953_216)
    views = [buffers.take() for _ in range(5)]
    assert in_memory(views[0], "AnonHugePages") >= 5 * HUGE_PAGE_BYTES
    alone = AlignedBuffer(5 << 20)
    assert in_memory(alone.view, "AnonHugePages") >= HUGE_PAGE_BYTES

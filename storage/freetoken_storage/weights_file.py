# SPDX-License-Identifier: Apache-2.0
"""An FTW folder, opened for reading: `weights` has the format.

mapped   the shard's own pages, checked once per opening: for weights that stay in RAM; where many
         follow each other, `ahead` checks them in threads of its own before they are asked for
submit   past the page cache into the caller's memory, checked each time: for what comes and goes
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread, local

import xxhash

from .weights import (
    HEADER_NAME,
    MAX_HEADER_BYTES,
    FtwAltered,
    FtwTruncated,
    Header,
    Record,
    decode,
    readable,
    truncated,
)
from .weights_direct import DirectReader, Extent, Pending

CHECK_THREADS = 2  # one reads while another sums up
_CHUNK_BYTES = 1 << 20
_MADV_POPULATE_READ = 22
_REMEDY = "convert the model again"


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder holds, or was meant to hold, FTW weights."""
    return (folder / HEADER_NAME).is_file()


def read_ahead(folder: Path) -> None:
    """Bring the shards of an FTW folder into the page cache, while the caller does something else
    before opening it; Linux only. Nothing is checked, and nothing told. Other folders are left
    alone, and so are weights of more than a quarter of the memory: not all of those may be wanted
    there."""
    if not is_weights_folder(folder) or sys.platform != "linux":
        return
    shards = sorted(folder.glob("*.ftw"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def read() -> None:
        with suppress(OSError):
            sizes = {path: path.stat().st_size for path in shards}
            if sum(sizes.values()) > memory // 4:
                return
            for path, size in sizes.items():
                _read_through(path, size)

    Thread(target=read, name="weights-ahead", daemon=True).start()


def _read_through(path: Path, size_bytes: int) -> None:
    """Sent nowhere, pages are read and not copied; the interpreter's lock is free meanwhile. Advice
    to the same end (WILLNEED) is taken for a few MiB only."""
    with path.open("rb", buffering=0) as file, open(os.devnull, "wb", buffering=0) as nowhere:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        at = 0
        while at < size_bytes:
            sent = os.sendfile(nowhere.fileno(), file.fileno(), at, size_bytes - at)
            if sent == 0:
                return
            at += sent


@dataclass(frozen=True)
class PendingRecord:
    """A record that is being read into the caller's memory."""

    record: Record
    path: Path
    pending: Pending

    def result(self) -> memoryview:
        """The record's bytes, checked; waits for them. FtwTruncated, FtwAltered."""
        view = self.pending.result()
        _check(self.record, self.path, xxhash.xxh3_128_hexdigest(view))
        return view


class WeightsFile:
    """Records of one folder, by name. Thread-safe. What was mapped stays valid as long as it is
    used, also after the folder was deleted or replaced."""

    def __init__(self, folder: Path) -> None:
        """Read the header and compare every file's size, and the small files' checksums, with it.
        FtwForeign, FtwNewer, FtwTruncated, FtwAltered, FtwTooLarge."""
        self.folder = folder
        header, self.digest = decode(_read_header(folder / HEADER_NAME), folder / HEADER_NAME)
        self.header: Header = header
        self.records: Mapping[str, Record] = {record.name: record for record in header.records}
        for name, size in header.shards.items():
            _check_size(folder / name, size)
        for file in header.files:
            path = folder / file.name
            _check_size(path, file.size_bytes)
            with readable(path):
                content = path.read_bytes()
            if xxhash.xxh3_128_hexdigest(content) != file.xxh3:
                raise FtwAltered(f"{path} is not the file that was converted", remedy=_REMEDY)
        self._maps: dict[str, memoryview] = {}
        self._checked: set[str] = set()
        self._checks: dict[str, Future[bool]] = {}  # under way; see `ahead`
        self._lock = Lock()
        self._scratch = local()

    def extent(self, name: str) -> Extent:
        """Where a record's bytes lie, for a reader of one's own, which has to check them."""
        record = self.records[name]
        return Extent(self.folder / record.shard, record.offset, record.layout.size_bytes)

    def mapped(self, name: str) -> memoryview:
        """A record's bytes in the page cache: no memory of the process's own as long as nobody
        writes to them (what is written stays in the process). FtwTruncated, FtwAltered."""
        record = self.records[name]
        with self._lock:
            known, check = name in self._checked, self._checks.get(name)
        if not known:
            if check is None or not check.result():
                self._check_in_cache(record)
            with self._lock:
                self._checked.add(name)
        return self._view(record)

    @contextmanager
    def ahead(self, names: Iterable[str]) -> Iterator[None]:
        """While this lasts, records are read and checked in this order, and `mapped` waits for
        them. What fails is raised there. For one caller at a time."""
        ended = Event()

        def check(record: Record) -> bool:
            if not ended.is_set():
                self._check_in_cache(record)
                _map_pages(self._view(record))
            return not ended.is_set()

        with ThreadPoolExecutor(CHECK_THREADS, "weights-check") as pool:
            with self._lock:
                assert not self._checks, "records are being checked ahead already"
                due = [self.records[name] for name in names if name not in self._checked]
                self._checks = {record.name: pool.submit(check, record) for record in due}
            try:
                yield
            finally:
                ended.set()
                with self._lock:
                    self._checks = {}

    def submit(self, name: str, reader: DirectReader, into: memoryview) -> PendingRecord:
        """Begin to read a record into memory on a page boundary with room for its extent."""
        extent = self.extent(name)
        return PendingRecord(self.records[name], extent.path, reader.submit(extent, into))

    def read(self, name: str, reader: DirectReader, into: memoryview) -> memoryview:
        """`submit`, and wait, with a part read by this thread. FtwTruncated, FtwAltered."""
        extent = self.extent(name)
        view = reader.read(extent, into)
        _check(self.records[name], extent.path, xxhash.xxh3_128_hexdigest(view))
        return view

    def _view(self, record: Record) -> memoryview:
        with self._lock:
            if record.shard not in self._maps:
                self._maps[record.shard] = _map(self.folder / record.shard)
            return self._maps[record.shard][record.offset : record.stop]

    def _check_in_cache(self, record: Record) -> None:
        """Read through the page cache, which reads ahead where touching mapped pages would not,
        and cannot crash where the file has become shorter."""
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = memoryview(bytearray(_CHUNK_BYTES))
        buffer: memoryview = self._scratch.buffer
        path = self.folder / record.shard
        digest, at = xxhash.xxh3_128(), record.offset
        with readable(path), path.open("rb", buffering=0) as file:
            while at < record.stop:
                part = buffer[: min(len(buffer), record.stop - at)]
                count = os.preadv(file.fileno(), [part], at)
                if count == 0:
                    raise truncated(path, at, record.stop)
                digest.update(part[:count])
                at += count
        _check(record, path, digest.hexdigest())


def _read_header(path: Path) -> bytes:
    if not path.is_file():
        raise FtwTruncated(
            f"{path.parent} has no {path.name}", remedy="run the conversion to its end"
        )
    with readable(path), path.open("rb") as file:
        return file.read(MAX_HEADER_BYTES + 4096)


def _check_size(path: Path, expected: int) -> None:
    with readable(path):
        size = path.stat().st_size
    if size < expected:
        raise truncated(path, size, expected)
    if size > expected:
        raise FtwAltered(f"{path} is longer than it was", value=size, limit=expected)


def _map(path: Path) -> memoryview:
    with readable(path), path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _map_pages(view: memoryview) -> None:
    """Enter pages that are in the page cache into the process's table, many at once: touched one
    after another, those of 1.2 GB take 0.25 s. A hint; unknown to systems other than Linux 5.14."""
    if sys.platform == "linux":
        first = ctypes.c_char.from_buffer(view)
        address, size = ctypes.addressof(first), ctypes.c_size_t(len(view))
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), size, _MADV_POPULATE_READ)


def _check(record: Record, path: Path, found: str) -> None:
    if found != record.xxh3:
        raise FtwAltered(
            f"record {record.name!r} in {path} fails its checksum", value=found, remedy=_REMEDY
        )

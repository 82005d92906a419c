# SPDX-License-Identifier: Apache-2.0
"""Writing an FTW folder record by record, so that it can be interrupted at any point.

    <folder>.partial/journal    line 1: what is being written; then one line per record that is
                                known to be on the disk: xxh3_64 of the line, blank, JSON
    <folder>.partial/model/     shards so far, then small files, then the header
    <folder>                    `model`, renamed, once it is whole

A writer that finds a journal of the same job goes on behind its last record, after reading every
record it lists; of another job, it starts over. The bytes do not depend on interruptions.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import xxhash

from .disk_errors import NO_ROOM
from .folders import sync_folder
from .weights import (
    ELEMENT_BYTES,
    FIELD_ALIGNMENT,
    HEADER_NAME,
    RECORD_ALIGNMENT,
    Field,
    FtwError,
    Header,
    Layout,
    Record,
    SideFile,
    aligned,
    decode,
    encode,
)

SHARD_BYTES = 4 << 30
SYNC_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
Bytes = bytes | memoryview


class RecordWriter:
    """One record that is being written, field after field. Mutable."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file = file
        self._folder = folder
        self._digest = xxhash.xxh3_128()
        self._fields: list[Field] = []
        self._written = 0

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Begin a field; its bytes follow by `write`, in order and complete."""
        self._end_field()
        self._append(bytes(-self._written % FIELD_ALIGNMENT))
        assert dtype in ELEMENT_BYTES and name not in {field.name for field in self._fields}
        self._fields.append(Field(name, dtype, shape, self._written))

    def write(self, part: Bytes) -> None:
        """The next bytes of the field."""
        self._append(part)

    def end(self) -> tuple[Layout, str]:
        """The layout of what was written, and its checksum."""
        self._end_field()
        return Layout(tuple(self._fields)), self._digest.hexdigest()

    def _end_field(self) -> None:
        if self._fields:
            assert self._written == self._fields[-1].stop, (self._fields[-1], self._written)

    def _append(self, part: Bytes) -> None:
        self._digest.update(part)
        with _translated(self._folder):
            _write(self._file, part)
        self._written += len(part)


class WeightsWriter:
    """Writes records in one order into a folder that appears when `finish` is called. Mutable, of
    one thread; a context manager, whose end without `finish` leaves what was written for the next
    one. `records`: those on disk, by name."""

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        *,
        shard_bytes: int = SHARD_BYTES,
        sync_bytes: int = SYNC_BYTES,
    ) -> None:
        """`job`: everything that the bytes follow from, as JSON. FtwError if the folder holds
        something, or another process is writing it."""
        self._folder = folder
        self._work = folder.with_name(f"{folder.name}.partial")
        self._model = self._work / "model"
        self._shard_bytes, self._sync_bytes = shard_bytes, sync_bytes
        self._file: IO[bytes] | None = None
        with _translated(folder):
            self._refuse_existing()
            self._model.mkdir(parents=True, exist_ok=True)
            self._journal = (self._work / "journal").open("a+b", buffering=0)
        self._lock()
        self.records: dict[str, Record] = {}
        self._unsynced: list[Record] = []
        self._shard, self._end = 0, shard_bytes  # so that the first record begins a shard
        with _translated(folder):
            self._resume(json.dumps(job, sort_keys=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop; what is complete is kept for the next writer."""
        if self._journal.closed:
            return
        try:
            with _translated(self._folder):
                self._sync()
        finally:
            if self._file is not None:
                self._file.close()
            self._journal.close()

    @contextmanager
    def record(self, name: str) -> Iterator[RecordWriter]:
        """Write the next record. One that ends by an exception was never there. FtwError if the
        disk refuses it."""
        assert name not in self.records, f"record {name!r} is written twice"
        with _translated(self._folder):
            file = self._next_file()
        writer = RecordWriter(file, self._folder)
        try:
            yield writer
            layout, xxh3 = writer.end()
            record = Record(name, layout, _shard_name(self._shard), self._end, xxh3)
            stop = aligned(record.stop, RECORD_ALIGNMENT)
            with _translated(self._folder):
                _write(file, bytes(stop - record.stop))
        except BaseException:
            file.truncate(self._end)
            file.seek(self._end)
            raise
        self._end = stop
        self.records[name] = record
        self._unsynced.append(record)
        if sum(x.layout.size_bytes for x in self._unsynced) >= self._sync_bytes:
            with _translated(self._folder):
                self._sync()

    def finish(self, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Header:
        """Write the small files and the header, sync everything, and let the folder appear."""
        with _translated(self._folder):
            self._sync()
            shards = {}
            for record in self.records.values():
                shards[record.shard] = aligned(record.stop, RECORD_ALIGNMENT)
            side = []
            for name, content in files.items():
                _write_durably(self._model / name, content)
                side.append(SideFile(name, len(content), xxhash.xxh3_128_hexdigest(content)))
            header = Header(meta, tuple(self.records.values()), shards, tuple(side))
            encoded = encode(header)
            decode(encoded, self._model / HEADER_NAME)  # no reader refuses what is written here
            _write_durably(self._model / HEADER_NAME, encoded)
            sync_folder(self._model)
            os.rename(self._model, self._folder)
            sync_folder(self._folder.parent)
            self.close()
            shutil.rmtree(self._work)
        return header

    def _refuse_existing(self) -> None:
        folder = self._folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            if self._work.is_dir() and not self._model.exists():
                shutil.rmtree(self._work)  # of a writer that was killed after its last rename
            raise FtwError(
                f"{folder} exists already", remedy="name another folder, or delete this one"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._journal.close()
            raise FtwError(
                f"another process is writing {self._folder}", remedy="wait for it, or end it"
            ) from error

    def _next_file(self) -> IO[bytes]:
        """The shard for the next record, at its end: a new one when the last one is full."""
        if self._end >= self._shard_bytes:
            self._sync()
            if self._file is not None:
                self._file.close()
            self._shard, self._end = self._shard + 1, 0
            self._file = (self._model / _shard_name(self._shard)).open("wb", buffering=0)
        assert self._file is not None
        return self._file

    def _sync(self) -> None:
        """Bring records to the disk, and then say so."""
        if self._file is None or not self._unsynced:
            return
        os.fsync(self._file.fileno())
        self._journal.write(b"".join(_line(_described(record)) for record in self._unsynced))
        os.fsync(self._journal.fileno())
        self._unsynced = []

    def _resume(self, job: str) -> None:
        """Take over the records that are whole; forget everything behind them."""
        size = 0
        self._journal.seek(0)
        lines = iter(self._journal.read().splitlines(keepends=True))
        if (first := next(lines, b"")) == _line(job):
            size = len(first)
            for line in lines:
                record = _parse(line)
                if record is None or not self._is_whole(record):
                    break
                self.records[record.name] = record
                size += len(line)
        self._journal.truncate(size)
        if size == 0:
            self._journal.write(_line(job))
        self._forget_the_rest()

    def _is_whole(self, record: Record) -> bool:
        digest, left = xxhash.xxh3_128(), record.layout.size_bytes
        try:
            with (self._model / record.shard).open("rb", buffering=0) as file:
                file.seek(record.offset)
                while left and (part := file.read(min(left, _CHUNK_BYTES))):
                    digest.update(part)
                    left -= len(part)
                gap = aligned(record.stop, RECORD_ALIGNMENT) - record.stop
                zeros = file.read(gap)
        except OSError:
            return False
        return left == 0 and digest.hexdigest() == record.xxh3 and zeros == bytes(gap)

    def _forget_the_rest(self) -> None:
        last = next(reversed(self.records.values()), None)
        for path in self._model.iterdir():
            if last is None or path.name not in {x.shard for x in self.records.values()}:
                path.unlink()
        if last is None:
            return
        self._shard = int(last.shard.removeprefix("records-").removesuffix(".ftw"))
        self._end = aligned(last.stop, RECORD_ALIGNMENT)
        self._file = (self._model / last.shard).open("r+b", buffering=0)
        self._file.truncate(self._end)
        self._file.seek(self._end)


def _shard_name(number: int) -> str:
    return f"records-{number:05d}.ftw"


def _line(text: str) -> bytes:
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def _described(record: Record) -> str:
    fields = [[x.name, x.dtype, x.shape, x.offset] for x in record.layout.fields]
    return json.dumps([record.name, fields, record.shard, record.offset, record.xxh3])


def _parse(line: bytes) -> Record | None:
    """A journal line, or None if the write of it was cut short."""
    digest, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or digest.decode(errors="replace") != xxhash.xxh3_64_hexdigest(
        text.removesuffix(b"\n")
    ):
        return None
    name, fields, shard, offset, xxh3 = json.loads(text)
    layout = Layout(tuple(Field(n, dtype, tuple(shape), at) for n, dtype, shape, at in fields))
    return Record(name, layout, shard, offset, xxh3)


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """The disk's refusals as FtwError; what is complete stays for the next writer."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_ROOM
        raise FtwError(
            f"{folder} cannot be written: {error.strerror or error}",
            value=str(error.filename) if error.filename else None,
            remedy=f"{'free some space' if full else 'choose another folder'} and run it again; "
            "it goes on where it stopped",
        ) from error


def _write(file: IO[bytes], part: Bytes) -> None:
    view = memoryview(part).cast("B")
    while view:
        view = view[file.write(view) :]


def _write_durably(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)

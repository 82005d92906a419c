# SPDX-License-Identifier: Apache-2.0
"""An independent account of what an engine could reuse: lists of ids, no tensors.

It plays the engine's cache for `testing.ScriptedModel` and is the plain model that reuse counts of
real engines are compared with.
"""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Literal

from freetoken_storage.errors import StorageError, StoreDamaged
from freetoken_storage.records import Snapshot, SnapshotReader, Snapshots

from ..model import PathMiss, PathPlan

BLOCK_TOKENS = 64


def chain_digest(parent: bytes, ids: Sequence[int]) -> bytes:
    return blake2b(parent + _pack(ids), digest_size=32).digest()


def _pack(ids: Sequence[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def _unpack(data: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = min(len(a), len(b))
    if tuple(a[:count]) == tuple(b[:count]):
        return count
    return next(i for i in range(count) if a[i] != b[i])


class Ledger:
    """Which prefixes could be restored, if a model had forwarded what the script said.

    RAM: the forwarded paths; any prefix of one is restorable, and a whole path costs nothing where
    its last row was kept (an anchor), one row elsewhere. Disk: under a chain of digests, the ids of
    each block of 64 and of the short block before each anchor; an anchor's row is a child.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._paths: list[tuple[int, ...]] = []
        self._rows: set[tuple[int, ...]] = set()
        self.snapshots: Snapshots | None = None

    def plan(self, ids: Sequence[int]) -> PathPlan:
        total = len(ids)
        ram, ram_row = self._in_ram(ids)
        disk, disk_row = self._on_disk(ids)
        known = max(ram, disk)
        ram, disk = ram - (ram == total and not ram_row), disk - (disk == total and not disk_row)
        reused = max(ram, disk, 0)
        source: Literal["ram", "disk", "none"] = "ram" if ram >= disk else "disk"
        miss = None
        if reused < total:
            cause = "different_ids" if self._forked(ids, reused) else "never_computed"
            cause = "no_anchor" if known == total else cause
            miss = PathMiss(position=reused, cause=cause, tokens=total - reused)
        return PathPlan(
            input_tokens=total,
            reused_tokens=reused,
            prefill_tokens=total - reused,
            source=source if reused else "none",
            anchor=reused or None,
            miss=miss,
            predicted_s=0.0,
        )

    def anchors(self, ids: Sequence[int]) -> Sequence[int]:
        """Every position up to the longest prefix in RAM or, beyond it, the ends on disk."""
        in_ram, _ = self._in_ram(ids)
        on_disk = [end for end in self._disk_ends(ids) if end > in_ram]
        return [*range(1, in_ram + 1), *on_disk] if on_disk else range(1, in_ram + 1)

    def record(self, ids: Sequence[int], anchors: Sequence[int]) -> None:
        """`ids` has been forwarded; the ends in `anchors` keep their row."""
        path = tuple(ids)
        self._paths = [p for p in self._paths if _common(p, path) < len(p)]
        self._paths.append(path)
        self._rows.update(path[:end] for end in anchors)
        if self.snapshots is not None:
            with suppress(StorageError):  # a state that cannot be stored ends no generation
                self.snapshots.put(self._blocks(path, set(anchors)))

    def forget(self, ids: Sequence[int], start: int) -> int:
        """Drop what lies at or after `start` on any path that begins with ids[: start + 1]."""
        stem = tuple(ids[: start + 1])
        dropped = [p for p in self._paths if p[: len(stem)] == stem]
        self._paths = [p for p in self._paths if p not in dropped]
        if dropped and start:
            self._paths.append(stem[:start])
        rows = {r for r in self._rows if r[: len(stem)] == stem}
        self._rows -= rows
        return len(dropped) + len(rows) + self._forget_on_disk(stem)

    def drop_ram(self) -> None:
        """Evict everything from RAM, as memory pressure would."""
        self._paths, self._rows = [], set()

    def digests(self, ids: Sequence[int]) -> list[bytes]:
        """The blocks a pin of this path protects."""
        chain = self._chain(ids)
        return chain[1:]

    def _in_ram(self, ids: Sequence[int]) -> tuple[int, bool]:
        best = max((_common(path, ids) for path in self._paths), default=0)
        return best, tuple(ids) in self._rows

    def _forked(self, ids: Sequence[int], reused: int) -> bool:
        return any(_common(p, ids) == reused < len(p) for p in self._paths)

    def _chain(self, ids: Sequence[int]) -> list[bytes]:
        """Digests at 0, 64, 128 … for as long as whole blocks last."""
        chain = [self._fingerprint]
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain.append(chain_digest(chain[-1], ids[start : start + BLOCK_TOKENS]))
        return chain

    def _blocks(self, path: tuple[int, ...], anchors: set[int]) -> list[Snapshot]:
        chain = self._chain(path)
        ends = {BLOCK_TOKENS * i for i in range(1, len(chain))} | (anchors - {0})
        blocks = [Snapshot(self._fingerprint, None, {"ids": b""})]
        for end in sorted(ends):
            whole = (end - 1) // BLOCK_TOKENS
            ids = path[whole * BLOCK_TOKENS : end]
            digest = chain_digest(chain[whole], ids)
            blocks.append(Snapshot(digest, chain[whole], {"ids": _pack(ids)}))
            if end in anchors:
                blocks.append(Snapshot(chain_digest(digest, ()), digest, {"ids": b""}))
        return blocks

    def _on_disk(self, ids: Sequence[int]) -> tuple[int, bool]:
        ends = self._disk_ends(ids)
        if self.snapshots is None or not ends:
            return 0, False
        last = (ends[-1] - 1) // BLOCK_TOKENS
        digest = chain_digest(self._chain(ids)[last], ids[last * BLOCK_TOKENS : ends[-1]])
        with self.snapshots.reader() as reader:
            return ends[-1], _intact(reader, chain_digest(digest, ()), ())

    def _disk_ends(self, ids: Sequence[int]) -> list[int]:
        """Where whole and short blocks of this path end, as far as the chain is unbroken."""
        if self.snapshots is None:
            return []
        ends: list[int] = []
        with self.snapshots.reader() as reader:
            for start, digest in zip(
                range(0, len(ids), BLOCK_TOKENS), self._chain(ids), strict=False
            ):
                rest = ids[start : start + BLOCK_TOKENS]
                kept = [
                    n
                    for n in range(1, len(rest) + 1)
                    if _intact(reader, chain_digest(digest, rest[:n]), rest[:n])
                ]
                ends += [start + n for n in kept]
                if BLOCK_TOKENS not in kept:
                    break
        return ends

    def _forget_on_disk(self, stem: tuple[int, ...]) -> int:
        if self.snapshots is None:
            return 0
        whole = (len(stem) - 1) // BLOCK_TOKENS
        above = self._chain(stem[: whole * BLOCK_TOKENS])[-1]
        first = stem[whole * BLOCK_TOKENS :]
        gone = []
        with self.snapshots.reader() as reader:
            for child in self.snapshots.children(above):
                if _ids(reader, child)[: len(first)] == first:
                    gone.append(child)
        return self.snapshots.remove(gone)


def _ids(reader: SnapshotReader, digest: bytes) -> tuple[int, ...]:
    info = reader.info(digest)
    data = bytearray(info.sizes["ids"] if info is not None else 0)
    if info is not None:
        reader.read_into(digest, {"ids": memoryview(data)})
    return _unpack(bytes(data))


def _intact(reader: SnapshotReader, digest: bytes, ids: Sequence[int]) -> bool:
    try:
        return reader.info(digest) is not None and _ids(reader, digest) == tuple(ids)
    except StoreDamaged:
        return False

# SPDX-License-Identifier: Apache-2.0
"""What the storage layer keeps, and the two interfaces every store implements.

`Sessions` holds the truth (ids, text, branches) and commits synchronously. `Snapshots` holds
model states under digests: disposable, checksummed, evicted under a budget. The LMDB store
(`database.Database`) and the in-memory one (`testing.MemoryDatabase`) pass one conformance suite.
Bodies are opaque bytes of the caller's; this layer never looks inside.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

ROOT = 0  # the id of the empty path; real node ids are positive
MAIN = "main"  # the branch every session begins with


@dataclass(frozen=True)
class SegmentRecord:
    """An immutable segment. `id` is unique in its session."""

    id: str
    body: bytes


@dataclass(frozen=True)
class NodeRecord:
    """A segment at a place in the tree: `parent` is a node id, or ROOT."""

    id: int
    parent: int
    segment_id: str
    body: bytes


@dataclass(frozen=True)
class NewNode:
    """A node to be written. `parent >= 0` is an existing node id (or ROOT); `-1 - i` is the
    i-th new node of the same commit. The commit assigns the id."""

    parent: int
    segment_id: str
    body: bytes


@dataclass(frozen=True)
class LogRecord:
    """One entry of a branch's log, numbered from 0 without gaps unless purged."""

    sequence: int
    body: bytes


@dataclass(frozen=True)
class BranchRecord:
    """A named head. `version` grows by one with each commit; `node_count` and `path_hash` (a
    chained hash of the path's nodes) let `path` detect a lost or altered node."""

    name: str
    version: int
    head: int
    log_length: int
    node_count: int
    path_hash: bytes
    body: bytes


@dataclass(frozen=True)
class SessionRecord:
    """A session: its name, times in seconds since the epoch, and the caller's body."""

    name: str
    created_s: float
    updated_s: float
    body: bytes


@dataclass(frozen=True)
class Changes:
    """One commit on one branch. Everything in it becomes durable together, or nothing does.

    `head`: an existing node id, ROOT, or `-1 - i` for the i-th new node; None keeps the head.
    `log_keep`: the log is cut to this length before `log` is appended (dropping the redo part).
    `body`/`session_body`: replace the branch's / session's body; None keeps them.
    """

    segments: Sequence[SegmentRecord] = ()
    nodes: Sequence[NewNode] = ()
    head: int | None = None
    body: bytes | None = None
    log: Sequence[bytes] = ()
    log_keep: int | None = None
    session_body: bytes | None = None


@dataclass(frozen=True)
class Committed:
    """What a commit made: the branch as it now is, and the ids of the new nodes in order."""

    branch: BranchRecord
    node_ids: tuple[int, ...]


@dataclass(frozen=True)
class Scrub:
    """What `purge` removes from one session, in one transaction. Values named here disappear
    from the tree and the logs; `Database.compact` then makes the bytes leave the files.

    `expected_versions`: branches that must still be at these versions (SessionConflict).
    `tombstones`: segments written in the same transaction, after the removals.
    """

    node_ids: frozenset[int] = frozenset()
    segment_ids: frozenset[str] = frozenset()
    logs: Mapping[str, frozenset[int]] = field(default_factory=dict)  # branch -> sequences
    branch_bodies: Mapping[str, bytes] = field(default_factory=dict)  # rewritten
    expected_versions: Mapping[str, int] = field(default_factory=dict)
    tombstones: Sequence[SegmentRecord] = ()


class Sessions(Protocol):
    """The durable truth. Every method is thread-safe; a returned commit survives SIGKILL."""

    def create(self, name: str, body: bytes, branch_body: bytes = b"") -> SessionRecord:
        """Create a session with an empty branch `main` at version 0. SessionExists, InvalidName."""

    def get(self, name: str) -> SessionRecord:
        """SessionNotFound."""

    def delete(self, name: str) -> None:
        """Remove the session with everything it holds. SessionNotFound."""

    def branches(self, name: str) -> list[BranchRecord]:
        """By name."""

    def branch(self, name: str, branch: str) -> BranchRecord:
        """SessionNotFound, BranchNotFound."""

    def create_branch(self, name: str, branch: str, *, head: int, body: bytes) -> BranchRecord:
        """A new branch at an existing node, version 0, empty log. BranchExists."""

    def delete_branch(self, name: str, branch: str) -> None:
        """Forget the head and its log; nodes stay until a purge. BranchNotFound."""

    def commit(
        self, name: str, branch: str, changes: Changes, *, expected_version: int
    ) -> Committed:
        """Apply `changes` in one durable transaction. SessionConflict (value: the stored version)
        if the branch is not at `expected_version`; StoreFull leaves everything as it was."""

    def path(self, name: str, head: int) -> list[NodeRecord]:
        """The nodes from the root to `head`, root first; ROOT gives []. StoreDamaged."""

    def nodes(self, name: str) -> Iterator[NodeRecord]:
        """Every node of the session, in id order (parents before children)."""

    def segments(self, name: str, ids: Sequence[str]) -> dict[str, SegmentRecord]:
        """The named segments that exist. StoreDamaged for one whose checksum fails."""

    def all_segments(self, name: str) -> Iterator[SegmentRecord]:
        """Every segment of the session."""

    def log(self, name: str, branch: str) -> list[LogRecord]:
        """The branch's log, oldest first."""

    def scrub(self, name: str, scrub: Scrub) -> None:
        """Remove nodes, segments and log entries in one durable transaction; the version of every
        branch named in `logs` or `branch_bodies` grows by one. SessionConflict if a branch head or
        a remaining node needs what would go (somebody wrote meanwhile), BranchNotFound."""

    def list(self, prefix: str = "") -> list[SessionRecord]:
        """Sessions whose name starts with `prefix`, by name."""


@dataclass(frozen=True)
class Snapshot:
    """Named buffers under a digest. `parent` (another snapshot's digest, or None) is what must
    be present for this one to be of use: eviction removes children before parents."""

    digest: bytes  # 32 bytes
    parent: bytes | None
    buffers: Mapping[str, bytes | memoryview]
    meta: bytes = b""


@dataclass(frozen=True)
class SnapshotInfo:
    """What is stored under a digest, without reading the buffers. `sizes`: name -> bytes."""

    parent: bytes | None
    meta: bytes
    sizes: Mapping[str, int]


class SnapshotReader(Protocol):
    """A consistent view of the snapshots, valid inside its `with` block only."""

    def info(self, digest: bytes) -> SnapshotInfo | None:
        """None if absent. StoreDamaged if its record fails its checksum."""

    def read_into(self, digest: bytes, buffers: Mapping[str, memoryview]) -> None:
        """Copy each named buffer into a writable, contiguous memoryview of exactly its size,
        verifying every checksum before the bytes count. Raises StoreDamaged (the destination's
        content is then undefined and must be discarded) or KeyError if absent."""


class Snapshots(Protocol):
    """Disposable states. Thread-safe. Losing any of them costs time, never truth."""

    def put(self, snapshots: Sequence[Snapshot]) -> None:
        """Write in order, in transactions of at most 8 MiB, each snapshot whole inside one
        transaction or, when larger, visible only with its last. Known digests are skipped and
        touched. Over the disk budget the least recently used unpinned leaves go first; StoreFull
        if nothing more can go, or if what goes could not be used again because of an open reader:
        then nothing does."""

    def reader(self) -> AbstractContextManager[SnapshotReader]: ...

    def contains(self, digest: bytes) -> bool: ...

    def touch(self, digests: Sequence[bytes]) -> None:
        """Mark as used now (batched in memory, written with the next `put`)."""

    def remove(self, digests: Sequence[bytes]) -> int:
        """Remove these and all their descendants; returns how many snapshots went."""

    def children(self, digest: bytes) -> list[bytes]: ...

    def pin(self, owner: str, digests: Sequence[bytes]) -> None:
        """Protect these (and so their ancestors) from eviction on behalf of `owner`; replaces
        what `owner` had pinned. An empty sequence unpins."""

    def size_bytes(self) -> int:
        """Bytes in use by snapshots, as the budget counts them."""

    def shrink(self, limit_bytes: int) -> int:
        """Evict in the usual order until `size_bytes() <= limit_bytes` or nothing more may go; how
        many snapshots went. The file itself shrinks when it is compacted."""

    def flush(self) -> None:
        """Return when everything put so far would survive a power loss."""

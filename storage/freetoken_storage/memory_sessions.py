# SPDX-License-Identifier: Apache-2.0
"""Sessions in dicts, for stores that keep nothing. See `records.Sessions`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .changes import (
    check_same_body,
    check_version,
    resolve_head,
    resolve_log_keep,
    resolve_parent,
)
from .errors import (
    BranchExists,
    BranchNotFound,
    InvalidRecord,
    SessionExists,
    SessionNotFound,
)
from .life import Life
from .names import encode_name, encode_prefix
from .records import (
    MAIN,
    ROOT,
    BranchRecord,
    Changes,
    Committed,
    LogRecord,
    NodeRecord,
    Scrub,
    SegmentRecord,
    SessionRecord,
)
from .scrubs import check_scrub
from .session_rows import ROOT_HASH, chain


@dataclass
class _Branch:
    """Mutated by MemorySessions only, under its lock."""

    record: BranchRecord
    log: list[LogRecord] = field(default_factory=list)


@dataclass
class _Session:
    """Mutated by MemorySessions only, under its lock. `places`: node id -> (depth, hash)."""

    record: SessionRecord
    next_node: int = 1
    nodes: dict[int, NodeRecord] = field(default_factory=dict)
    places: dict[int, tuple[int, bytes]] = field(default_factory=lambda: {ROOT: (0, ROOT_HASH)})
    segments: dict[str, SegmentRecord] = field(default_factory=dict)
    branches: dict[str, _Branch] = field(default_factory=dict)

    def place(self, head: int) -> tuple[int, bytes]:
        if head not in self.places:
            raise InvalidRecord(
                f"there is no such node of session {self.record.name!r}", value=head
            )
        return self.places[head]

    def moved_now(self) -> None:
        self.record = replace(self.record, updated_s=time.time())


class MemorySessions:
    """`records.Sessions` in dicts."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._sessions: dict[str, _Session] = {}

    def _session(self, name: str) -> _Session:
        encode_name("session name", name)
        if name not in self._sessions:
            raise SessionNotFound("there is no such session", value=name)
        return self._sessions[name]

    def _branch(self, session: _Session, branch: str) -> _Branch:
        encode_name("branch name", branch)
        if branch not in session.branches:
            raise BranchNotFound(
                f"there is no such branch of session {session.record.name!r}", value=branch
            )
        return session.branches[branch]

    def create(self, name: str, body: bytes, branch_body: bytes = b"") -> SessionRecord:
        encode_name("session name", name)
        with self._life.write():
            if name in self._sessions:
                raise SessionExists("a session of that name exists", value=name)
            now_s = time.time()
            session = _Session(SessionRecord(name, now_s, now_s, body))
            record = BranchRecord(MAIN, 0, ROOT, 0, 0, ROOT_HASH, branch_body)
            session.branches[MAIN] = _Branch(record)
            self._sessions[name] = session
            return session.record

    def get(self, name: str) -> SessionRecord:
        with self._life.read():
            return self._session(name).record

    def delete(self, name: str) -> None:
        with self._life.write():
            self._session(name)
            del self._sessions[name]

    def branches(self, name: str) -> list[BranchRecord]:
        with self._life.read():
            branches = self._session(name).branches
            return [branches[branch].record for branch in sorted(branches, key=_utf8)]

    def branch(self, name: str, branch: str) -> BranchRecord:
        with self._life.read():
            return self._branch(self._session(name), branch).record

    def create_branch(self, name: str, branch: str, *, head: int, body: bytes) -> BranchRecord:
        with self._life.write():
            session = self._session(name)
            encode_name("branch name", branch)
            if branch in session.branches:
                raise BranchExists(
                    f"a branch of that name exists of session {name!r}", value=branch
                )
            record = BranchRecord(branch, 0, head, 0, *session.place(head), body)
            session.branches[branch] = _Branch(record)
            session.moved_now()
            return record

    def delete_branch(self, name: str, branch: str) -> None:
        with self._life.write():
            session = self._session(name)
            self._branch(session, branch)
            del session.branches[branch]
            session.moved_now()

    def commit(
        self, name: str, branch: str, changes: Changes, *, expected_version: int
    ) -> Committed:
        with self._life.write():
            session = self._session(name)
            old = self._branch(session, branch)
            check_version(name, old.record, expected_version)
            segments = _new_segments(session, changes.segments)
            nodes, places = _new_nodes(session, changes, segments)
            node_ids = tuple(nodes)
            head = resolve_head(changes.head, old.record.head, node_ids)
            kept = resolve_log_keep(changes.log_keep, old.record.log_length)
            node_count, path_hash = places[head] if head in places else session.place(head)
            # Everything that can be refused has been: from here on nothing raises.
            session.segments.update(segments)
            session.nodes.update(nodes)
            session.places.update(places)
            session.next_node += len(nodes)
            old.log = [entry for entry in old.log if entry.sequence < kept]
            old.log += [LogRecord(kept + i, body) for i, body in enumerate(changes.log)]
            old.record = BranchRecord(
                name=branch,
                version=old.record.version + 1,
                head=head,
                log_length=kept + len(changes.log),
                node_count=node_count,
                path_hash=path_hash,
                body=old.record.body if changes.body is None else changes.body,
            )
            if changes.session_body is not None:
                session.record = replace(session.record, body=changes.session_body)
            session.moved_now()
            return Committed(old.record, node_ids)

    def path(self, name: str, head: int) -> list[NodeRecord]:
        with self._life.read():
            session = self._session(name)
            session.place(head)
            path = []
            while head != ROOT:
                path.append(session.nodes[head])
                head = session.nodes[head].parent
            return path[::-1]

    def nodes(self, name: str) -> Iterator[NodeRecord]:
        with self._life.read():
            return iter(list(self._session(name).nodes.values()))

    def segments(self, name: str, ids: Sequence[str]) -> dict[str, SegmentRecord]:
        with self._life.read():
            segments = self._session(name).segments
            for segment_id in ids:
                encode_name("segment id", segment_id)
            return {
                segment_id: segments[segment_id] for segment_id in ids if segment_id in segments
            }

    def all_segments(self, name: str) -> Iterator[SegmentRecord]:
        with self._life.read():
            segments = self._session(name).segments
            return iter([segments[key] for key in sorted(segments, key=_utf8)])

    def log(self, name: str, branch: str) -> list[LogRecord]:
        with self._life.read():
            return list(self._branch(self._session(name), branch).log)

    def scrub(self, name: str, scrub: Scrub) -> None:
        with self._life.write():
            session = self._session(name)
            branches = session.branches
            for tombstone in scrub.tombstones:
                encode_name("segment id", tombstone.id)
            check_scrub(
                name,
                scrub,
                branches=[branch.record for branch in branches.values()],
                nodes=list(session.nodes.values()),
            )
            for node_id in scrub.node_ids & session.nodes.keys():
                del session.nodes[node_id], session.places[node_id]
            for segment_id in scrub.segment_ids & session.segments.keys():
                del session.segments[segment_id]
            for tombstone in scrub.tombstones:
                session.segments[tombstone.id] = tombstone
            for name_, gone in scrub.logs.items():
                log = branches[name_].log
                branches[name_].log = [entry for entry in log if entry.sequence not in gone]
            for name_ in scrub.logs.keys() | scrub.branch_bodies.keys():
                old = branches[name_].record
                body = scrub.branch_bodies.get(name_, old.body)
                branches[name_].record = replace(old, version=old.version + 1, body=body)
            session.moved_now()

    def counts(self) -> dict[str, int]:
        """What `VerifyReport.counts` says of sessions."""
        with self._life.read():
            sessions = self._sessions.values()
            branches = [branch for session in sessions for branch in session.branches.values()]
            return {
                "sessions": len(sessions),
                "branches": len(branches),
                "nodes": sum(len(session.nodes) for session in sessions),
                "segments": sum(len(session.segments) for session in sessions),
                "logs": sum(len(branch.log) for branch in branches),
            }

    def list(self, prefix: str = "") -> list[SessionRecord]:
        encode_prefix(prefix)
        with self._life.read():
            names = sorted(filter(lambda name: name.startswith(prefix), self._sessions), key=_utf8)
            return [self._sessions[name].record for name in names]


def _utf8(name: str) -> bytes:
    return name.encode()


def _new_segments(session: _Session, segments: Sequence[SegmentRecord]) -> dict[str, SegmentRecord]:
    new: dict[str, SegmentRecord] = {}
    for segment in segments:
        encode_name("segment id", segment.id)
        stored = new.get(segment.id, session.segments.get(segment.id))
        check_same_body(session.record.name, segment, stored)
        new[segment.id] = segment
    return new


def _new_nodes(
    session: _Session, changes: Changes, segments: Mapping[str, SegmentRecord]
) -> tuple[dict[int, NodeRecord], dict[int, tuple[int, bytes]]]:
    nodes: dict[int, NodeRecord] = {}
    places: dict[int, tuple[int, bytes]] = {}
    for index, new in enumerate(changes.nodes):
        parent = resolve_parent(new.parent, index, session.next_node)
        depth, parent_hash = places[parent] if new.parent < ROOT else session.place(parent)
        if new.segment_id not in segments and new.segment_id not in session.segments:
            raise InvalidRecord(
                f"new node {index} names an unknown segment of session {session.record.name!r}",
                value=new.segment_id,
            )
        record = NodeRecord(session.next_node + index, parent, new.segment_id, new.body)
        nodes[record.id] = record
        places[record.id] = (depth + 1, chain(parent_hash, record))
    return nodes, places

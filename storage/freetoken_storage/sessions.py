# SPDX-License-Identifier: Apache-2.0
"""Sessions over a database: nodes, branches with their versions and logs. See `records.Sessions`.

Each method is one transaction. Node ids come from a counter of the session inside the write
transaction, so that two branches (of two processes, too) never collide; a commit looks at the
version of its own branch only.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from . import keys, values
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
    StoreDamaged,
)
from .names import encode_name, encode_prefix
from .records import (
    MAIN,
    ROOT,
    BranchRecord,
    Changes,
    Committed,
    LogRecord,
    NewNode,
    NodeRecord,
    Scrub,
    SegmentRecord,
    SessionRecord,
)
from .scrubs import check_scrub
from .session_rows import ROOT_HASH, Branch, Node, SessionInfo, SessionRows, chain, find_session
from .transactions import Environment, Transaction


class StoredSessions:
    """`records.Sessions` in an environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def create(self, name: str, body: bytes, branch_body: bytes = b"") -> SessionRecord:
        key = keys.name(encode_name("session name", name))
        with self._environment.write() as txn:
            if txn.get(key) is not None:
                raise SessionExists("a session of that name exists", value=name)
            now_s = time.time()
            values.save(txn, key, values.pack(_next_session(txn), now_s))
            rows = SessionRows(txn, name)
            rows.put_info(SessionInfo(now_s, next_node=1, next_branch=2))
            rows.put_body(body)
            rows.put_branch(Branch(1, BranchRecord(MAIN, 0, ROOT, 0, 0, ROOT_HASH, branch_body)))
        return SessionRecord(name, now_s, now_s, body)

    def get(self, name: str) -> SessionRecord:
        with self._environment.read() as txn:
            return _session(SessionRows(txn, name))

    def delete(self, name: str) -> None:
        with self._environment.write() as txn:
            number, _ = find_session(txn, name)
            for kind in keys.SESSION_KINDS:
                for key in [key for key, _ in txn.scan(keys.scope(kind, number))]:
                    txn.delete(key)
            txn.delete(keys.name(encode_name("session name", name)))

    def branches(self, name: str) -> list[BranchRecord]:
        with self._environment.read() as txn:
            return [branch.record for branch in SessionRows(txn, name).branches()]

    def branch(self, name: str, branch: str) -> BranchRecord:
        with self._environment.read() as txn:
            return _branch(SessionRows(txn, name), branch).record

    def create_branch(self, name: str, branch: str, *, head: int, body: bytes) -> BranchRecord:
        with self._environment.write() as txn:
            rows = SessionRows(txn, name)
            if rows.branch(branch) is not None:
                raise BranchExists(rows.label("a branch of that name exists"), value=branch)
            node_count, path_hash = _place(rows, head)
            info = rows.info()
            record = BranchRecord(branch, 0, head, 0, node_count, path_hash, body)
            rows.put_branch(Branch(info.next_branch, record))
            rows.put_info(replace(info, updated_s=time.time(), next_branch=info.next_branch + 1))
        return record

    def delete_branch(self, name: str, branch: str) -> None:
        with self._environment.write() as txn:
            rows = SessionRows(txn, name)
            rows.delete_branch(_branch(rows, branch))
            rows.put_info(replace(rows.info(), updated_s=time.time()))

    def commit(
        self, name: str, branch: str, changes: Changes, *, expected_version: int
    ) -> Committed:
        with self._environment.write() as txn:
            rows = SessionRows(txn, name)
            old = _branch(rows, branch)
            check_version(name, old.record, expected_version)
            info = rows.info()
            for segment in changes.segments:
                if not check_same_body(name, segment, rows.segment(segment.id)):
                    rows.put_segment(segment)
            node_ids = _put_nodes(rows, changes.nodes, info.next_node)
            record = _moved(rows, old, changes, node_ids)
            rows.put_branch(replace(old, record=record))
            if changes.session_body is not None:
                rows.put_body(changes.session_body)
            rows.put_info(
                replace(info, updated_s=time.time(), next_node=info.next_node + len(node_ids))
            )
        return Committed(record, node_ids)

    def path(self, name: str, head: int) -> list[NodeRecord]:
        with self._environment.read() as txn:
            rows = SessionRows(txn, name)
            nodes = _walk(rows, head)
            _check_chain(rows, nodes)
            depth, path_hash = (nodes[-1].depth, nodes[-1].hash) if nodes else (0, ROOT_HASH)
            for branch in rows.branches():
                record = branch.record
                if record.head == head and (record.node_count, record.path_hash) != (
                    depth,
                    path_hash,
                ):
                    raise StoreDamaged(
                        rows.label(f"branch {record.name!r}") + " does not match its path",
                        value=f"{depth} nodes",
                        limit=f"{record.node_count} nodes of a known hash",
                    )
            return [node.record for node in nodes]

    def nodes(self, name: str) -> Iterator[NodeRecord]:
        with self._environment.read() as txn:
            return iter([node.record for node in SessionRows(txn, name).nodes()])

    def segments(self, name: str, ids: Sequence[str]) -> dict[str, SegmentRecord]:
        with self._environment.read() as txn:
            rows = SessionRows(txn, name)
            found = ((segment_id, rows.segment(segment_id)) for segment_id in ids)
            return {segment_id: record for segment_id, record in found if record is not None}

    def all_segments(self, name: str) -> Iterator[SegmentRecord]:
        with self._environment.read() as txn:
            return iter(list(SessionRows(txn, name).segments()))

    def log(self, name: str, branch: str) -> list[LogRecord]:
        with self._environment.read() as txn:
            rows = SessionRows(txn, name)
            return rows.log(_branch(rows, branch))

    def scrub(self, name: str, scrub: Scrub) -> None:
        with self._environment.write() as txn:
            rows = SessionRows(txn, name)
            branches = {branch.record.name: branch for branch in rows.branches()}
            check_scrub(
                name,
                scrub,
                branches=[branch.record for branch in branches.values()],
                nodes=[node.record for node in rows.nodes()],
            )
            for node_id in scrub.node_ids:
                rows.delete_node(node_id)
            for segment_id in scrub.segment_ids:
                rows.delete_segment(segment_id)
            for tombstone in scrub.tombstones:
                rows.put_segment(tombstone)
            for branch, sequences in scrub.logs.items():
                for sequence in sequences:
                    rows.delete_log(branches[branch].number, sequence)
            for branch in scrub.logs.keys() | scrub.branch_bodies.keys():
                old = branches[branch].record
                body = scrub.branch_bodies.get(branch, old.body)
                moved = replace(old, version=old.version + 1, body=body)
                rows.put_branch(replace(branches[branch], record=moved))
            rows.put_info(replace(rows.info(), updated_s=time.time()))

    def list(self, prefix: str = "") -> list[SessionRecord]:
        encoded = encode_prefix(prefix)
        with self._environment.read() as txn:
            names = [key[1:].decode() for key, _ in txn.scan(keys.name(encoded))]
            return [_session(SessionRows(txn, name)) for name in names]


def _next_session(txn: Transaction) -> int:
    payload = values.load(txn, keys.COUNTERS, "the session counter")
    number: int = 1 if payload is None else values.unpack(payload, 1, "the session counter")[0]
    values.save(txn, keys.COUNTERS, values.pack(number + 1))
    return number


def _session(rows: SessionRows) -> SessionRecord:
    return SessionRecord(rows.name, rows.created_s, rows.info().updated_s, rows.body())


def _branch(rows: SessionRows, branch: str) -> Branch:
    found = rows.branch(branch)
    if found is None:
        raise BranchNotFound(rows.label("there is no such branch"), value=branch)
    return found


def _place(rows: SessionRows, head: int) -> tuple[int, bytes]:
    """(depth, hash) of an existing node. InvalidRecord if it does not exist."""
    place = rows.place(head) if head >= ROOT else None
    if place is None:
        raise InvalidRecord(rows.label("there is no such node"), value=head)
    return place


def _put_nodes(rows: SessionRows, nodes: Sequence[NewNode], first_id: int) -> tuple[int, ...]:
    places: list[tuple[int, bytes]] = []  # of the new nodes, so that none is read back
    for index, new in enumerate(nodes):
        parent = resolve_parent(new.parent, index, first_id)
        if new.parent >= ROOT:
            depth, parent_hash = _place(rows, parent)
        else:
            depth, parent_hash = places[parent - first_id]
        if not rows.has_segment(new.segment_id):
            raise InvalidRecord(
                rows.label(f"new node {index} names an unknown segment"), value=new.segment_id
            )
        record = NodeRecord(first_id + index, parent, new.segment_id, new.body)
        places.append((depth + 1, chain(parent_hash, record)))
        rows.put_node(Node(record, *places[-1]))
    return tuple(range(first_id, first_id + len(nodes)))


def _moved(
    rows: SessionRows, old: Branch, changes: Changes, node_ids: tuple[int, ...]
) -> BranchRecord:
    """The branch after `changes`; writes its log."""
    record = old.record
    head = resolve_head(changes.head, record.head, node_ids)
    node_count, path_hash = _place(rows, head)
    kept = resolve_log_keep(changes.log_keep, record.log_length)
    if kept < record.log_length:
        rows.cut_log(old.number, kept)
    for sequence, body in enumerate(changes.log, start=kept):
        rows.append_log(old.number, sequence, body)
    return BranchRecord(
        name=record.name,
        version=record.version + 1,
        head=head,
        log_length=kept + len(changes.log),
        node_count=node_count,
        path_hash=path_hash,
        body=record.body if changes.body is None else changes.body,
    )


def _walk(rows: SessionRows, head: int) -> list[Node]:
    """The nodes from the root to `head`. StoreDamaged if one on the way is lost, InvalidRecord if
    `head` itself is no node and no branch says that it should be."""
    nodes: list[Node] = []
    node_id = head
    while node_id != ROOT:
        node = rows.node(node_id) if node_id > ROOT else None
        if node is None:
            heads = [branch.record.name for branch in rows.branches() if branch.record.head == head]
            if not nodes and not heads:
                raise InvalidRecord(rows.label("there is no such node"), value=head)
            raise StoreDamaged(
                rows.label(f"node {node_id}") + f" is missing on the path to node {head}",
                value=f"branches with that head: {', '.join(heads) or 'none'}",
            )
        if nodes and node.depth != nodes[-1].depth - 1:
            break  # _check_chain names the node
        nodes.append(node)
        node_id = node.record.parent
    nodes.reverse()
    return nodes


def _check_chain(rows: SessionRows, nodes: Sequence[Node]) -> None:
    parent, path_hash = ROOT, ROOT_HASH
    for depth, node in enumerate(nodes, start=1):
        path_hash = chain(path_hash, node.record)
        if (node.record.parent, node.depth, node.hash) != (parent, depth, path_hash):
            raise StoreDamaged(
                rows.label(f"node {node.record.id}") + " does not continue its path",
                value=f"depth {node.depth}",
                limit=f"depth {depth} below node {parent}",
            )
        parent = node.record.id

# SPDX-License-Identifier: Apache-2.0
"""The rows of one session inside one transaction: records to bytes and back, each verified.

It knows the layout (keys.py) and the chained hash, and no rule about what may be written when;
those are in sessions.py.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from . import keys, values
from .errors import SessionNotFound, StoreDamaged
from .names import encode_name
from .records import ROOT, BranchRecord, LogRecord, NodeRecord, SegmentRecord
from .transactions import Transaction

HASH_BYTES = 16
ROOT_HASH = bytes(HASH_BYTES)


@dataclass(frozen=True)
class SessionInfo:
    """What changes with each commit. The next ids are never given twice, not even after an abort
    that another process could have seen."""

    updated_s: float
    next_node: int
    next_branch: int


@dataclass(frozen=True)
class Node:
    """A node with its place in the chain: `depth` nodes from the root, itself counted, and the hash
    over all of them."""

    record: NodeRecord
    depth: int
    hash: bytes


@dataclass(frozen=True)
class Branch:
    """A branch with the number under which its log is kept."""

    number: int
    record: BranchRecord


def chain(parent_hash: bytes, record: NodeRecord) -> bytes:
    """The hash of a path that ends with `record`: blake2b-128 over the parent's hash and the
    node's own fields, each with its length."""
    fields = values.pack(record.id, record.parent, record.segment_id, record.body)
    return hashlib.blake2b(parent_hash + fields, digest_size=HASH_BYTES).digest()


def find_session(txn: Transaction, name: str) -> tuple[int, float]:
    """The number and creation time of a session. SessionNotFound, InvalidName."""
    payload = values.load(txn, keys.name(encode_name("session name", name)), f"session {name!r}")
    if payload is None:
        raise SessionNotFound("there is no such session", value=name)
    number, created_s = values.unpack(payload, 2, f"session {name!r}")
    return number, created_s


class SessionRows:
    """Reads and writes the rows of session `number`; valid while its transaction is."""

    def __init__(self, txn: Transaction, name: str) -> None:
        self.txn = txn
        self.name = name
        self.number, self.created_s = find_session(txn, name)

    def label(self, row: str) -> str:
        return f"{row} of session {self.name!r}"

    # session

    def info(self) -> SessionInfo:
        what = self.label("the record")
        payload = values.load(self.txn, keys.scope(keys.INFO, self.number), what)
        if payload is None:
            raise StoreDamaged(f"{what} is missing")
        return SessionInfo(*values.unpack(payload, 3, what))

    def put_info(self, info: SessionInfo) -> None:
        payload = values.pack(info.updated_s, info.next_node, info.next_branch)
        values.save(self.txn, keys.scope(keys.INFO, self.number), payload)

    def body(self) -> bytes:
        what = self.label("the body")
        payload = values.load(self.txn, keys.scope(keys.BODY, self.number), what)
        if payload is None:
            raise StoreDamaged(f"{what} is missing")
        return payload

    def put_body(self, body: bytes) -> None:
        values.save(self.txn, keys.scope(keys.BODY, self.number), body)

    # nodes

    def node(self, node_id: int) -> Node | None:
        if node_id > keys.MAX_NUMBER:
            return None
        what = self.label(f"node {node_id}")
        payload = values.load(self.txn, keys.node(self.number, node_id), what)
        return None if payload is None else self._node(node_id, payload, what)

    def nodes(self) -> Iterator[Node]:
        for key, value in self.txn.scan(keys.scope(keys.NODE, self.number)):
            node_id = keys.last_number(key)
            what = self.label(f"node {node_id}")
            yield self._node(node_id, values.read(self.txn, key, value, what), what)

    def put_node(self, node: Node) -> None:
        record = node.record
        payload = values.pack(record.parent, node.depth, node.hash, record.segment_id, record.body)
        values.save(self.txn, keys.node(self.number, record.id), payload)

    def delete_node(self, node_id: int) -> None:
        values.discard(self.txn, keys.node(self.number, node_id))

    @staticmethod
    def _node(node_id: int, payload: bytes, what: str) -> Node:
        parent, depth, path_hash, segment_id, body = values.unpack(payload, 5, what)
        return Node(NodeRecord(node_id, parent, segment_id, body), depth, path_hash)

    def place(self, node_id: int) -> tuple[int, bytes] | None:
        """(depth, hash) of a node, or of ROOT; None if it is absent."""
        if node_id == ROOT:
            return 0, ROOT_HASH
        node = self.node(node_id)
        return None if node is None else (node.depth, node.hash)

    # segments

    def segment(self, segment_id: str) -> SegmentRecord | None:
        key = keys.segment(self.number, encode_name("segment id", segment_id))
        body = values.load(self.txn, key, self.label(f"segment {segment_id!r}"))
        return None if body is None else SegmentRecord(segment_id, body)

    def has_segment(self, segment_id: str) -> bool:
        key = keys.segment(self.number, encode_name("segment id", segment_id))
        return self.txn.get(key) is not None

    def segments(self) -> Iterator[SegmentRecord]:
        prefix = keys.scope(keys.SEGMENT, self.number)
        for key, value in self.txn.scan(prefix):
            segment_id = key[len(prefix) :].decode(errors="replace")
            what = self.label(f"segment {segment_id!r}")
            yield SegmentRecord(segment_id, values.read(self.txn, key, value, what))

    def put_segment(self, record: SegmentRecord) -> None:
        key = keys.segment(self.number, encode_name("segment id", record.id))
        values.save(self.txn, key, record.body)

    def delete_segment(self, segment_id: str) -> None:
        values.discard(self.txn, keys.segment(self.number, encode_name("segment id", segment_id)))

    # branches and their logs

    def branch(self, branch: str) -> Branch | None:
        what = self.label(f"branch {branch!r}")
        key = keys.branch(self.number, encode_name("branch name", branch))
        payload = values.load(self.txn, key, what)
        return None if payload is None else self._branch(branch, payload, what)

    def branches(self) -> Iterator[Branch]:
        prefix = keys.scope(keys.BRANCH, self.number)
        for key, value in self.txn.scan(prefix):
            branch = key[len(prefix) :].decode(errors="replace")
            what = self.label(f"branch {branch!r}")
            yield self._branch(branch, values.read(self.txn, key, value, what), what)

    def put_branch(self, branch: Branch) -> None:
        record = branch.record
        key = keys.branch(self.number, encode_name("branch name", record.name))
        payload = values.pack(
            branch.number,
            record.version,
            record.head,
            record.log_length,
            record.node_count,
            record.path_hash,
            record.body,
        )
        values.save(self.txn, key, payload)

    def delete_branch(self, branch: Branch) -> None:
        self.cut_log(branch.number, 0)
        values.discard(
            self.txn, keys.branch(self.number, encode_name("branch name", branch.record.name))
        )

    @staticmethod
    def _branch(name: str, payload: bytes, what: str) -> Branch:
        fields = values.unpack(payload, 7, what)
        return Branch(fields[0], BranchRecord(name, *fields[1:]))

    def log(self, branch: Branch) -> list[LogRecord]:
        entries = []
        for key, value in self.txn.scan(keys.logs(self.number, branch.number)):
            sequence = keys.last_number(key)
            what = self.label(f"log entry {sequence} of branch {branch.record.name!r}")
            entries.append(LogRecord(sequence, values.read(self.txn, key, value, what)))
        return entries

    def append_log(self, branch_number: int, sequence: int, body: bytes) -> None:
        values.save(self.txn, keys.log(self.number, branch_number, sequence), body)

    def delete_log(self, branch_number: int, sequence: int) -> None:
        values.discard(self.txn, keys.log(self.number, branch_number, sequence))

    def cut_log(self, branch_number: int, length: int) -> None:
        """Drop the entries numbered `length` and above."""
        prefix = keys.logs(self.number, branch_number)
        for key in [key for key, _ in self.txn.scan(prefix)]:
            if keys.last_number(key) >= length:
                values.discard(self.txn, key)

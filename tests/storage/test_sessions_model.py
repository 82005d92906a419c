# SPDX-License-Identifier: Apache-2.0
"""Random programs of session edits against a model written as plain dicts and lists."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import (
    BranchExists,
    BranchNotFound,
    FreetokenError,
    SessionConflict,
    SessionExists,
    SessionNotFound,
)
from freetoken_storage.records import Changes, NewNode, Scrub, SegmentRecord
from freetoken_storage.testing import AnyDatabase

NAMES = ("a", "ab", "ü")
BRANCHES = ("main", "b", "c")
number = st.integers(0, 10**6)


@dataclass(frozen=True)
class Op:
    """One step; the numbers pick among what exists when it runs."""

    kind: str
    name: str
    branch: str
    picks: tuple[int, int, int, int]


@dataclass
class ModelBranch:
    version: int
    head: int
    log: list[tuple[int, bytes]]
    log_length: int
    body: bytes


@dataclass
class ModelSession:
    body: bytes
    segments: dict[str, bytes] = field(default_factory=dict)
    nodes: dict[int, tuple[int, str, bytes]] = field(default_factory=dict)
    next_node: int = 1
    branches: dict[str, ModelBranch] = field(
        default_factory=lambda: {"main": ModelBranch(0, 0, [], 0, b"")}
    )

    def path(self, head: int) -> list[int]:
        path: list[int] = []
        while head:
            path.insert(0, head)
            head = self.nodes[head][0]
        return path

    def below(self, node: int) -> set[int]:
        return {other for other in self.nodes if node in self.path(other)}


class Model:
    """What a store should hold. `plan` turns an op into calls and the expected error."""

    def __init__(self) -> None:
        self.sessions: dict[str, ModelSession] = {}
        self.count = 0

    def run(self, op: Op, stores: list[AnyDatabase]) -> None:
        getattr(self, op.kind)(op, stores)

    def _all(
        self, stores: list[AnyDatabase], method: str, *args: object, **options: object
    ) -> FreetokenError | None:
        """Call every store; all must agree. The error, or None."""
        outcomes: list[FreetokenError | None] = []
        for store in stores:
            try:
                getattr(store.sessions, method)(*args, **options)
                outcomes.append(None)
            except FreetokenError as error:
                outcomes.append(error)
        assert len({type(outcome) for outcome in outcomes}) == 1, outcomes
        return outcomes[0]

    def _missing(self, op: Op) -> type[FreetokenError] | None:
        if op.name not in self.sessions:
            return SessionNotFound
        if op.branch not in self.sessions[op.name].branches:
            return BranchNotFound
        return None

    def create(self, op: Op, stores: list[AnyDatabase]) -> None:
        error = self._all(stores, "create", op.name, b"body", b"first")
        if op.name in self.sessions:
            assert isinstance(error, SessionExists)
            return
        assert error is None
        self.sessions[op.name] = ModelSession(b"body")
        self.sessions[op.name].branches["main"].body = b"first"

    def delete(self, op: Op, stores: list[AnyDatabase]) -> None:
        error = self._all(stores, "delete", op.name)
        assert isinstance(error, SessionNotFound) == (op.name not in self.sessions)
        self.sessions.pop(op.name, None)

    def create_branch(self, op: Op, stores: list[AnyDatabase]) -> None:
        session = self.sessions.get(op.name)
        heads = [0, *(session.nodes if session else ())]
        head = heads[op.picks[0] % len(heads)]
        error = self._all(stores, "create_branch", op.name, op.branch, head=head, body=b"new")
        if session is None:
            assert isinstance(error, SessionNotFound)
        elif op.branch in session.branches:
            assert isinstance(error, BranchExists)
        else:
            assert error is None
            session.branches[op.branch] = ModelBranch(0, head, [], 0, b"new")

    def delete_branch(self, op: Op, stores: list[AnyDatabase]) -> None:
        error = self._all(stores, "delete_branch", op.name, op.branch)
        missing = self._missing(op)
        assert (type(error) if error else None) is missing
        if missing is None:
            del self.sessions[op.name].branches[op.branch]

    def commit(self, op: Op, stores: list[AnyDatabase]) -> None:
        """Some new nodes at picked parents; the head goes to any node, old or new."""
        missing = self._missing(op)
        if missing is not None:
            error = self._all(stores, "commit", op.name, op.branch, Changes(), expected_version=0)
            assert type(error) is missing
            return
        session = self.sessions[op.name]
        branch = session.branches[op.branch]
        if op.picks[0] % 7 == 0:
            stale = branch.version + (1 if op.picks[1] % 2 else -1)
            error = self._all(
                stores, "commit", op.name, op.branch, Changes(head=0), expected_version=stale
            )
            assert isinstance(error, SessionConflict) and error.value == branch.version
            return
        changes, after = self._changes(op, session, branch)
        error = self._all(
            stores, "commit", op.name, op.branch, changes, expected_version=branch.version
        )
        assert error is None
        session.branches[op.branch] = after

    def _changes(
        self, op: Op, session: ModelSession, branch: ModelBranch
    ) -> tuple[Changes, ModelBranch]:
        segments, nodes = [], []
        first = session.next_node
        for index in range(op.picks[1] % 4):
            self.count += 1
            segment = SegmentRecord(f"s{self.count}", b"text %d" % self.count)
            segments.append(segment)
            session.segments[segment.id] = segment.body
            choices = [0, branch.head, *session.nodes]  # the new ones so far included
            parent = choices[(op.picks[2] + index * 31) % len(choices)]
            relative = parent if parent < first else -1 - (parent - first)
            nodes.append(NewNode(relative, segment.id, segment.body[::-1]))
            session.nodes[first + index] = (parent, segment.id, segment.body[::-1])
        session.next_node += len(nodes)
        heads = [None, 0, *session.nodes]
        head = heads[op.picks[3] % len(heads)]
        relative_head = head if head is None or head < first else -1 - (head - first)
        keep = None if op.picks[2] % 2 else op.picks[3] % (branch.log_length + 1)
        kept = branch.log_length if keep is None else keep
        entries = [b"log %d" % (self.count + i) for i in range(op.picks[3] % 3)]
        log = [entry for entry in branch.log if entry[0] < kept]
        log += [(kept + i, entry) for i, entry in enumerate(entries)]
        body = b"body %d" % self.count if op.picks[2] % 3 else None
        after = ModelBranch(
            branch.version + 1,
            branch.head if head is None else head,
            log,
            kept + len(entries),
            branch.body if body is None else body,
        )
        changes = Changes(
            segments=segments,
            nodes=nodes,
            head=relative_head,
            body=body,
            log=entries,
            log_keep=keep,
        )
        return changes, after

    def scrub(self, op: Op, stores: list[AnyDatabase]) -> None:
        """A subtree with its segments, and some log entries of one branch."""
        session = self.sessions.get(op.name)
        if session is None or not session.nodes:
            return
        node = list(session.nodes)[op.picks[0] % len(session.nodes)]
        nodes = session.below(node)
        segments = {session.nodes[gone][1] for gone in nodes}
        logs: dict[str, frozenset[int]] = {}
        bodies: dict[str, bytes] = {}
        if op.branch in session.branches:
            length = session.branches[op.branch].log_length
            logs[op.branch] = frozenset(range(op.picks[1] % (length + 1)))
            bodies = {op.branch: b"scrubbed"} if op.picks[2] % 2 else {}
        scrub = Scrub(frozenset(nodes), frozenset(segments), logs, bodies)
        error = self._all(stores, "scrub", op.name, scrub)
        if any(branch.head in nodes for branch in session.branches.values()):
            assert isinstance(error, SessionConflict)
            return
        assert error is None
        for gone in nodes:
            del session.nodes[gone]
        for segment in segments:
            del session.segments[segment]
        for name, sequences in logs.items():
            branch = session.branches[name]
            branch.log = [entry for entry in branch.log if entry[0] not in sequences]
            branch.version += 1
            branch.body = bodies.get(name, branch.body)

    def check(self, store: AnyDatabase) -> None:
        sessions = store.sessions
        assert [r.name for r in sessions.list()] == sorted(self.sessions, key=str.encode)
        for name, session in self.sessions.items():
            found = {n.id: (n.parent, n.segment_id, n.body) for n in sessions.nodes(name)}
            assert found == session.nodes
            assert {s.id: s.body for s in sessions.all_segments(name)} == session.segments
            assert [b.name for b in sessions.branches(name)] == sorted(session.branches)
            for branch_name, branch in session.branches.items():
                record = sessions.branch(name, branch_name)
                path = [node.id for node in sessions.path(name, record.head)]
                assert path == session.path(branch.head)
                assert record.node_count == len(path)
                log = [(entry.sequence, entry.body) for entry in sessions.log(name, branch_name)]
                assert (record.version, record.head, log, record.log_length, record.body) == (
                    branch.version,
                    branch.head,
                    branch.log,
                    branch.log_length,
                    branch.body,
                )


ops = st.builds(
    Op,
    kind=st.sampled_from(
        ["create", "commit", "commit", "commit", "commit", "commit", "create_branch"]
        + ["create_branch", "scrub", "scrub", "delete_branch", "delete", "reopen", "compact"]
    ),
    name=st.sampled_from(NAMES[:1] * 6 + NAMES),
    branch=st.sampled_from(BRANCHES[:1] * 3 + BRANCHES),
    picks=st.tuples(number, number, number, number),
)


def run_program(program: list[Op], folder: Path) -> None:
    model = Model()
    memory = MemoryDatabase()
    stored = Database(folder / "store")
    try:
        model.run(Op("create", "a", "main", (0, 0, 0, 0)), [stored, memory])
        for op in program:
            if op.kind == "reopen":
                stored.close()
                stored = Database(folder / "store")
            elif op.kind == "compact":
                if op.picks[0] % 4 == 0:  # it starts two processes
                    assert stored.compact()
            else:
                model.run(op, [stored, memory])
        for store in (stored, memory):
            model.check(store)
        stored.close()
        stored = Database(folder / "store")
        model.check(stored)
    finally:
        stored.close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ops, min_size=5, max_size=30))
def test_random_programs(program: list[Op]) -> None:
    """Oracle: the dict model above, for the stored and the in-memory store, also reopened."""
    with tempfile.TemporaryDirectory() as folder:
        run_program(program, Path(folder))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(ops, min_size=5, max_size=60))
def test_many_random_programs(program: list[Op]) -> None:
    """Oracle: as above; a thousand longer programs."""
    with tempfile.TemporaryDirectory() as folder:
        run_program(program, Path(folder))

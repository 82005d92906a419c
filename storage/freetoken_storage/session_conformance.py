# SPDX-License-Identifier: Apache-2.0
"""What every store's `sessions` must do: functions that take an empty, writable store.

They use plain asserts and no test framework, so that any runner can call them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from .database import Database
from .errors import (
    BranchExists,
    BranchNotFound,
    FreetokenError,
    InvalidName,
    InvalidRecord,
    SessionConflict,
    SessionExists,
    SessionNotFound,
)
from .memory import MemoryDatabase
from .records import MAIN, ROOT, Changes, NewNode, NodeRecord, Scrub, SegmentRecord
from .session_rows import ROOT_HASH

AnyDatabase = Database | MemoryDatabase
Check = Callable[[AnyDatabase], None]

BAD_NAMES = ("", "a\nb", "a\x00", "\x7f", "é" * 65, "x" * 129, "\ud800", "a\u2028b")
GOOD_NAMES = ("a", "é" * 64, "x" * 128, "../../etc/passwd", "a/b", " ", "日本語", "a\u200db")


@contextmanager
def refused(error: type[FreetokenError], *words: str) -> Iterator[None]:
    """The block must raise `error` with each of `words` in its message."""
    try:
        yield
    except error as raised:
        missing = [word for word in words if word not in str(raised)]
        assert not missing, f"{raised} does not mention {missing}"
        assert raised.code == error.code
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def grow(store: AnyDatabase, texts: str, *, name: str = "s", branch: str = MAIN) -> list[int]:
    """Commit one node for each letter, each on top of the last; returns their ids."""
    record = store.sessions.branch(name, branch)
    ids = list(texts)
    changes = Changes(
        segments=[SegmentRecord(f"{branch}-{letter}", letter.encode()) for letter in ids],
        nodes=[
            NewNode(record.head if i == 0 else -i, f"{branch}-{letter}", b"node " + letter.encode())
            for i, letter in enumerate(ids)
        ],
        head=-len(ids),
        log=[f"grow {texts}".encode()],
    )
    committed = store.sessions.commit(name, branch, changes, expected_version=record.version)
    return list(committed.node_ids)


def names(store: AnyDatabase) -> None:
    for good in GOOD_NAMES:
        store.sessions.create(good, b"")
        store.sessions.create_branch("a", good + "'"[: 128 - len(good.encode())], head=0, body=b"")
    assert [record.name for record in store.sessions.list()] == sorted(GOOD_NAMES, key=str.encode)
    for bad in BAD_NAMES:
        with refused(InvalidName):
            store.sessions.create(bad, b"")
        with refused(InvalidName):
            store.sessions.get(bad)
        with refused(InvalidName):
            store.sessions.create_branch("a", bad, head=ROOT, body=b"")
        with refused(InvalidName):
            store.sessions.commit(
                "a", MAIN, Changes(segments=[SegmentRecord(bad, b"")]), expected_version=0
            )
    with refused(InvalidName):
        store.sessions.list("\ud800")
    assert len(store.sessions.list()) == len(GOOD_NAMES)


def sessions_by_name(store: AnyDatabase) -> None:
    sessions = store.sessions
    created = sessions.create("b", b"body", branch_body=b"branch")
    sessions.create("a", b"")
    sessions.create("ba", b"")
    assert sessions.get("b") == created
    assert created.body == b"body" and created.created_s == created.updated_s
    assert [record.name for record in sessions.list()] == ["a", "b", "ba"]
    assert [record.name for record in sessions.list("b")] == ["b", "ba"]
    assert sessions.list("c") == []
    main = sessions.branch("b", MAIN)
    assert (main.version, main.head, main.log_length, main.node_count) == (0, ROOT, 0, 0)
    assert (main.body, main.path_hash) == (b"branch", ROOT_HASH)
    assert sessions.path("b", ROOT) == []
    with refused(SessionExists, "'b'"):
        sessions.create("b", b"other")
    assert sessions.get("b") == created
    with refused(SessionNotFound, "'c'"):
        sessions.get("c")
    with refused(SessionNotFound):
        sessions.delete("c")
    with refused(SessionNotFound):
        sessions.branches("c")


def deleted_sessions(store: AnyDatabase) -> None:
    store.sessions.create("s", b"")
    grow(store, "abc")
    store.sessions.create("t", b"")
    grow(store, "xy", name="t")
    kept = store.sessions.path("t", 2)
    store.sessions.delete("s")
    with refused(SessionNotFound):
        store.sessions.path("s", 1)
    assert store.sessions.path("t", 2) == kept
    store.sessions.create("s", b"again")
    assert list(store.sessions.nodes("s")) == []
    assert list(store.sessions.all_segments("s")) == []
    assert store.sessions.log("s", MAIN) == []


def commits(store: AnyDatabase) -> None:
    sessions = store.sessions
    before = sessions.create("s", b"old")
    committed = sessions.commit(
        "s",
        MAIN,
        Changes(
            segments=[SegmentRecord("x", b"1"), SegmentRecord("y", b"2")],
            nodes=[NewNode(ROOT, "x", b"nx"), NewNode(-1, "y", b"ny"), NewNode(-1, "x", b"n3")],
            head=-2,
            body=b"branch",
            log=[b"l0", b"l1"],
            session_body=b"new",
        ),
        expected_version=0,
    )
    one, two, three = committed.node_ids
    assert sessions.branch("s", MAIN) == committed.branch
    assert (committed.branch.version, committed.branch.head) == (1, two)
    assert (committed.branch.node_count, committed.branch.body) == (2, b"branch")
    assert sessions.path("s", two) == [
        NodeRecord(one, ROOT, "x", b"nx"),
        NodeRecord(two, one, "y", b"ny"),
    ]
    assert [node.id for node in sessions.path("s", three)] == [one, three]
    assert [node.id for node in sessions.nodes("s")] == [one, two, three]
    assert [entry.body for entry in sessions.log("s", MAIN)] == [b"l0", b"l1"]
    after = sessions.get("s")
    assert after.body == b"new" and after.updated_s >= before.updated_s
    # An empty commit is one: a new version, everything else as it was.
    same = sessions.commit("s", MAIN, Changes(), expected_version=1)
    assert same.node_ids == () and same.branch == replace(committed.branch, version=2)


def refused_commits(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    (node,) = grow(store, "a")
    before = sessions.branch("s", MAIN)
    segment = SegmentRecord("new", b"")
    for changes in (
        Changes(segments=[segment], nodes=[NewNode(node + 1, "new", b"")]),
        Changes(segments=[segment], nodes=[NewNode(-1, "new", b"")]),
        Changes(segments=[segment], nodes=[NewNode(-2, "new", b""), NewNode(ROOT, "new", b"")]),
        Changes(segments=[segment], nodes=[NewNode(ROOT, "unknown", b"")]),
        Changes(segments=[segment], nodes=[NewNode(2**64, "new", b"")]),
        Changes(segments=[segment], head=node + 1),
        Changes(segments=[segment], head=2**64),
        Changes(segments=[segment], head=-1),
        Changes(segments=[segment], log_keep=2),
        Changes(segments=[segment], log_keep=-1),
        Changes(segments=[segment, SegmentRecord(f"{MAIN}-a", b"other body")]),
        Changes(segments=[segment, SegmentRecord("new", b"other body")]),
    ):
        with refused(InvalidRecord):
            sessions.commit("s", MAIN, changes, expected_version=1)
    with refused(SessionConflict, "expected version 0", "got 1"):
        sessions.commit("s", MAIN, Changes(segments=[segment]), expected_version=0)
    with refused(BranchNotFound, "'other'"):
        sessions.commit("s", "other", Changes(), expected_version=0)
    with refused(SessionNotFound):
        sessions.commit("t", MAIN, Changes(), expected_version=0)
    assert sessions.branch("s", MAIN) == before
    assert [node.id for node in sessions.nodes("s")] == [node]
    assert [record.id for record in sessions.all_segments("s")] == [f"{MAIN}-a"]
    assert grow(store, "b") == [node + 1], "a refused commit used up node ids"


def segments(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    records = [
        SegmentRecord("b", b"1"),
        SegmentRecord("a", b""),
        SegmentRecord("ü", bytes(200_000)),
    ]
    sessions.commit("s", MAIN, Changes(segments=records), expected_version=0)
    sessions.commit("s", MAIN, Changes(segments=records[:1]), expected_version=1)  # equal: allowed
    assert sessions.segments("s", ["ü", "none", "b"]) == {"ü": records[2], "b": records[0]}
    assert sessions.segments("s", []) == {}
    assert [record.id for record in sessions.all_segments("s")] == ["a", "b", "ü"]
    with refused(InvalidName):
        sessions.segments("s", [""])


def long_values(store: AnyDatabase) -> None:
    """Bodies of every kind far above the size of one stored value, replaced by short ones."""
    sessions = store.sessions
    long = bytes(range(256)) * 10_000
    sessions.create("s", long, branch_body=long)
    changes = Changes(
        segments=[SegmentRecord("x", long)],
        nodes=[NewNode(ROOT, "x", long)],
        head=-1,
        log=[long, b"short"],
    )
    node = sessions.commit("s", MAIN, changes, expected_version=0).node_ids[0]
    assert sessions.get("s").body == sessions.branch("s", MAIN).body == long
    assert sessions.path("s", node)[0].body == sessions.segments("s", ["x"])["x"].body == long
    assert sessions.log("s", MAIN)[0].body == long
    sessions.commit(
        "s", MAIN, Changes(body=b"b", session_body=b"s", log_keep=0), expected_version=1
    )
    assert (sessions.get("s").body, sessions.branch("s", MAIN).body) == (b"s", b"b")
    assert sessions.log("s", MAIN) == []


def branches(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    a, b = grow(store, "ab")
    made = sessions.create_branch("s", "fork", head=a, body=b"f")
    assert (made.version, made.head, made.log_length, made.node_count) == (0, a, 0, 1)
    assert [branch.name for branch in sessions.branches("s")] == ["fork", MAIN]
    with refused(BranchExists, "'fork'"):
        sessions.create_branch("s", "fork", head=b, body=b"")
    with refused(InvalidRecord):
        sessions.create_branch("s", "lost", head=b + 1, body=b"")
    (c,) = grow(store, "c", branch="fork")
    assert [node.id for node in sessions.path("s", c)] == [a, c]
    assert sessions.branch("s", MAIN).head == b, "a commit on one branch moved another"
    at_head = sessions.branch("s", "fork")
    assert sessions.create_branch("s", "same", head=c, body=b"").path_hash == at_head.path_hash
    sessions.delete_branch("s", "fork")
    with refused(BranchNotFound, "'fork'"):
        sessions.branch("s", "fork")
    with refused(BranchNotFound):
        sessions.delete_branch("s", "fork")
    with refused(BranchNotFound):
        sessions.log("s", "fork")
    assert [node.id for node in sessions.path("s", c)] == [a, c], "a deleted branch took nodes"
    sessions.create_branch("s", "fork", head=ROOT, body=b"")
    assert sessions.log("s", "fork") == [], "a new branch inherited a deleted one's log"


def logs(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    sessions.commit("s", MAIN, Changes(log=[b"0", b"1", b"2"]), expected_version=0)
    record = sessions.commit("s", MAIN, Changes(log=[b"x"], log_keep=1), expected_version=1).branch
    assert record.log_length == 2
    assert [(e.sequence, e.body) for e in sessions.log("s", MAIN)] == [(0, b"0"), (1, b"x")]
    record = sessions.commit("s", MAIN, Changes(log_keep=0), expected_version=2).branch
    assert (record.log_length, sessions.log("s", MAIN)) == (0, [])


def unknown_heads(store: AnyDatabase) -> None:
    store.sessions.create("s", b"")
    (node,) = grow(store, "a")
    for head in (node + 1, -1, 2**40):
        with refused(InvalidRecord):
            store.sessions.path("s", head)


def scrubs(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    a, b, c = grow(store, "abc")
    sessions.create_branch("s", "keep", head=a, body=b"k")
    sessions.commit("s", MAIN, Changes(head=a, log=[b"1", b"2"]), expected_version=1)
    segment_ids = frozenset({f"{MAIN}-b", f"{MAIN}-c"})
    sessions.scrub(
        "s",
        Scrub(
            node_ids=frozenset({b, c, 999}),
            segment_ids=segment_ids | {"none"},
            logs={MAIN: frozenset({0, 2, 77})},
            branch_bodies={"keep": b"rewritten"},
            expected_versions={MAIN: 2},
            tombstones=[SegmentRecord(f"{MAIN}-b", b"gone")],
        ),
    )
    assert [node.id for node in sessions.nodes("s")] == [a]
    assert sessions.segments("s", sorted(segment_ids)) == {
        f"{MAIN}-b": SegmentRecord(f"{MAIN}-b", b"gone")
    }
    assert [entry.sequence for entry in sessions.log("s", MAIN)] == [1]
    main = sessions.branch("s", MAIN)
    assert (main.version, main.log_length) == (3, 3), "a purge must not renumber the log"
    keep = sessions.branch("s", "keep")
    assert (keep.version, keep.body) == (1, b"rewritten")
    for node in (b, c):
        with refused(InvalidRecord):
            sessions.path("s", node)
    assert grow(store, "d") == [c + 1], "node ids were given twice"
    record = sessions.commit("s", MAIN, Changes(log=[b"n"], log_keep=2), expected_version=4).branch
    assert [entry.sequence for entry in sessions.log("s", MAIN)] == [1, 2]
    assert record.log_length == 3


def refused_scrubs(store: AnyDatabase) -> None:
    sessions = store.sessions
    sessions.create("s", b"")
    a, b = grow(store, "ab")
    before = (list(sessions.nodes("s")), sessions.branches("s"), sessions.log("s", MAIN))
    for scrub in (
        Scrub(node_ids=frozenset({b})),  # the head
        Scrub(node_ids=frozenset({a})),  # the parent of a node that stays
        Scrub(segment_ids=frozenset({f"{MAIN}-a"})),  # the segment of a node that stays
        Scrub(logs={MAIN: frozenset({0})}, expected_versions={MAIN: 0}),
    ):
        with refused(SessionConflict):
            sessions.scrub("s", scrub)
    with refused(BranchNotFound, "'none'"):
        sessions.scrub("s", Scrub(logs={"none": frozenset({0}), MAIN: frozenset({0})}))
    with refused(SessionNotFound):
        sessions.scrub("t", Scrub())
    assert (list(sessions.nodes("s")), sessions.branches("s"), sessions.log("s", MAIN)) == before


def meta_values(store: AnyDatabase) -> None:
    assert store.get_meta("binding") is None
    store.set_meta("binding", b"1")
    store.set_meta("binding", b"2")
    assert store.get_meta("binding") == b"2"
    with refused(InvalidRecord, "binding"):
        store.set_meta("binding", bytes(1 << 20))
    with refused(InvalidName):
        store.set_meta("", b"")
    assert store.get_meta("binding") == b"2"


SESSION_CHECKS: tuple[Check, ...] = (
    names,
    sessions_by_name,
    deleted_sessions,
    commits,
    refused_commits,
    segments,
    long_values,
    branches,
    logs,
    unknown_heads,
    scrubs,
    refused_scrubs,
    meta_values,
)

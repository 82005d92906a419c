# SPDX-License-Identifier: Apache-2.0
"""A branch as one handle sees it: its path, version and log, and the commits that move it.

The log holds one entry per undo step, with the head the step started from; where a step led is
where the next one starts. `position` counts the steps that are applied: undo and redo move it and
the head, and a new step behind an undo cuts the log there.

    start₀ ─step 0→ start₁ ─step 1→ start₂ ─step 2→ tip
                                    position 2: step 2 is undone, the head is start₂
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from freetoken_storage.errors import InvalidRecord, SessionConflict, StoreDamaged
from freetoken_storage.records import (
    ROOT,
    BranchRecord,
    Changes,
    Committed,
    NewNode,
    NodeRecord,
    SegmentRecord,
    Sessions,
)

from ..errors import InvalidEdit, NothingToRedo, NothingToUndo
from . import codec
from .codec import BranchBody, CallMark, Head, LogEntry
from .path import Body, Path, Place

_RECENT_PATHS = 8


@dataclass
class StepGroup:
    """Commits that together are one undo step: a generation, or an agent's run. The branch writes
    `log_id` with the group's first commit."""

    label: str
    log_id: int | None = None


class Branch:
    """Mutated only by its own methods, each of which either commits and then changes, or raises
    and leaves everything as it was. Not thread-safe: the session holds a lock around writers;
    `path` is replaced as a whole, so readers need none."""

    _record: BranchRecord
    _body: BranchBody
    _log: list[LogEntry | None]  # None: a purge removed the entry

    def __init__(
        self,
        sessions: Sessions,
        session: str,
        record: BranchRecord,
        bodies: dict[str, Body],
        known: Path | None = None,
    ) -> None:
        """`bodies`: the stored segments known so far, shared with other branches of the session.
        `known`: a path that shares nodes with this one's, so that they are not read again."""
        self._sessions = sessions
        self._session = session
        self._bodies = bodies
        self._recent: OrderedDict[int, tuple[Place, ...]] = OrderedDict()  # by head node
        self._computed: OrderedDict[int, tuple[Place, ...]] = OrderedDict()  # the same
        self._path = known or Path()
        self._adopt(record)

    @classmethod
    def load(
        cls, sessions: Sessions, session: str, name: str, bodies: dict[str, Body] | None = None
    ) -> "Branch":
        """BranchNotFound, SessionNotFound, StoreDamaged."""
        record = sessions.branch(session, name)
        return cls(sessions, session, record, {} if bodies is None else bodies)

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def version(self) -> int:
        return self._record.version

    @property
    def path(self) -> Path:
        return self._path

    @property
    def pins(self) -> tuple[str, ...]:
        return self._body.pins

    @property
    def calls(self) -> tuple[CallMark, ...]:
        """How far the open calls have come."""
        return self._body.calls

    @property
    def head(self) -> Head:
        return Head(self._record.head, self._path.tail)

    @property
    def next_log_id(self) -> int:
        """What the next step will be numbered."""
        return self._body.position

    @property
    def bodies(self) -> dict[str, Body]:
        """Stored segments this branch has read or written, by id. Grows; never hold it."""
        return self._bodies

    def reload(self) -> None:
        """Read the branch again as it is stored, its segments too: a purge may have taken them, or
        some of their meta data."""
        record = self._sessions.branch(self._session, self.name)
        self._recent.clear()
        self._computed.clear()
        self._refresh_bodies()
        if any(self._bodies.get(p.body.id) is not p.body for p in self._path.places):
            self._path = Path()
        self._adopt(record)

    def commit(
        self,
        path: Path,
        label: str,
        *,
        group: StepGroup | None = None,
        logged: bool = True,
        session_body: bytes | None = None,
        calls: Sequence[CallMark] = (),
    ) -> int | None:
        """Make `path` the branch's path in one durable transaction; returns the step's number.

        `group`: the commit continues that step if it is the last one. `logged=False` makes no
        step at all. `calls`: what is known of the calls that stay open. SessionConflict and
        StoreFull change nothing.
        """
        body, position = self._body, self._body.position
        continued = group is not None and group.log_id == position - 1 and body.tip is None
        entry = None
        if logged and not continued:
            entry = LogEntry(label, self.head, time.time())
            position += 1
        new_body = BranchBody(path.tail, position, None, body.pins, tuple(calls))
        start, nodes = _new_nodes(path)
        committed = self._write(
            Changes(
                segments=self._new_segments(path.places[start:]),
                nodes=nodes,
                head=-len(nodes) if nodes else _head_node(path),
                body=codec.pack_branch(new_body),
                log=() if entry is None else (codec.pack_log(entry),),
                log_keep=body.position if logged else None,
                session_body=session_body,
            )
        )
        if entry is not None:
            self._log = [*self._log[: body.position], entry]
            if group is not None:
                group.log_id = body.position
        elif logged:
            self._log = self._log[: body.position]
        self._remember()
        self._path = path.committed(start, committed.node_ids)
        self._body = new_body
        self._bodies.update((p.body.id, p.body) for p in path.places[start:])
        return position - 1 if logged else None

    def undone(self, steps: int) -> Path:
        """The path `steps` steps back. NothingToUndo."""
        target = self._body.position - _count(steps)
        if target < 0 or any(e is None for e in self._log[target : self._body.position]):
            raise NothingToUndo(
                "the branch's log does not go back that far",
                value=steps,
                limit=f"{self._undoable()} steps",
            )
        return self._path_at(self._heads()[target])

    def redone(self, steps: int) -> Path:
        """The path `steps` undone steps forward. NothingToRedo."""
        target = self._body.position + _count(steps)
        heads = self._heads()
        crossed = heads[self._body.position + 1 : target + 1]
        if target >= len(heads) or any(head is None for head in crossed):
            raise NothingToRedo(
                "the branch has no such undone step",
                value=steps,
                limit=f"{len(heads) - 1 - self._body.position} steps",
            )
        return self._path_at(heads[target])

    def move(self, steps: int, path: Path) -> int:
        """Undo (`steps` < 0) or redo to `path`, which `undone` or `redone` gave; returns the number
        of the last step that was crossed."""
        heads = self._heads()
        position = self._body.position + steps
        tip = heads[-1] if position < len(heads) - 1 else None
        body = BranchBody(path.tail, position, tip, self._body.pins)
        self._write(Changes(head=_head_node(path), body=codec.pack_branch(body)))
        self._remember()
        self._path, self._body = path, body
        return position if steps < 0 else position - 1

    def set_pins(self, pins: Sequence[str]) -> None:
        """Remember which segments' states are protected. No undo step."""
        body = replace(self._body, pins=tuple(pins))
        self._write(Changes(body=codec.pack_branch(body)))
        self._body = body

    def mark_calls(self, calls: Sequence[CallMark]) -> None:
        """Remember how far the open calls have come, if that is news. No undo step."""
        if tuple(calls) == self._body.calls:
            return
        body = replace(self._body, calls=tuple(calls))
        self._write(Changes(body=codec.pack_branch(body)))
        self._body = body

    def path_to(self, node: int) -> Path:
        """The path to any node of the session; its tail is closed."""
        return self._path_at(Head(node, "closed"))

    def recent_paths(self) -> list[Path]:
        """Paths that this handle has left lately, the newest first; their tails are closed."""
        return [Path(places) for places in reversed(list(self._recent.values()))]

    def computed_paths(self) -> list[Path]:
        """Paths that a model has forwarded for this handle lately, the newest first."""
        return [Path(places) for places in reversed(list(self._computed.values()))]

    def note_computed(self, path: Path) -> None:
        """A model has forwarded this path."""
        if path.places:
            _keep(self._computed, path)

    def past_heads(self) -> list[Head]:
        """Every head in this branch's log, the current one included."""
        return [head for head in self._heads() if head is not None] + [self.head]

    def _adopt(self, record: BranchRecord) -> None:
        body = codec.unpack_branch(record.body)
        entries: list[LogEntry | None] = [None] * record.log_length
        for stored in self._sessions.log(self._session, record.name):
            if stored.sequence < record.log_length:
                entries[stored.sequence] = codec.unpack_log(stored.body)
        path = self._path_at(Head(record.head, body.tail))
        self._record, self._body, self._log, self._path = record, body, entries, path

    def _path_at(self, head: Head | None) -> Path:
        assert head is not None, "checked by the caller"
        known = self._path.places
        if known and known[-1].node == head.node:
            return Path(known, head.tail)
        if head.node in self._recent:
            return Path(self._recent[head.node], head.tail)
        records = self._nodes_to(head.node) if head.node != ROOT else []
        self._fetch([r.segment_id for r in records if r.segment_id not in self._bodies])
        places: list[Place] = []
        for i, record in enumerate(records):
            if i < len(known) and known[i].node == record.id:
                places.append(known[i])
                continue
            body = self._bodies.get(record.segment_id)
            if body is None:
                raise StoreDamaged(
                    f"a segment of session {self._session!r} is missing", value=record.segment_id
                )
            places.append(codec.unpack_node(record.body, body, record.id))
        return Path(tuple(places), head.tail)

    def _remember(self) -> None:
        """Keep the path that is being left: undo and redo often come back to it."""
        if self._path.places:
            _keep(self._recent, self._path)

    def _nodes_to(self, node: int) -> list[NodeRecord]:
        try:
            return self._sessions.path(self._session, node)
        except InvalidRecord as error:  # this handle's log is older than a purge
            raise SessionConflict(
                f"branch {self.name!r} of session {self._session!r} was purged",
                value=self._sessions.branch(self._session, self.name).version,
                limit=f"expected version {self.version}",
                remedy="reload() and repeat the edit",
            ) from error

    def _refresh_bodies(self) -> None:
        known = dict(self._bodies)
        for segment_id in known:
            self._bodies.pop(segment_id, None)
        self._fetch(list(known))
        self._bodies.update((i, b) for i, b in known.items() if self._bodies.get(i) == b)

    def _fetch(self, ids: Sequence[str]) -> None:
        found: Mapping[str, SegmentRecord] = self._sessions.segments(self._session, ids)
        for record in found.values():
            body = codec.unpack_segment(record.body)
            if body is not None:
                self._bodies[record.id] = body

    def _heads(self) -> list[Head | None]:
        """Starts of all steps, then the tip; None where a purge removed the entry."""
        tip = self._body.tip
        if self._body.position == len(self._log):
            tip = self.head
        starts = [None if entry is None else entry.before for entry in self._log]
        return [*starts, tip]

    def _undoable(self) -> int:
        count = 0
        for entry in reversed(self._log[: self._body.position]):
            if entry is None:
                break
            count += 1
        return count

    def _new_segments(self, places: Sequence[Place]) -> list[SegmentRecord]:
        fresh = {p.body.id: p.body for p in places if p.body.id not in self._bodies}
        return [SegmentRecord(i, codec.pack_segment(body)) for i, body in fresh.items()]

    def _write(self, changes: Changes) -> Committed:
        committed = self._sessions.commit(
            self._session, self.name, changes, expected_version=self.version
        )
        self._record = committed.branch
        return committed


def _new_nodes(path: Path) -> tuple[int, list[NewNode]]:
    """Where the uncommitted places start, and their nodes as one chain."""
    start = next((i for i, p in enumerate(path.places) if p.node is None), len(path.places))
    parent = _head_node(Path(path.places[:start]))
    nodes = []
    for offset, place in enumerate(path.places[start:]):
        above = parent if offset == 0 else -offset
        nodes.append(NewNode(above, place.body.id, codec.pack_node(place)))
    return start, nodes


def _keep(paths: OrderedDict[int, tuple[Place, ...]], path: Path) -> None:
    """Enter a path as the newest; the oldest goes when there are too many."""
    paths[_head_node(path)] = path.places
    paths.move_to_end(_head_node(path))
    if len(paths) > _RECENT_PATHS:
        paths.popitem(last=False)


def _head_node(path: Path) -> int:
    node = path.places[-1].node if path.places else ROOT
    assert node is not None, "the path is committed"
    return node


def _count(steps: int) -> int:
    if steps < 1:
        raise InvalidEdit("the number of steps must be at least 1", value=steps)
    return steps

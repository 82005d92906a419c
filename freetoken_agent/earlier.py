# SPDX-License-Identifier: Apache-2.0
"""Finding what stood in a place before: the stored path that goes on with other ids there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from freetoken_storage.errors import StorageError
from freetoken_storage.records import ROOT, NodeRecord, Sessions

from . import codec
from .branch import Branch
from .path import Body, Path, Place, common_length


@dataclass(frozen=True)
class EarlierPaths:
    """The paths of a session beside the one that is priced. `before`: the path that an edit under
    way starts from. Reads only; from any thread."""

    sessions: Sessions
    session: str
    branch: Branch
    before: Path | None = None

    def going_on(self, ids: Sequence[int], position: int, segment: str | None) -> Path | None:
        """A path that begins with ids[:position] and goes on with other ids, likeliest first: where
        an edit starts, what this branch left lately, then anywhere in the stored tree, there one
        that holds `segment` later on, if any does. None if the session has none."""
        wanted = tuple(ids)
        for path in self._at_hand():
            if len(path.ids) > position == common_length(path.ids, wanted):
                return path
        try:
            return _Tree(self.sessions, self.session, self.branch.bodies).find(
                wanted, position, segment
            )
        except StorageError:  # what stood there is a courtesy, a plan must not fail for it
            return None

    def _at_hand(self) -> Iterator[Path]:
        if self.before is not None:
            yield self.before
        yield from self.branch.recent_paths()


class _Tree:
    """The stored nodes of a session, read once."""

    def __init__(self, sessions: Sessions, session: str, bodies: Mapping[str, Body]) -> None:
        self._sessions = sessions
        self._session = session
        self._bodies = dict(bodies)
        self._children: dict[int, list[NodeRecord]] = {}
        for node in sessions.nodes(session):
            self._children.setdefault(node.parent, []).append(node)

    def find(self, ids: tuple[int, ...], position: int, segment: str | None) -> Path | None:
        """The newest path as in `EarlierPaths.going_on`."""
        found: Path | None = None
        pending: list[tuple[int, tuple[Place, ...], int]] = [(ROOT, (), 0)]
        while pending:
            parent, above, start = pending.pop()
            for place in self._places(self._children.get(parent, ())):
                own = (*place.gap_ids, *place.body.ids)
                shared = common_length(own, ids[start : start + len(own)])
                if shared == len(own) and start + shared <= position:
                    assert place.node is not None, "read from the store"
                    pending.append((place.node, (*above, place), start + shared))
                elif start + shared == position:
                    below = self._way_to(place, segment)
                    path = Path((*above, place, *below))
                    if below or segment is None:
                        return path
                    if found is None or _node(path) > _node(found):
                        found = path
        return found

    def _places(self, records: Sequence[NodeRecord]) -> list[Place]:
        """The places of these nodes; segments that a purge takes meanwhile are left out."""
        unknown = [r.segment_id for r in records if r.segment_id not in self._bodies]
        for stored in self._sessions.segments(self._session, unknown).values() if unknown else ():
            body = codec.unpack_segment(stored.body)
            if body is not None:
                self._bodies[stored.id] = body
        return [
            codec.unpack_node(record.body, self._bodies[record.segment_id], record.id)
            for record in records
            if record.segment_id in self._bodies
        ]

    def _way_to(self, place: Place, segment: str | None) -> list[Place]:
        """The places below one, down to the one that holds `segment`; [] if none does."""
        assert place.node is not None, "read from the store"
        parents: dict[int, NodeRecord] = {}
        pending = [place.node]
        while pending and segment is not None:
            for child in self._children.get(pending.pop(), ()):
                parents[child.id] = child
                if child.segment_id != segment:
                    pending.append(child.id)
                    continue
                way = [child]
                while way[-1].parent != place.node:
                    way.append(parents[way[-1].parent])
                return self._places(way[::-1])
        return []


def _node(path: Path) -> int:
    node = path.places[-1].node
    return ROOT if node is None else node

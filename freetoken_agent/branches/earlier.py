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

    def going_on(self, ids: Sequence[int], position: int, segment: str | None) -> Iterator[Path]:
        """Paths that begin with ids[:position] and go on with other ids, the likeliest first: where
        an edit starts, what this branch left lately, then the stored tree, the newest first, each
        there down to `segment` if it holds it later on."""
        wanted = tuple(ids)
        for path in self._at_hand():
            if _part_at(path.ids, wanted, position):
                yield path
        try:
            tree = _Tree(self.sessions, self.session, self.branch.bodies)
            yield from tree.find(wanted, position, segment)
        except StorageError:  # what stood there is a courtesy, a plan must not fail for it
            return

    def forwarded(self, ids: Sequence[int], position: int) -> Path | None:
        """The newest path that was forwarded lately, shares ids[:position] and goes on with other
        ids."""
        wanted = tuple(ids)
        paths = self.branch.computed_paths()
        return next((path for path in paths if _part_at(path.ids, wanted, position)), None)

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

    def find(self, ids: tuple[int, ...], position: int, segment: str | None) -> list[Path]:
        """The paths as in `EarlierPaths.going_on`."""
        found: list[tuple[int, Path]] = []
        pending: list[tuple[int, tuple[Place, ...], int]] = [(ROOT, (), 0)]
        while pending:
            parent, above, start = pending.pop()
            for place in self._places(self._children.get(parent, ())):
                assert place.node is not None, "read from the store"
                own = (*place.gap_ids, *place.body.ids)
                shared = common_length(own, ids[start : start + len(own)])
                if shared == len(own) and start + shared <= position:
                    pending.append((place.node, (*above, place), start + shared))
                elif start + shared == position:
                    below = self._way_to(place, segment)
                    found.append((place.node, Path((*above, place, *below))))
        return [path for _, path in sorted(found, key=lambda entry: -entry[0])]

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


def _part_at(known: tuple[int, ...], ids: tuple[int, ...], position: int) -> bool:
    """Whether two paths share exactly their first `position` ids, and `known` goes on."""
    if len(known) <= position or known[position : position + 1] == ids[position : position + 1]:
        return False
    return known[:position] == ids[:position]

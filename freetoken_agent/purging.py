# SPDX-License-Identifier: Apache-2.0
"""Purge: what was once in a session, gone from the tree, the logs, the states and the files."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import anyio.to_thread

from freetoken_storage.errors import SessionConflict
from freetoken_storage.records import Scrub, SegmentRecord

from . import codec, freeing, lookups
from .errors import SegmentInUse
from .handle import Context, Handle
from .path import Body, Path
from .segments import PurgeReport, Segment

_ATTEMPTS = 10  # other writers may move a branch between looking and scrubbing


async def purge(handle: Handle, segment: Segment | str) -> PurgeReport:
    """See `Session.purge`. Runs in a worker thread."""
    return await anyio.to_thread.run_sync(purge_sync, handle, segment)


def purge_sync(handle: Handle, segment: Segment | str) -> PurgeReport:
    """Remove a segment for good, in the calling thread."""
    handle.bound()
    handle.outside_batch("purge()")
    for attempt in range(_ATTEMPTS):
        removal = _Removal(handle, segment)
        with handle.lock, _reserved(handle.context, removal.branches):
            # States first: whatever stops us here, a second purge finds the segment still there.
            models = handle.context.store.models
            states = freeing.forget(models, removal.paths)
            states += freeing.drop_absent(handle.context.backing, models)
            try:
                handle.context.sessions.scrub(handle.context.name, removal.scrub)
            except SessionConflict:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            for gone in removal.scrub.segment_ids:
                handle.context.bodies.pop(gone, None)
            handle.branch.reload()
            break
    others, sessions = _holders(handle.context, removal.body)
    return PurgeReport(
        segments=tuple(sorted(removal.scrub.segment_ids)),
        num_nodes=len(removal.scrub.node_ids),
        num_states=states,
        num_log_entries=sum(len(sequences) for sequences in removal.scrub.logs.values()),
        other_segments=others,
        other_sessions=sessions,
        scrubbed=handle.context.backing.compact(),
    )


@contextmanager
def _reserved(context: Context, branches: Iterable[str]) -> Iterator[None]:
    """Keep generations away from branches whose logs are rewritten. SessionBusy if one runs."""
    with ExitStack() as stack:
        for branch in branches:
            context.busy.enter(context.name, branch)
            stack.callback(context.busy.leave, context.name, branch)
        yield


class _Removal:
    """What has to go, as the session is stored now. SegmentInUse if a path holds it."""

    def __init__(self, handle: Handle, segment: Segment | str) -> None:
        context = handle.context
        self.body = lookups.known_body(handle, segment)
        nodes = list(context.sessions.nodes(context.name))
        roots = [node.id for node in nodes if node.segment_id == self.body.id]
        gone = set(roots)
        for node in nodes:  # parents come before children
            if node.parent in gone:
                gone.add(node.id)
        branches = context.sessions.branches(context.name)
        holders = tuple(record.name for record in branches if record.head in gone)
        if holders:
            raise SegmentInUse(
                "a branch's path holds the segment", segment=self.body.id, branches=holders
            )
        # Read before they go: forgetting states needs the ids of the paths.
        self.paths = [_suffix(handle.branch.path_to(node)) for node in roots]
        kept = {node.segment_id for node in nodes if node.id not in gone}
        segments = {node.segment_id for node in nodes if node.id in gone} - kept
        segments.add(self.body.id)
        logs: dict[str, frozenset[int]] = {}
        bodies: dict[str, bytes] = {}
        for record in branches:
            entries = context.sessions.log(context.name, record.name)
            mentions = frozenset(
                e.sequence for e in entries if codec.unpack_log(e.body).before.node in gone
            )
            if mentions:
                logs[record.name] = mentions
            branch = codec.unpack_branch(record.body)
            if branch.tip is not None and branch.tip.node in gone:
                bodies[record.name] = codec.pack_branch(codec.without_tip(branch))
        self.branches = logs.keys() | bodies.keys()
        self.scrub = Scrub(
            node_ids=frozenset(gone),
            segment_ids=frozenset(segments),
            logs=logs,
            branch_bodies=bodies,
            expected_versions={record.name: record.version for record in branches},
            tombstones=[SegmentRecord(i, codec.pack_tombstone(i)) for i in sorted(segments)],
        )


def _suffix(path: Path) -> tuple[tuple[int, ...], int]:
    """The ids of a path, and where the content of its last segment begins."""
    return path.ids, path.content_start(len(path.places) - 1)


def _holders(context: Context, body: Body) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Segments of this session, and other sessions, whose text contains the purged one's."""
    needle = (body.text if body.arguments is None else _arguments(body)).strip()
    if not needle:
        return (), ()
    here = tuple(other.id for other in lookups.all_bodies(context) if needle in _searchable(other))
    elsewhere = []
    for record in context.sessions.list():
        if record.name == context.name:
            continue
        stored = context.sessions.all_segments(record.name)
        found = (codec.unpack_segment(s.body) for s in stored)
        if any(needle in _searchable(other) for other in found if other is not None):
            elsewhere.append(record.name)
    return here, tuple(elsewhere)


def _arguments(body: Body) -> str:
    return json.dumps(body.arguments, sort_keys=True, ensure_ascii=False)


def _searchable(body: Body) -> str:
    return "\n".join((body.content, body.text, _arguments(body)))

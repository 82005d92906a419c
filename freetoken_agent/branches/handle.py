# SPDX-License-Identifier: Apache-2.0
"""The working part of a session handle: who may write, what an edit goes through, what a batch
holds back. `session.Session` is the API in front of it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from freetoken_storage.records import Sessions, Snapshots

from ..chat_templates.items import ASSISTANT_KINDS
from ..chat_templates.layout import Layout
from ..errors import InvalidEdit, SessionBusy, SessionReadOnly, TemplateUnsupported
from ..model import Model
from ..segments import Edit, ReusePlan, Segment
from . import pairing, views
from .binding import Binding
from .branch import Branch
from .codec import CallMark, SessionBody
from .earlier import EarlierPaths
from .edits import Closing
from .pairing import open_calls
from .path import Body, Path, Place, settled
from .prices import Pricing

if TYPE_CHECKING:
    from ..store import Store


class BusyBranches:
    """Branches that a generation or an agent's run of this process is writing. A run lets edits
    through, and keeps other runs out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[tuple[str, str]] = set()
        self._runs: set[tuple[str, str]] = set()

    def enter(self, session: str, branch: str) -> None:
        """SessionBusy if it is being written already."""
        with self._lock:
            self._check(session, branch)
            self._busy.add((session, branch))

    def leave(self, session: str, branch: str) -> None:
        with self._lock:
            self._busy.discard((session, branch))

    def enter_run(self, session: str, branch: str) -> None:
        """SessionBusy if another run is on it."""
        with self._lock:
            if (session, branch) in self._runs:
                raise SessionBusy(
                    f"another run is on branch {branch!r} of session {session!r}",
                    remedy="wait for its end, leave it, or fork()",
                )
            self._runs.add((session, branch))

    def leave_run(self, session: str, branch: str) -> None:
        with self._lock:
            self._runs.discard((session, branch))

    def check(self, session: str, branch: str | None = None) -> None:
        """SessionBusy if the branch, or any of the session's, is being written."""
        with self._lock:
            names = [b for s, b in self._busy if s == session and branch in (None, b)]
            for name in names:
                self._check(session, name)

    def _check(self, session: str, branch: str) -> None:
        if (session, branch) in self._busy:
            raise SessionBusy(
                f"a generation is writing branch {branch!r} of session {session!r}",
                remedy="wait for its end, cancel it, or fork()",
            )


class Backing(Protocol):
    """What a store gives its sessions: a `Database`, or the one in memory."""

    @property
    def sessions(self) -> Sessions: ...

    @property
    def snapshots(self) -> Snapshots: ...

    def get_meta(self, key: str) -> bytes | None: ...

    def set_meta(self, key: str, value: bytes) -> None: ...

    def compact(self) -> bool:
        """Rewrite the files without what was removed; False if another process holds them."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Context:
    """What all handles of one opened session share. `model` is None for a read-only opening
    without one; `layout` also where the binding forbids writing."""

    store: "Store"
    backing: Backing
    name: str
    body: SessionBody
    binding: Binding
    model: Model | None
    layout: Layout | None
    busy: BusyBranches
    owner: str  # prefix of the names under which states are pinned
    bodies: dict[str, Body] = field(default_factory=dict)  # grows: stored segments by id

    @property
    def sessions(self) -> Sessions:
        return self.backing.sessions

    @property
    def drop_thinking(self) -> bool:
        """Whether a user message drops earlier thinking, as the template would."""
        if self.layout is None or self.body.history_thinking != "template":
            return False
        return self.layout.format.report.drops_thinking


@dataclass
class Batch:
    """Edits held back until the `with` block ends. `edit` is what they came to, afterwards."""

    label: str
    path: Path
    thread: int  # the only one that may edit meanwhile
    edit: Edit | None = None
    forgets_calls: bool = False
    dropped: dict[str, Body] = field(default_factory=dict)  # made and removed inside, never stored


class Handle:
    """One branch of one opened session. Writers hold `lock`; readers look at `path`, which is
    replaced as a whole."""

    def __init__(self, context: Context, branch: Branch) -> None:
        self.context = context
        self.branch = branch
        self.lock = threading.RLock()
        self._batch: Batch | None = None
        self._dropped: dict[str, Body] = {}  # handed out by batches, but never stored
        self._pinned: list[tuple[int, ...]] = []

    @property
    def path(self) -> Path:
        """The path as this handle's edits left it, those of an unfinished batch included."""
        batch = self._batch
        return self.branch.path if batch is None else batch.path

    def dropped(self, segment: str) -> Body | None:
        """A segment that a batch handed out and removed again; the store never saw it."""
        batch = self._batch
        inside = None if batch is None else batch.dropped.get(segment)
        return inside or self._dropped.get(segment)

    def forget_dropped(self, segment: str) -> None:
        self._dropped.pop(segment, None)

    def writable(self) -> tuple[Model, Layout]:
        """SessionReadOnly or SessionBusy unless the branch may be edited."""
        model, layout = self.bound()
        self.context.busy.check(self.context.name, self.branch.name)
        if self._batch is not None and self._batch.thread != threading.get_ident():
            raise SessionBusy(
                "another thread has a batch open on this handle",
                value=self._batch.label,
                remedy="wait for its end, or give each thread a handle of its own",
            )
        return model, layout

    def bound(self) -> tuple[Model, Layout]:
        """The model and layout. SessionReadOnly without them."""
        context = self.context
        if context.model is None or context.layout is None:
            raise SessionReadOnly(
                f"session {context.name!r} is open read-only",
                value=context.binding.reason,
                remedy=context.binding.remedy,
            )
        return context.model, context.layout

    def outside_batch(self, what: str) -> None:
        if self._batch is not None:
            raise InvalidEdit(f"{what} is not possible inside a batch", remedy="end it first")

    def write(self, label: str, rewrite: Callable[[Layout, Path], Path]) -> Segment:
        """Apply an edit without pricing it; returns the last segment it added."""
        with self.lock:
            _, layout = self.writable()
            before = self.path
            after = rewrite(layout, before)
            self._accept(label, after)
        added, _ = views.changes(before, after)
        return added[-1]

    def edit(
        self,
        label: str,
        rewrite: Callable[[Layout, Path], Path],
        *,
        thinking: bool | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Apply an edit, or only say what it would do. `thinking`: as the next generation will
        ask."""
        commit = partial(self._accept, label)
        return self.edited(rewrite, commit, thinking=thinking, dry_run=dry_run)

    def edited(
        self,
        rewrite: Callable[[Layout, Path], Path],
        commit: Callable[[Path], int | None],
        *,
        thinking: bool | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """The same for who commits in a way of its own: the new path -> the log entry. Priced
        before it is committed, so that whatever raises leaves everything as it was."""
        with self.lock:
            model, layout = self.writable()
            before = self.path
            after = rewrite(layout, before)
            plan = plan_of(model, layout, after, self.earlier(before), thinking)
            made = describe(before, after, plan)
            if not made.changed or dry_run:
                return made
            return made.model_copy(update={"log_id": commit(after)})

    def earlier(self, before: Path | None = None) -> EarlierPaths:
        """Where to look for what stood in a place before; `before`: where an edit starts."""
        context = self.context
        return EarlierPaths(context.sessions, context.name, self.branch, before)

    @contextmanager
    def batch(self, label: str) -> Iterator[Batch]:
        """Hold edits back and commit them as one step; an exception drops them all."""
        with self.lock:
            self.writable()
            self.outside_batch("a batch")
            batch = self._batch = Batch(label, self.branch.path, threading.get_ident())
        try:
            yield batch
            with self.lock:
                self._batch = None
                places = [_replacing_stored(p, batch.dropped) for p in batch.path.places]
                after = settled(self.branch.path, places, batch.path.tail)
                batch.edit = self.edit(label or "batch", lambda _, __: after)
                self._dropped.update(batch.dropped)
                if batch.forgets_calls:
                    self.branch.mark_calls(())
        finally:
            with self.lock:
                self._batch = None

    def closing(self) -> Closing:
        """What becomes of what is open when more is said. A result that a run has stored enters the
        path, though the run ended before its turn came."""
        batch, path = self._batch, self.path
        marks = () if batch is not None and batch.forgets_calls else self.branch.calls
        results = {}
        for mark in marks:
            if mark.state in ("finished", "denied") and mark.segment in path.index:
                call = path.places[path.index[mark.segment]]
                text = mark.text if mark.live is None else mark.live
                results[call.call_id] = pairing.answer(call, text, error=mark.error)
        return Closing(results, self.context.drop_thinking)

    def kept_calls(self, after: Path) -> list[CallMark]:
        """The marks of those calls that are open on `after` too. An edited call is another one."""
        opened = {after.places[index].body.id for index in open_calls(after.places)}
        return [mark for mark in self.branch.calls if mark.segment in opened]

    def forgetting_calls(self, made: Edit) -> Edit:
        """`made`, after which open calls count as new; in a batch, when it ends."""
        with self.lock:
            if self._batch is not None:
                self._batch.forgets_calls = True
            else:
                self.branch.mark_calls(())
        return made

    def pin(self, segment: str, *, pinned: bool) -> None:
        """Protect the state at the end of a segment, or let go of it. Durable, and no undo step.
        SessionReadOnly, SessionBusy."""
        with self.lock:
            self.writable()
            self.outside_batch("pin()")
            pins = [name for name in self.branch.pins if name != segment]
            self.branch.set_pins([*pins, segment] if pinned else pins)
            self.refresh_pins()

    def refresh_pins(self) -> None:
        """Tell the model which states this branch protects, if that changed."""
        model, path = self.context.model, self.branch.path
        if model is None or self.context.layout is None:
            return
        ends = [path.ends[path.index[s]] for s in self.branch.pins if s in path.index]
        pinned = [path.ids[:end] for end in ends if end <= model.context_limit]
        if pinned != self._pinned:
            model.pin(f"{self.context.owner}/{self.branch.name}", pinned)
            self._pinned = pinned

    def _accept(self, label: str, after: Path) -> int | None:
        if self._batch is not None:
            bodies = (place.body for place in self._batch.path.places)
            stored = self.context.bodies
            gone = {b.id: b for b in bodies if b.id not in after.index and b.id not in stored}
            self._batch.dropped.update(gone)
            self._batch.path = after
            return self.branch.next_log_id
        if after is self.branch.path:
            return None
        log_id = self.branch.commit(after, label, calls=self.kept_calls(after))
        self.refresh_pins()
        return log_id


def _replacing_stored(place: Place, dropped: Mapping[str, Body]) -> Place:
    """A place whose segment replaces what is stored, not what the batch passed through."""
    replaced = place.body.replaces
    while replaced is not None and replaced in dropped:
        replaced = dropped[replaced].replaces
    if replaced == place.body.replaces:
        return place
    return replace(place, body=replace(place.body, replaces=replaced))


def describe(before: Path, after: Path, plan: ReusePlan) -> Edit:
    """The difference of two paths as an edit that has not been logged."""
    added, removed = views.changes(before, after)
    return Edit(added=tuple(added), removed=tuple(removed), plan=plan, changed=after is not before)


def why_closed(path: Path) -> str | None:
    """Why there is nothing for the model to write at this head; None if there is."""
    last = path.last
    if last is None:
        return "the path is empty"
    if open_calls(path.places):
        return "tool calls wait for their results"
    if last.kind in ASSISTANT_KINDS and path.tail == "closed":
        return "the assistant turn is closed"
    return None


def next_ids(layout: Layout, path: Path, thinking: bool | None) -> tuple[int, ...]:
    """What a generation would forward: the path and its opener; at a closed head the path alone,
    which is what `warm` forwards."""
    if why_closed(path) is not None:
        return path.ids
    try:
        return (*path.ids, *layout.opener(path, thinking).ids)
    except TemplateUnsupported:  # generate() will say so; the path itself still has a price
        return path.ids


def plan_of(
    model: Model,
    layout: Layout,
    path: Path,
    earlier: EarlierPaths,
    thinking: bool | None = None,
) -> ReusePlan:
    return Pricing(model, path, next_ids(layout, path, thinking), earlier).plan()

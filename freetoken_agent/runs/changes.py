# SPDX-License-Identifier: Apache-2.0
"""Changes of a path as data: what they are is said first, priced, and then made in one edit."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..branches import edits, lookups, pairing
from ..branches.handle import Handle
from ..branches.path import New, Path, Slot, Tail
from ..branches.views import kind_of
from ..chat_templates.items import Kind
from ..chat_templates.layout import Layout
from ..errors import InvalidEdit
from ..segments import Content, Segment, as_text

_INSERTED = ("user", "text", "thinking")


@dataclass(frozen=True)
class Replace:
    """A segment gets another content. Equal content is no change. Not for calls and tool lists."""

    segment: Segment | str  # it, or its id
    content: Content  # the new one


@dataclass(frozen=True)
class Remove:
    """A segment goes; of a call and its result both."""

    segment: Segment | str  # it, or its id


@dataclass(frozen=True)
class InsertBefore:
    """A content comes before a segment, which may be one that goes. `kind`: user, assistant or
    thinking. Several before one segment keep their order."""

    segment: Segment | str  # it, or its id
    kind: str
    content: Content  # what comes before it


Change = Replace | Remove | InsertBefore
"""A change as data, for `Session.apply_changes` and the rules of a context."""


def rewritten(handle: Handle, layout: Layout, path: Path, changes: Sequence[Change]) -> Path:
    """The path with these changes, laid out once. Every segment is named as `path` has it."""
    texts: dict[int, str] = {}
    gone: set[int] = set()
    inserted: dict[int, list[New]] = {}
    for change in changes:
        index = lookups.place_of(handle, path, change.segment)
        match change:
            case Replace():
                texts[index] = _text(path, index, as_text(change.content))
            case Remove():
                gone.add(index)
            case InsertBefore():
                edits.check_position(path, index)
                inserted.setdefault(index, []).append(_new(change))
    gone = pairing.with_partners(path, gone)
    slots: list[Slot] = []
    for index, place in enumerate(path.places):
        slots += inserted.get(index, ())
        if index not in gone:
            text = texts.get(index, place.body.content)
            same = text == place.body.content
            slots.append(place if same else edits.successor(place, text=text))
    return layout.rewrite(path, slots, _tail(path, slots, gone))


def _text(path: Path, index: int, text: str) -> str:
    kind = path.kinds[index]
    if kind in ("tool_call", "tools"):
        raise InvalidEdit(
            "calls and tool lists are not text", value=kind, remedy="replace() or set_tools()"
        )
    return text


def _new(change: InsertBefore) -> New:
    kind = kind_of(change.kind)
    if kind not in _INSERTED:
        raise InvalidEdit(
            "this kind cannot be inserted", value=change.kind, limit="user, assistant, thinking"
        )
    made: Kind = "user" if kind == "user" else "text" if kind == "text" else "thinking"
    return New(made, as_text(change.content))


def _tail(path: Path, slots: Sequence[Slot], gone: set[int]) -> Tail:
    """How the turn stands behind what is left."""
    if not slots:
        return "closed"
    last = slots[-1]
    if isinstance(last, New) and last.replaces is None:
        return edits.tail_after(last.kind)
    kept = max(index for index in range(len(path.places)) if index not in gone)
    return path.tail_at(kept + 1)

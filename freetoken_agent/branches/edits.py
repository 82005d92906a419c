# SPDX-License-Identifier: Apache-2.0
"""Every edit as a function from a path to a path. Pure: nothing is stored, nothing is priced.

A function returns the path it was given when there is nothing to change.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..chat_templates.items import Item, Kind
from ..chat_templates.layout import Layout
from ..errors import InvalidEdit, PairingError
from ..tooling import json_values
from . import pairing
from .history import match_history
from .path import New, Path, Place, Slot, Tail

KINDS: tuple[Kind, ...] = (
    "system",
    "tools",
    "user",
    "thinking",
    "text",
    "tool_call",
    "tool_result",
)
_CALL_KINDS = frozenset(("tool_call", "tool_result"))


@dataclass(frozen=True)
class Closing:
    """What becomes of what went before when more is said. `results`: by call id, those of open
    calls that are known; the other calls are interrupted. `drop_thinking`: a user message removes
    the thoughts before it."""

    results: Mapping[str | None, New] = field(default_factory=dict)
    drop_thinking: bool = False


CLOSING = Closing()


def tail_after(kind: Kind, *, open: bool = False) -> Tail:
    """How the turn stands behind an appended content. A thought alone never ends a turn."""
    if open:
        return "partial"
    return "open" if kind == "thinking" else "closed"


def append(
    layout: Layout,
    path: Path,
    news: Sequence[New],
    *,
    tail: Tail | None = None,
    closing: Closing = CLOSING,
) -> Path:
    """Add contents behind the head in one run. Open calls are closed, unless what comes is a
    parallel call or a result."""
    if not news:
        return path
    slots: list[Slot] = list(path.places)
    last_user = max((i for i, new in enumerate(news) if new.kind == "user"), default=None)
    if closing.drop_thinking and last_user is not None:
        slots = [slot for slot in slots if slot.kind != "thinking"]
        news = [new for i, new in enumerate(news) if i > last_user or new.kind != "thinking"]
    first = news[0]
    if path.tail != "closed":
        first = replace(first, joins=True)
    for new in (first, *news[1:]):
        pairing.add(slots, new, closing.results)
    return layout.rewrite(path, slots, tail_after(news[-1].kind) if tail is None else tail)


def append_items(
    layout: Layout, path: Path, items: Sequence[Item], closing: Closing = CLOSING
) -> Path:
    """Add what a message list said. A leading system text becomes the preamble if there is none."""
    news = [_from_item(item, before) for item, before in zip(items, (None, *items), strict=False)]
    if news and news[0].kind == "system" and starts_preamble(path):
        path = set_preamble(layout, path, "system", news[0].text)
        news = news[1:]
    return append(layout, path, news, closing=closing)


def sync_items(
    layout: Layout, path: Path, items: Sequence[Item], closing: Closing = CLOSING
) -> Path:
    """Keep the longest history that the list repeats, and replace what follows by its rest."""
    match = match_history(path.items(), items)
    if match.system is not None:
        path = set_preamble(layout, path, "system", match.system)
        match = match_history(path.items(), items)
    assert match.system is None, "the system text was just set"
    kept = path.cut(match.kept)
    if kept.last is not None and not match.goes_on and (match.rest or kept is not path):
        kept = Path(kept.places, tail_after(kept.last.kind))  # where the list ends a message
    return append_items(layout, kept, match.rest, closing=closing)


def append_result(layout: Layout, path: Path, call: int, text: str, *, error: bool) -> Path:
    """Answer an open call. PairingError if it has a result."""
    return append(layout, path, [pairing.answer(path.places[call], text, error=error)])


def replace_text(layout: Layout, path: Path, index: int, text: str) -> Path:
    """A new version of any segment but a call."""
    old = path.places[index]
    if old.kind == "tool_call":
        raise InvalidEdit(
            "a tool call has arguments, not content", value=old.body.id, remedy="pass arguments="
        )
    if old.body.content == text:
        return path
    if old.kind == "tools" and json_values.equal(json.loads(old.body.content), json.loads(text)):
        return path
    new = successor(old, text=text)
    return layout.rewrite(path, _with(path, index, new), path.tail)


def replace_arguments(layout: Layout, path: Path, index: int, arguments: Mapping[str, Any]) -> Path:
    """The same call with other arguments; its result becomes stale."""
    old = path.places[index]
    if old.kind != "tool_call":
        raise InvalidEdit(
            "only a tool call has arguments", value=old.kind, remedy="pass the new content"
        )
    if json_values.equal(old.body.arguments, arguments):
        return path
    slots = _with(path, index, successor(old, arguments=arguments))
    result = pairing.result_of(path, index)
    if result is not None:
        slots[result] = replace(path.places[result], stale=True)
    return layout.rewrite(path, slots, path.tail)


def insert(layout: Layout, path: Path, position: int, new: New) -> Path:
    """Put a content before the place at `position`. Inside an assistant turn it joins the turn."""
    if new.kind in _CALL_KINDS:
        raise PairingError(
            "a call and its result are inserted together", value=new.kind, remedy="insert_call()"
        )
    if new.kind == "system" and position <= path.preamble_length:
        if "system" not in path.kinds[: path.preamble_length]:
            return set_preamble(layout, path, "system", new.text)
    if position == len(path.places) and not pairing.open_calls(path.places):
        return append(layout, path, [new])
    check_position(path, position)
    slots: list[Slot] = list(path.places)
    slots.insert(position, replace(new, joins=path.places[position].joins))
    return layout.rewrite(path, slots, path.tail)


def insert_call(layout: Layout, path: Path, position: int, call: New, text: str) -> Path:
    """Put a call with its result before the place at `position`."""
    check_position(path, position)
    result = pairing.answer(call, text, error=False)
    if position == len(path.places):
        return append(layout, path, [call, result])
    slots: list[Slot] = list(path.places)
    slots[position:position] = [replace(call, joins=path.places[position].joins), result]
    return layout.rewrite(path, slots, path.tail)


def delete(layout: Layout, path: Path, indices: set[int]) -> Path:
    """Remove places; of a call and its result both."""
    gone = pairing.with_partners(path, indices)
    if not gone:
        return path
    kept = [i for i in range(len(path.places)) if i not in gone]
    tail = path.tail_at(kept[-1] + 1) if kept else "closed"
    return layout.rewrite(path, [path.places[i] for i in kept], tail)


def drop(layout: Layout, path: Path, kind: str, keep_turns: int) -> Path:
    """Remove every segment of a kind that is not in the last `keep_turns` turns."""
    if kind not in KINDS:
        raise InvalidEdit("no such kind", value=kind, limit=", ".join(KINDS))
    first_kept = path.num_turns - whole("keep_turns", keep_turns, least=0)
    return delete(
        layout,
        path,
        {
            i
            for i, (place, turn) in enumerate(zip(path.places, path.turns, strict=True))
            if place.kind == kind and (turn is None or turn < first_kept)
        },
    )


def whole(name: str, value: int, *, least: int) -> int:
    """A count that a caller gave. InvalidEdit unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidEdit(f"{name} must be a whole number", value=value, limit=f"at least {least}")
    return value


def turns_start(path: Path, turns: int) -> int:
    """Where the last `turns` turns begin."""
    if whole("turns", turns, least=1) > path.num_turns:
        raise InvalidEdit(
            "the path does not have that many turns", value=turns, limit=f"1 to {path.num_turns}"
        )
    return path.turns.index(path.num_turns - turns)


def cut(layout: Layout, path: Path, length: int) -> Path:
    """Keep the first `length` places. A cut inside the preamble lays the rest of it out again."""
    if 0 < length < path.preamble_length:
        return layout.rewrite(path, path.places[:length], "closed")
    return path.cut(length)


def starts_preamble(path: Path) -> bool:
    """Whether a system text behind the head would be the preamble's."""
    length = path.preamble_length
    return length == len(path.places) and "system" not in path.kinds


def set_preamble(
    layout: Layout,
    path: Path,
    kind: Kind,
    text: str | None,
    *,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Give the path this system text or tool list, or none. The preamble is laid out whole."""
    length = path.preamble_length
    parts: dict[Kind, Slot] = {place.kind: place for place in path.places[:length]}
    old = parts.get(kind)
    if text is None:
        if old is None:
            return path
        del parts[kind]
    elif isinstance(old, Place):
        return replace_text(layout, path, path.index[old.body.id], text)
    else:
        parts[kind] = New(kind, text, meta=meta or {})
    slots = [parts[k] for k in layout.preamble_order if k in parts]
    return layout.rewrite(path, [*slots, *path.places[length:]], path.tail)


def _from_item(item: Item, before: Item | None) -> New:
    return New(
        kind=item.kind,
        text=item.text,
        name=item.name,
        arguments=item.arguments,
        call_id=item.call_id,
        error=item.error,
        joins=before is not None and before.open,
    )


def _with(path: Path, index: int, slot: Slot) -> list[Slot]:
    slots: list[Slot] = list(path.places)
    slots[index] = slot
    return slots


def successor(
    old: Place, *, text: str | None = None, arguments: Mapping[str, Any] | None = None
) -> New:
    """The next version of a place's content."""
    body = old.body
    return New(
        kind=body.kind,
        text=body.content if text is None else text,
        name=body.name,
        arguments=body.arguments if arguments is None else arguments,
        call_id=body.call_id,
        error=body.error if body.source != "interrupted" else False,
        joins=old.joins,
        replaces=body,
        meta=body.meta,
    )


def check_position(path: Path, position: int) -> None:
    """PairingError or InvalidEdit if nothing can be inserted before the place at `position`."""
    pairing.check_gap(path, position)
    if position < path.preamble_length:
        raise InvalidEdit(
            "nothing can stand inside or before the preamble",
            value=position,
            remedy="use set_system() or set_tools(), or insert after it",
        )

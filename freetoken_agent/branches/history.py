# SPDX-License-Identifier: Apache-2.0
"""How much of a path a message list repeats (rule 9). Pure; knows no session.

A client resends what `to_messages` once gave it, re-serialised by its own habits. A call with a
known id and equal JSON matches whatever its spelling; a list without reasoning matches stored
thoughts; contents that one message carries (a text cut and continued) match as the one text they
were emitted as.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..chat_templates.items import Item
from ..tooling import json_values
from .pairing import INTERRUPTED


@dataclass(frozen=True)
class Match:
    """`kept`: how many items of the path stay. `rest`: what the list says after them. `goes_on`:
    whether `rest` begins inside the message that the last kept item belongs to. `system`: the
    list's leading system text where it differs from the path's (`rest` then begins after the
    preamble, and nothing behind the preamble was compared)."""

    kept: int
    rest: tuple[Item, ...]
    system: str | None = None
    goes_on: bool = False


def match_history(path: Sequence[Item], incoming: Sequence[Item]) -> Match:
    """The longest beginning of `incoming` that the path already holds. A list without a system
    text keeps the path's; tools are not in lists and stay."""
    preamble = 0
    while preamble < len(path) and path[preamble].kind in ("system", "tools"):
        preamble += 1
    stored = [item.text for item in path[:preamble] if item.kind == "system"]
    skip = 1 if incoming and incoming[0].kind == "system" else 0
    if skip and stored[:1] != [incoming[0].text]:
        return Match(preamble, tuple(incoming[1:]), incoming[0].text)
    kept, position = preamble, preamble
    for index in range(skip, len(incoming)):
        end = _repeats(path, position, incoming[index])
        if end is None:
            goes_on = index > 0 and incoming[index - 1].open
            return Match(kept, tuple(incoming[index:]), goes_on=goes_on)
        kept = position = end
    return Match(kept, ())


def _repeats(path: Sequence[Item], start: int, item: Item) -> int | None:
    """Where the path's contents that equal `item` end; None if they do not."""
    while start < len(path) and _silent(path[start], item):
        start += 1
    if start == len(path) or path[start].kind != item.kind:
        return None
    stored = path[start]
    if item.kind == "tool_call":
        same = (stored.call_id, stored.name) == (item.call_id, item.name)
        same = same and json_values.equal(stored.arguments or {}, item.arguments or {})
        return start + 1 if same else None
    if item.kind == "tool_result":
        same = (stored.call_id, stored.text) == (item.call_id, item.text)
        return start + 1 if same else None
    end = start + 1
    text = stored.text
    while (
        end < len(path)
        and path[end].kind == item.kind
        and (path[end - 1].open or path[end - 1].partial)
    ):
        text += path[end].text
        end += 1
    return end if text == item.text else None


def _silent(stored: Item, item: Item) -> bool:
    """Whether a stored content may be missing from the list: a thought, an empty text, or the
    result of a call that nobody answered."""
    if stored.kind == "tool_result":
        unanswered = stored.error and stored.text == INTERRUPTED
        return unanswered and (item.kind != "tool_result" or stored.call_id != item.call_id)
    if stored.kind == item.kind:
        return False
    return stored.kind == "thinking" or (stored.kind == "text" and not stored.text)

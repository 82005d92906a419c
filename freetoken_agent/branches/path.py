# SPDX-License-Identifier: Apache-2.0
"""A path: the contents of a branch in order, each with the gap before it. Immutable, no I/O.

    gap₀ content₀ gap₁ content₁ … gapₙ contentₙ          the token path is their concatenation

A `Place` is a segment at a position: its gap, and what belongs to the position rather than to the
segment. Whether the assistant turn at the end is still open belongs to the path (`tail`), because
it is a property of where one stopped: cutting a path inside a turn opens it, without new nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from ..chat_templates.items import ASSISTANT_KINDS, Item, Kind
from ..segments import Source

Tail = Literal["closed", "open", "partial"]
"""The assistant turn at a head: `open` goes on after a complete content (a thought, then the
answer), `partial` continues the last content itself. `closed` also where no such turn is last."""

# Pairs that are one message of the assistant even when they were added one by one, as in
# items.same_message: a thought, its text, its calls.
_NATURAL = frozenset(
    (
        ("thinking", "text"),
        ("thinking", "tool_call"),
        ("text", "tool_call"),
        ("tool_call", "tool_call"),
    )
)
PREAMBLE_KINDS = frozenset(("system", "tools"))
PREAMBLE_LENGTH = len(PREAMBLE_KINDS)  # at most


@dataclass(frozen=True)
class Body:
    """A segment as stored: everything that does not depend on where it stands."""

    id: str
    kind: Kind
    content: str
    text: str
    ids: tuple[int, ...]
    origin: str
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    call_id: str | None = None
    error: bool = False
    replaces: str | None = None
    source: Source = "caller"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def item(self, tail: Tail) -> Item:
        """The segment as the template sees it when the turn stands like `tail` behind it."""
        made = self._items.get(tail)
        if made is None:
            made = self._items[tail] = Item(
                kind=self.kind,
                text="" if self.kind == "tool_call" else self.content,
                name=self.name,
                arguments=self.arguments,
                call_id=self.call_id,
                open=tail != "closed",
                partial=tail == "partial",
                error=self.error,
                ids=self.ids,
            )
        return made

    @cached_property
    def _items(self) -> dict[Tail, Item]:
        return {}


@dataclass(frozen=True)
class Place:
    """A segment at a position. `joins`: it continues the assistant turn of its left neighbour.
    `node` is the store's id for the place; None until it is committed."""

    body: Body
    gap_ids: tuple[int, ...]
    gap_text: str
    joins: bool = False
    stale: bool = False
    node: int | None = None

    @property
    def kind(self) -> Kind:
        return self.body.kind

    @property
    def name(self) -> str | None:
        return self.body.name

    @property
    def call_id(self) -> str | None:
        return self.body.call_id


@dataclass(frozen=True)
class New:
    """A content to be laid out. `joins`: it continues the turn of its left neighbour also where
    that is not natural for the two kinds. `replaces`: the body it takes the place of."""

    kind: Kind
    text: str = ""
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    call_id: str | None = None
    error: bool = False
    joins: bool = False
    replaces: Body | None = None
    source: Source = "caller"
    meta: Mapping[str, Any] = field(default_factory=dict)


Slot = Place | New
"""What an edited path is to hold: a place that stays, or a content to be laid out."""


def natural(left: Kind, right: Kind) -> bool:
    """Whether `right` continues the assistant turn of `left` unless told otherwise."""
    return (left, right) in _NATURAL


def both_assistant(left: Kind, right: Kind) -> bool:
    return left in ASSISTANT_KINDS and right in ASSISTANT_KINDS


@dataclass(frozen=True)
class Path:
    """Places from the root to a head. Every method returns new values; nothing is mutated."""

    places: tuple[Place, ...] = ()
    tail: Tail = "closed"

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The token path."""
        out: list[int] = []
        for place in self.places:
            out += place.gap_ids
            out += place.body.ids
        return tuple(out)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each place the position after its last token."""
        return tuple(accumulate(len(p.gap_ids) + len(p.body.ids) for p in self.places))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Segment id -> its place."""
        return {place.body.id: i for i, place in enumerate(self.places)}

    @cached_property
    def origins(self) -> Mapping[str, int]:
        """Origin id -> the place of its version on this path."""
        return {place.body.origin: i for i, place in enumerate(self.places)}

    @cached_property
    def turns(self) -> tuple[int | None, ...]:
        """For each place the number of its turn; None before the first user message."""
        numbers: list[int | None] = []
        turn: int | None = None
        for place in self.places:
            if place.kind == "user":
                turn = 0 if turn is None else turn + 1
            numbers.append(turn)
        return tuple(numbers)

    @property
    def num_turns(self) -> int:
        last = self.turns[-1] if self.places else None
        return 0 if last is None else last + 1

    @cached_property
    def preamble_length(self) -> int:
        """How many leading places form the preamble: a system text and tools, each at most once."""
        return preamble_length(self.kinds)

    @property
    def anchors(self) -> tuple[int, ...]:
        """Segment ends: positions at which keeping a state is of use to later edits."""
        return tuple(end for end in self.ends if end)

    @property
    def lasting_anchors(self) -> tuple[int, ...]:
        """The ends of system and tools, from where every path with the same ones goes on."""
        return tuple(end for end in self.ends[: self.preamble_length] if end)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(place.kind for place in self.places)

    @property
    def last(self) -> Place | None:
        return self.places[-1] if self.places else None

    def start(self, index: int) -> int:
        """The position of the first token of a place's gap."""
        return self.ends[index - 1] if index else 0

    def content_start(self, index: int) -> int:
        """The position of the first token of a place's content."""
        return self.start(index) + len(self.places[index].gap_ids)

    def at(self, position: int) -> int | None:
        """The place whose gap or content holds the token at `position`; None beyond the end."""
        for index, end in enumerate(self.ends):
            if position < end:
                return index
        return None

    def tail_at(self, length: int) -> Tail:
        """The tail of this path cut to its first `length` places."""
        if length == len(self.places):
            return self.tail
        if length == 0 or not self.places[length].joins:
            return "closed"
        return "partial" if continues(self.kinds[length - 1], self.kinds[length]) else "open"

    def cut(self, length: int) -> "Path":
        """The first `length` places; inside an assistant turn this leaves the turn open."""
        if length == len(self.places):
            return self
        return Path(self.places[:length], self.tail_at(length))

    def extended(self, places: Sequence[Place], tail: Tail) -> "Path":
        """With `places` (laid out already) behind the last one."""
        return Path((*self.places, *places), tail)

    def committed(self, start: int, node_ids: Sequence[int]) -> "Path":
        """The places from `start` on have been given these node ids."""
        named = (
            Place(p.body, p.gap_ids, p.gap_text, p.joins, p.stale, node)
            for p, node in zip(self.places[start:], node_ids, strict=True)
        )
        return Path((*self.places[:start], *named), self.tail)

    def items(self) -> list[Item]:
        """The path as the template sees it."""
        out = []
        for i, place in enumerate(self.places):
            if i + 1 < len(self.places):
                follower = self.places[i + 1]
                tail = turn_state(place.kind, follower.kind, joins=follower.joins)
            else:  # a text has no closer of its own: an open turn at a text continues the text
                tail = "partial" if self.tail == "open" and place.kind == "text" else self.tail
            out.append(place.body.item(tail))
        return out


def settled(path: Path, places: Sequence[Place], tail: Tail) -> Path:
    """A path of these places that keeps the node ids of `path` up to the first difference, and none
    behind it. `path` itself where nothing differs."""
    same = 0
    for old, new in zip(path.places, places, strict=False):
        if old is not new and replace(new, node=old.node) != old:
            break
        same += 1
    if same == len(places) == len(path.places) and tail == path.tail:
        return path
    fresh = (
        p if p.node is None else Place(p.body, p.gap_ids, p.gap_text, p.joins, p.stale)
        for p in places[same:]
    )
    return Path((*path.places[:same], *fresh), tail)


def preamble_length(kinds: Sequence[Kind]) -> int:
    length = 0
    while length < len(kinds) and kinds[length] in PREAMBLE_KINDS:
        if kinds[length] in kinds[:length]:
            break
        length += 1
    return length


def continues(left: Kind, right: Kind) -> bool:
    """Whether two contents of one turn are one content in two segments: no gap between them."""
    return left == right and left in ("thinking", "text")


def turn_state(left: Kind, right: Kind, *, joins: bool) -> Tail:
    """How the turn stands after `left` when `right` follows."""
    if not joins:
        return "closed"
    return "partial" if continues(left, right) else "open"


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two paths share."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    low, high = 0, count
    while low + 1 < high:  # slices compare much faster than single ids
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low

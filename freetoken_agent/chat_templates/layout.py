# SPDX-License-Identifier: Apache-2.0
"""From contents to ids: lays out what an edit touches and keeps everything else byte for byte.

An edit is given as the sequence of slots that the path shall have: places that stay, and new
contents. Only runs of slots whose own content or left neighbour changed are laid out again; within
a run the ids of contents that stay are kept, and only their gap is derived anew.
"""

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..branches.path import (
    PREAMBLE_LENGTH,
    Body,
    New,
    Path,
    Place,
    Slot,
    Tail,
    both_assistant,
    natural,
    preamble_length,
    settled,
    turn_state,
)
from ..errors import UnsupportedContent
from ..template import ChatFormat
from ..tokenizers.tokenizer import Tokenizer
from .items import Item, Kind, Opener, Options, Piece

_DECODE_CONTEXT = 8  # predecessors a decoder may look at to spell an id
_ID_ALPHABET = string.ascii_lowercase + string.digits
_CALL_ALPHABET = string.ascii_letters + string.digits


def new_segment_id() -> str:
    """12 characters, 62 random bits: collisions within a session are not a practical matter."""
    return _drawn(_ID_ALPHABET, 12)


def new_call_id() -> str:
    """9 alphanumerics, the shape every template with call ids accepts."""
    return _drawn(_CALL_ALPHABET, 9)


def _drawn(alphabet: str, count: int) -> str:
    """One draw for all characters: each one lets go of the interpreter, and may have to wait."""
    number = secrets.randbelow(len(alphabet) ** count)
    characters = []
    for _ in range(count):
        number, place = divmod(number, len(alphabet))
        characters.append(alphabet[place])
    return "".join(characters)


@dataclass(frozen=True)
class Layout:
    """A chat format, its tokenizer and the options a session fixed at creation."""

    format: ChatFormat
    tokenizer: Tokenizer
    options: Options

    @property
    def preamble_order(self) -> tuple[Kind, Kind]:
        """How the preamble's two kinds follow each other on a path."""
        return self.format.preamble_order

    def rewrite(self, path: Path, slots: Sequence[Slot], tail: Tail) -> Path:
        """The path with these slots. TemplateUnsupported if the template refuses one of them.

        Returns `path` itself when nothing changed.
        """
        start, stop = _window(path, slots)
        for slot in slots[start:stop]:
            if isinstance(slot, New):
                _check_text(slot)
        joins = {i: _joins(path, slots, i) for i in range(start, stop)}
        touched = _touched(path, slots, joins)
        items = _items(slots[: max(touched, default=-1) + 2], joins, tail, whole=len(slots))
        places: list[Place] = []
        for run in _runs(touched):
            places += _kept(slots[len(places) : run.start])
            pieces = self.format.layout(items[: run.stop], start=run.start, options=self.options)
            for index, piece in zip(run, pieces, strict=True):
                place = self._place(slots[index], piece, joins.get(index), ids_before(places))
                items[index] = replace(items[index], ids=place.body.ids)
                places.append(place)
        places += _kept(slots[len(places) :])
        return settled(path, places, tail)

    def opener(self, path: Path, thinking: bool | None) -> Opener:
        """What stands between the head and what the model writes next."""
        return self.format.opener(path.items(), thinking=thinking, options=self.options)

    def text_of(self, ids: Sequence[int], before: Sequence[int]) -> str:
        """The ids decoded in the context of their predecessors."""
        return self.tokenizer.decode(ids, after=before[-_DECODE_CONTEXT:]) if ids else ""

    def _place(
        self, slot: Slot, piece: Piece, joins: bool | None, before: tuple[int, ...]
    ) -> Place:
        gap_text = self.text_of(piece.gap_ids, before)
        joins = slot.joins if joins is None else joins
        if isinstance(slot, Place):
            return replace(slot, gap_ids=piece.gap_ids, gap_text=gap_text, joins=joins)
        body = self._body(slot, piece, (*before, *piece.gap_ids))
        return Place(body, piece.gap_ids, gap_text, joins)

    def _body(self, new: New, piece: Piece, before: tuple[int, ...]) -> Body:
        fresh = new_segment_id()
        return Body(
            id=fresh,
            kind=new.kind,
            content=new.text,
            text=self.text_of(piece.ids, before),
            ids=piece.ids,
            origin=new.replaces.origin if new.replaces else fresh,
            name=new.name,
            arguments=new.arguments,
            call_id=new.call_id,
            error=new.error,
            replaces=new.replaces.id if new.replaces else None,
            source=new.source,
            meta=new.meta,
        )


def _check_text(new: New) -> None:
    """UnsupportedContent for text that no encoder takes: half of a surrogate pair."""
    arguments = "" if new.arguments is None else json.dumps(new.arguments, ensure_ascii=False)
    for text in (new.text, new.name or "", new.call_id or "", arguments):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedContent(
                "the content holds half of a surrogate pair",
                value=ascii(text[error.start : error.end]),
                remedy="decode the text again, or replace the character",
            ) from error


def ids_before(places: Sequence[Place]) -> tuple[int, ...]:
    """The last few ids of what is laid out so far."""
    out: tuple[int, ...] = ()
    for place in reversed(places):
        out = (*place.gap_ids, *place.body.ids, *out)
        if len(out) >= _DECODE_CONTEXT:
            break
    return out[-_DECODE_CONTEXT:]


def _window(path: Path, slots: Sequence[Slot]) -> tuple[int, int]:
    """The slots that are new, that changed, or whose left neighbour did: [start, stop)."""
    old = path.places
    shorter = min(len(old), len(slots))
    start = 0
    while start < shorter and slots[start] is old[start]:
        start += 1
    same = 0
    while same < shorter - start and slots[-1 - same] is old[-1 - same]:
        same += 1
    return start, min(len(slots) - same + 1, len(slots))


def _runs(indices: set[int]) -> list[range]:
    """Maximal runs of consecutive indices, in order."""
    runs: list[range] = []
    for index in sorted(indices):
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def _kept(slots: Sequence[Slot]) -> list[Place]:
    """Slots that are not laid out again, so they are places."""
    kept = [slot for slot in slots if isinstance(slot, Place)]
    assert len(kept) == len(slots), "a new content must be laid out"
    return kept


def _same_neighbour(path: Path, slots: Sequence[Slot], index: int) -> bool:
    """Whether the place at `index` stays and has the left neighbour it had."""
    slot = slots[index]
    if isinstance(slot, New):
        return False
    old = path.index[slot.body.id]
    if index == 0 or old == 0:
        return index == old
    left = slots[index - 1]
    return isinstance(left, Place) and left.body.id == path.places[old - 1].body.id


def _joins(path: Path, slots: Sequence[Slot], index: int) -> bool:
    if index == 0:
        return False
    left, right = slots[index - 1], slots[index]
    if not both_assistant(left.kind, right.kind):
        return False
    if isinstance(right, Place) and _same_neighbour(path, slots, index):
        return right.joins
    return right.joins or natural(left.kind, right.kind)


def _touched(path: Path, slots: Sequence[Slot], joins: Mapping[int, bool]) -> set[int]:
    """Slots to lay out again, among those of the window. A changed preamble is laid out whole,
    with what follows it."""
    touched = {
        i
        for i, joined in joins.items()
        if isinstance(slots[i], New)
        or slots[i].joins != joined
        or not _same_neighbour(path, slots, i)
    }
    if min(touched, default=len(slots)) <= PREAMBLE_LENGTH:
        length = preamble_length([slot.kind for slot in slots[: PREAMBLE_LENGTH + 1]])
        kept = [slot.body.id for slot in slots[:length] if isinstance(slot, Place)]
        before = [place.body.id for place in path.places[: path.preamble_length]]
        if len(kept) != length or kept != before:
            touched.update(range(min(length + 1, len(slots))))
    return touched


def _items(
    slots: Sequence[Slot], joins: Mapping[int, bool], tail: Tail, *, whole: int
) -> list[Item]:
    """The first slots as the template sees them; there are `whole` slots in all."""
    items = []
    for i, slot in enumerate(slots):
        state = tail
        if i + 1 < len(slots):
            follower = slots[i + 1]
            joined = joins.get(i + 1, follower.joins)
            state = turn_state(slot.kind, follower.kind, joins=joined)
        elif len(slots) == whole and tail == "open" and slot.kind == "text":
            state = "partial"
        items.append(slot.body.item(state) if isinstance(slot, Place) else _item(slot, state))
    return items


def _item(new: New, state: Tail) -> Item:
    return Item(
        kind=new.kind,
        text=new.text,
        name=new.name,
        arguments=new.arguments,
        call_id=new.call_id,
        open=state != "closed",
        partial=state == "partial",
        error=new.error,
    )

# SPDX-License-Identifier: Apache-2.0
"""Which result answers which call. A path holds a call without a result only at its end.

… call₁ call₂ result₁ result₂ …      one group: parallel calls, then results in call order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import PairingError
from .path import New, Path, Slot

INTERRUPTED = "Interrupted: this call was not completed."
"""The fixed text of the result that closes a call nobody answered."""


@dataclass(frozen=True)
class Pair:
    """Positions of a call and of its result; `result` is None while the call is open."""

    call: int
    result: int | None


def pairs(slots: Sequence[Slot]) -> list[Pair]:
    """In call order. A call id may come again later; the nearest open call before is meant."""
    found: list[Pair] = []
    waiting: dict[str | None, int] = {}
    for index, slot in enumerate(slots):
        if slot.kind == "tool_call":
            waiting[slot.call_id] = len(found)
            found.append(Pair(index, None))
        elif slot.kind == "tool_result":
            position = waiting.pop(slot.call_id)
            found[position] = Pair(found[position].call, index)
    return found


def last_group(slots: Sequence[Slot]) -> list[Pair]:
    """The pairs of the calls and results at the very end."""
    start = len(slots)
    while start and slots[start - 1].kind in ("tool_call", "tool_result"):
        start -= 1
    return [
        Pair(start + p.call, None if p.result is None else start + p.result)
        for p in pairs(slots[start:])
    ]


def open_calls(slots: Sequence[Slot]) -> list[int]:
    """Positions of the calls at the end that have no result yet."""
    return [pair.call for pair in last_group(slots) if pair.result is None]


def answer(call: Slot, text: str, *, error: bool) -> New:
    """A result for a call."""
    return New("tool_result", text, name=call.name, call_id=call.call_id, error=error)


def interrupted(call: Slot) -> New:
    """The result of a call that nobody answered."""
    return replace(answer(call, INTERRUPTED, error=True), source="interrupted")


NO_RESULTS: Mapping[str | None, New] = {}


def add(slots: list[Slot], new: New, results: Mapping[str | None, New] = NO_RESULTS) -> None:
    """Put a content behind the others, in place. Anything but a parallel call or a result closes
    open calls: with their `results`, by call id, or as interrupted. Results take their place in
    call order."""
    if new.kind == "tool_result":
        _add_result(slots, new)
        return
    if new.kind == "tool_call" and slots and slots[-1].kind == "tool_call":
        if any(slots[call].call_id == new.call_id for call in open_calls(slots)):
            raise PairingError(
                "two parallel calls have the same id",
                value=new.call_id,
                remedy="give each call an id of its own",
            )
    else:
        for call in open_calls(slots):
            known = results.get(slots[call].call_id)
            _add_result(slots, known or interrupted(slots[call]))
    slots.append(new)


def _add_result(slots: list[Slot], result: New) -> None:
    group = last_group(slots)
    opened = [p for p in group if p.result is None and slots[p.call].call_id == result.call_id]
    if not opened:
        raise PairingError(
            "the result answers no open call",
            value=result.call_id,
            remedy="append the call first; to change a result, replace() it",
        )
    later = (p.result for p in group if p.call > opened[-1].call and p.result is not None)
    call = slots[opened[-1].call]
    slots.insert(min(later, default=len(slots)), replace(result, name=call.name))


def check_gap(path: Path, position: int) -> None:
    """PairingError if something inserted before place `position` would part a call from its
    result."""
    for pair in pairs(path.places):
        end = len(path.places) if pair.result is None else pair.result
        if pair.call < position <= end:
            raise PairingError(
                "this is between a tool call and its result",
                value=path.places[pair.call].body.id,
                remedy="insert before the call, or after the results",
            )


def with_partners(path: Path, indices: set[int]) -> set[int]:
    """The places, and for each call or result among them its other half."""
    out = set(indices)
    for pair in pairs(path.places):
        if pair.call in out or pair.result in out:
            out.add(pair.call)
            if pair.result is not None:
                out.add(pair.result)
    return out


def result_of(path: Path, call: int) -> int | None:
    """The place of a call's result."""
    return next(pair.result for pair in pairs(path.places) if pair.call == call)

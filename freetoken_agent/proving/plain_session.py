# SPDX-License-Identifier: Apache-2.0
"""A session as plain lists: what sessions are compared with in random programs of edits.

It is written apart from the real one on purpose and knows nothing of nodes, gaps, layouts or
stores: a branch is a list of contents and two stacks. It is for tests, also of other models.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from ..branches.pairing import INTERRUPTED

ASSISTANT = ("thinking", "text", "tool_call")
NATURAL = {
    ("thinking", "text"),
    ("thinking", "tool_call"),
    ("text", "tool_call"),
    ("tool_call", "tool_call"),
}

# What stands between two contents of one assistant turn; no other pairs can be in one.
_INSIDE = {
    ("thinking", "text"): "\n</think>\n\n",
    ("thinking", "tool_call"): "\n</think>\n\n",
    ("text", "tool_call"): "\n",
    ("tool_call", "tool_call"): "\n",
    ("thinking", "thinking"): "",
    ("text", "text"): "",
}


@dataclass
class Entry:
    """A content of the plain model. `pair` links a call and its result."""

    kind: str
    text: str
    pair: int = 0
    tool: str = ""
    number: int = 0  # the argument of a call
    joined: bool = False
    error: bool = False
    stale: bool = False
    id: str = ""


@dataclass
class Line:
    """One branch: its contents, how the assistant's turn stands at its head, and its history.

    The methods change `path` and `tail` in place; the history is the caller's to keep.
    """

    path: list[Entry] = field(default_factory=list)
    tail: str = "closed"
    undo: list[tuple[list[Entry], str]] = field(default_factory=list)
    redo: list[tuple[list[Entry], str]] = field(default_factory=list)

    def saved(self) -> tuple[list[Entry], str]:
        """A copy of where the branch stands."""
        return copy.deepcopy(self.path), self.tail

    def index(self, entry: Entry) -> int:
        return next(i for i, e in enumerate(self.path) if e is entry)

    def pick(self, number: int) -> Entry | None:
        """Some content of the path."""
        return self.path[number % len(self.path)] if self.path else None

    def position(self, a: int, b: int) -> tuple[int, dict[str, Any]] | None:
        """A place beside some content: its index, and how a caller names it."""
        anchor = self.pick(a)
        if anchor is None:
            return None
        if b % 2:
            return self.index(anchor), {"before": anchor.id}
        return self.index(anchor) + 1, {"after": anchor.id}

    def relink(self, before: list[Entry]) -> None:
        """Settle which contents continue a turn, after `path` was changed from `before`."""
        left = {id(e): before[i - 1] if i else None for i, e in enumerate(before)}
        for i, entry in enumerate(self.path):
            previous = self.path[i - 1] if i else None
            if previous is None or not {previous.kind, entry.kind} <= set(ASSISTANT):
                entry.joined = False
            elif id(entry) not in left or left[id(entry)] is not previous:
                entry.joined = entry.joined or (previous.kind, entry.kind) in NATURAL

    def cut_tail(self, length: int) -> str:
        """How the turn stands behind the first `length` contents."""
        if length == len(self.path):
            return self.tail
        if not length or not self.path[length].joined:
            return "closed"
        a, b = self.path[length - 1].kind, self.path[length].kind
        return "partial" if a == b and a != "tool_call" else "open"

    def open_calls(self) -> list[Entry]:
        answered = {e.pair for e in self.path if e.kind == "tool_result"}
        return [e for e in self.path if e.kind == "tool_call" and e.pair not in answered]

    def add(self, entry: Entry, tail: str) -> None:
        """Put a content at the end; open calls are closed unless it is a parallel one."""
        closed = False
        last = self.path[-1] if self.path else None
        if not (entry.kind == "tool_call" and last is not None and last.kind == "tool_call"):
            for call in self.open_calls():
                self.answer(call, INTERRUPTED, error=True)
                closed = True
        if entry.kind in ASSISTANT and self.tail != "closed" and not closed:
            entry.joined = True
        before = list(self.path)
        self.path.append(entry)
        self.relink(before)
        self.tail = tail

    def answer(self, call: Entry, text: str, *, error: bool = False) -> Entry:
        """Put a call's result in its place among the results of its group."""
        order = [e.pair for e in self.path if e.kind == "tool_call"]
        result = Entry("tool_result", text, pair=call.pair, error=error)
        later = [
            i
            for i, e in enumerate(self.path)
            if e.kind == "tool_result" and order.index(e.pair) > order.index(call.pair)
        ]
        self.path.insert(min(later, default=len(self.path)), result)
        self.tail = "closed"
        return result

    def inside_group(self, position: int) -> bool:
        """Whether something there would part a call from its result."""
        for i, call in enumerate(self.path):
            if call.kind == "tool_call":
                ends = [j for j, e in enumerate(self.path) if e.kind == "tool_result"]
                mine = [j for j in ends if self.path[j].pair == call.pair]
                if i < position <= (mine[0] if mine else len(self.path)):
                    return True
        return False

    def misordered(self) -> bool:
        """Whether a turn holds its contents in an order that no message has."""
        pairs = zip(self.path, self.path[1:], strict=False)
        return any(b.joined and (a.kind, b.kind) not in _INSIDE for a, b in pairs)

    def remove(self, gone: list[Entry]) -> None:
        """Take contents out, of a call and its result both."""
        pairs = {e.pair for e in gone if e.pair}
        kept = [e for e in self.path if e not in gone and not (e.pair and e.pair in pairs)]
        kept = [e for e in kept if not any(e is g for g in gone)]
        tail = "closed"
        if kept:
            tail = self.cut_tail(next(i for i, e in enumerate(self.path) if e is kept[-1]) + 1)
        before, self.path, self.tail = self.path, kept, tail
        self.relink(before)


def render_chatml(path: list[Entry]) -> str:
    """The template `testing.CHATML` by hand."""
    out, previous = "", None
    for entry in path:
        if previous is not None and entry.joined:
            out += _INSIDE[previous.kind, entry.kind]
        else:
            out += _close(previous, entry) + _open(previous, entry)
        out += entry.text
        previous = entry
    return out


def _close(previous: Entry | None, entry: Entry) -> str:
    if previous is None:
        return ""
    if previous.kind == "tool_result":
        both = entry.kind == "tool_result"
        return "\n</tool_response>" + ("" if both else "<|im_end|>\n")
    return ("\n</think>\n\n" if previous.kind == "thinking" else "") + "<|im_end|>\n"


def _open(previous: Entry | None, entry: Entry) -> str:
    if entry.kind == "tool_result":
        first = previous is None or previous.kind != "tool_result"
        return ("<|im_start|>user" if first else "") + "\n<tool_response>\n"
    role = "assistant" if entry.kind in ASSISTANT else entry.kind
    return f"<|im_start|>{role}\n" + ("<think>\n" if entry.kind == "thinking" else "")

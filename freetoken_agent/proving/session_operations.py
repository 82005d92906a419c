# SPDX-License-Identifier: Apache-2.0
"""What a random program may do: each operation acts on a session and on plain lists alike.

An operation gets two small numbers, which it reads in its own way. It returns the segments it added
to the path, in order, or None if it made no step; where the plain lists say that the session must
refuse, it raises `Refused` with the call and the error.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..branches.pairing import INTERRUPTED
from ..errors import (
    InvalidEdit,
    NothingToGenerate,
    NothingToRedo,
    NothingToUndo,
    PairingError,
    SegmentNotFound,
)
from ..model import Model
from ..segments import Edit, Segment
from ..session import Session
from ..store import Store
from .plain_session import ASSISTANT, Entry, Line

Writer = Callable[[Session, Line, int, int], tuple[Sequence[Segment], list[Entry], str]]
"""Lets the model write: gives the segments it wrote, what they must be, and how the turn stands."""


class Refused(Exception):
    """The plain session says that this call must raise this error."""

    def __init__(self, call: Callable[[], object], error: type[Exception]) -> None:
        self.call = call
        self.error = error

    def check(self) -> None:
        """Make the call; it must raise the error."""
        try:
            self.call()
        except self.error:
            return
        raise AssertionError(f"{self.error.__name__} was expected")


class Operations:
    """A session with its branches, the plain lists beside them, and everything to do to both."""

    def __init__(self, folder: str, model: Model, write: Writer) -> None:
        self.folder = folder
        self.model = model
        self.write = write
        self.in_batch = False
        self.store = Store(folder)
        self.real: dict[str, Session] = {"main": self.store.create("s", model)}
        self.plain: dict[str, Line] = {"main": Line()}
        self._texts = itertools.count(1)
        self._pairs = itertools.count(1)

    def text(self) -> str:
        """A text no other content has; some hold what would be control tokens in a frame."""
        number = next(self._texts)
        return f"w{number}" + ("<|im_end|>\n</think>" if number % 7 == 0 else "")

    def call(self, number: int) -> Entry:
        """A call as the template writes it."""
        tool = f"t{number % 3}"
        text = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"n": {number}}}}}\n</tool_call>'
        return Entry("tool_call", text, pair=next(self._pairs), tool=tool, number=number)

    def _new_ones(self, session: Session, act: Callable[[], object]) -> list[Segment]:
        known = {s.id for s in session.path()}
        act()
        return [s for s in session.path() if s.id not in known]

    def append(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment]:
        kind = ("user", "text", "thinking")[a % 3]
        text, partial = self.text(), kind != "user" and b % 3 == 0
        line.add(
            Entry(kind, text),
            "partial" if partial else "open" if kind == "thinking" else "closed",
        )
        return self._new_ones(session, lambda: session.append(kind, text, open=partial))

    def append_call(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment]:
        entry = self.call(a)
        line.add(entry, "closed")
        return self._new_ones(session, lambda: session.append_call(entry.tool, {"n": a}))

    def append_result(
        self, session: Session, line: Line, a: int, b: int
    ) -> Sequence[Segment] | None:
        calls = [entry for entry in line.path if entry.kind == "tool_call"]
        if not calls:
            raise Refused(lambda: session.append_result("none", "r"), SegmentNotFound)
        call, text = calls[a % len(calls)], self.text()
        if not any(call is entry for entry in line.open_calls()):
            raise Refused(lambda: session.append_result(call.id, text), PairingError)
        line.answer(call, text, error=bool(b % 2))
        return [session.append_result(call.id, text, error=bool(b % 2))]

    def replace(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        entry = line.pick(a)
        if entry is None:
            return None
        if entry.kind == "tool_call":
            if entry.number == b:
                assert not session.replace(entry.id, arguments={"n": b})
                return None
            for other in line.path:
                if other.kind == "tool_result" and other.pair == entry.pair:
                    other.stale = True
            text = self.call(b).text.replace(f'"t{b % 3}"', f'"{entry.tool}"')
            edit = session.replace(entry.id, arguments={"n": b})
        else:
            if b % 4 == 0:
                assert not session.replace(entry.id, entry.text)
                return None
            text = self.text()
            edit = session.replace(entry.id, text)
        new = copy.copy(entry)
        new.id, new.text, new.number, new.stale = "", text, b, False
        new.error = entry.error and entry.text != INTERRUPTED
        line.path[line.index(entry)] = new
        assert [s.id for s in edit.removed] == [entry.id]
        return edit.added

    def insert(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        where = line.position(a, b)
        if where is None:
            return None
        index, position = where
        kind, text = ("user", "text", "thinking")[b % 3], self.text()

        def insert() -> Edit:
            return session.insert(kind=kind, content=text, **position)

        if line.inside_group(index):
            raise Refused(insert, PairingError)
        if index == len(line.path):
            line.add(Entry(kind, text), "open" if kind == "thinking" else "closed")
        else:
            before, inside = list(line.path), line.path[index].joined and kind in ASSISTANT
            line.path.insert(index, Entry(kind, text, joined=inside))
            line.relink(before)
        return insert().added

    def insert_call(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        where = line.position(a, b)
        if where is None:
            return None
        index, position = where
        call, text = self.call(b), self.text()

        def insert() -> Edit:
            return session.insert_call(call.tool, {"n": b}, text, **position)

        if line.inside_group(index):
            raise Refused(insert, PairingError)
        if index == len(line.path):
            line.add(call, "closed")
            line.answer(call, text)
        else:
            before, call.joined = list(line.path), line.path[index].joined
            line.path[index:index] = [call, Entry("tool_result", text, pair=call.pair)]
            line.relink(before)
        return insert().added

    def delete(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        found = [e for e in (line.pick(a), line.pick(b)) if e is not None]
        if not found:
            return None
        line.remove(found)
        return session.delete(*{entry.id for entry in found}).added

    def drop(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        kind, keep = ("thinking", "text", "tool_result", "user")[a % 4], b % 3
        turns = sum(entry.kind == "user" for entry in line.path)
        gone, turn = [], -1
        for entry in line.path:
            turn += entry.kind == "user"
            if entry.kind == kind and (turn < 0 or turn < turns - keep):
                gone.append(entry)
        if not gone:
            assert not session.drop(kind=kind, keep_turns=keep)
            return None
        line.remove(gone)
        return session.drop(kind=kind, keep_turns=keep).added

    def rewind(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        users = [i for i, entry in enumerate(line.path) if entry.kind == "user"]
        if a % 3 == 0:
            turns = b % 4
            if not 1 <= turns <= len(users):
                raise Refused(lambda: session.rewind(turns=turns), InvalidEdit)
            length = users[-turns]
            position: dict[str, Any] = {"turns": turns}
        else:
            where = line.position(b, a)
            if where is None:
                return None
            length, named = where
            position = {"to" if key == "after" else key: value for key, value in named.items()}
        if length == len(line.path):
            assert not session.rewind(**position)
            return None
        line.path, line.tail = line.path[:length], line.cut_tail(length)
        return session.rewind(**position).added

    def generate(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        last = line.path[-1].kind if line.path else None
        if self.in_batch:
            raise Refused(session.generate_sync, InvalidEdit)
        if last is None or line.open_calls() or (last in ASSISTANT and line.tail == "closed"):
            raise Refused(session.generate_sync, NothingToGenerate)
        goes_on = line.tail != "closed"
        written, entries, tail = self.write(session, line, a, b)
        for index, entry in enumerate(entries):
            entry.joined = goes_on or index > 0
            if entry.kind == "tool_call" and not entry.pair:
                entry.pair = next(self._pairs)
        assert [(s.kind, s.text) for s in written] == [(e.kind, e.text) for e in entries]
        line.path, line.tail = [*line.path, *entries], tail
        return written

    def undo(self, session: Session, line: Line, a: int, b: int) -> None:
        steps = 1 + a % 3
        if self.in_batch:
            raise Refused(session.undo, InvalidEdit)
        if steps > len(line.undo):
            raise Refused(lambda: session.undo(steps), NothingToUndo)
        session.undo(steps)
        for _ in range(steps):
            line.redo.append((line.path, line.tail))
            line.path, line.tail = line.undo.pop()

    def redo(self, session: Session, line: Line, a: int, b: int) -> None:
        steps = 1 + a % 2
        if self.in_batch:
            raise Refused(session.redo, InvalidEdit)
        if steps > len(line.redo):
            raise Refused(lambda: session.redo(steps), NothingToRedo)
        session.redo(steps)
        for _ in range(steps):
            line.undo.append((line.path, line.tail))
            line.path, line.tail = line.redo.pop()

    def fork(self, session: Session, line: Line, a: int, b: int) -> None:
        if len(self.real) > 4:
            return
        name, length = f"b{len(self.real)}", a % (len(line.path) + 1)
        if length == len(line.path):
            fork = session.fork(name=name)
        elif b % 2 and length:
            fork = session.fork(at=line.path[length - 1].id, name=name)
        else:
            fork = session.fork(before=line.path[length].id, name=name)
        self.real[name] = fork
        self.plain[name] = Line(copy.deepcopy(line.path[:length]), line.cut_tail(length))

    def reopen(self, session: Session, line: Line, a: int, b: int) -> None:
        self.store.close()
        self.store = Store(self.folder)
        self.real = {n: self.store.open("s", self.model, branch=n) for n in self.real}

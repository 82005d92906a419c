# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, run on a session and on plain lists at once. For tests.

A program is a list of (branch, operation, a, b): small numbers that each operation reads in its own
way, so that any list is a program and shrinks well.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from .errors import (
    InvalidEdit,
    NothingToGenerate,
    NothingToRedo,
    NothingToUndo,
    PairingError,
    SegmentNotFound,
    TemplateUnsupported,
)
from .model import Model
from .pairing import INTERRUPTED
from .plain_session import ASSISTANT, Entry, Line
from .segments import Edit, Segment
from .session import Session
from .store import Store

Step = tuple[int, str, int, int]
Writer = Callable[[Session, Line, int, int], tuple[Sequence[Segment], list[Entry], str]]
"""Lets the model write: gives the segments it wrote, what they must be, and how the turn stands."""

_WEIGHTS = {
    "append": 3,
    "append_call": 2,
    "append_result": 2,
    "generate": 2,
    "replace": 2,
    "insert": 1,
    "insert_call": 1,
    "delete": 1,
    "drop": 1,
    "rewind": 2,
    "undo": 2,
    "redo": 1,
    "fork": 1,
    "reopen": 1,
    "batch": 1,
}
OPERATIONS = tuple(name for name, weight in _WEIGHTS.items() for _ in range(weight))
"""Names of the operations, as often as they are worth drawing."""


class Program:
    """Runs operations on the real session and on the plain one, and compares them.

    `render` writes a plain path as the template would, or says None; `check` may look at every
    branch after every operation as well.
    """

    def __init__(
        self,
        folder: str,
        model: Model,
        *,
        write: Writer,
        render: Callable[[list[Entry]], str | None] = lambda _: None,
        check: Callable[[Session], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._write = write
        self._render = render
        self._check = check
        self._texts = itertools.count(1)
        self._pairs = itertools.count(1)
        self._batch = False
        self._store = Store(folder)
        self.real: dict[str, Session] = {"main": self._store.create("s", model)}
        self.plain: dict[str, Line] = {"main": Line()}

    def run(self, steps: Sequence[Step]) -> None:
        """The whole program, then the store is closed."""
        with closing(self):
            position = 0
            while position < len(steps):
                where, name, a, b = steps[position]
                branch = list(self.real)[where % len(self.real)]
                position += 1
                if name == "batch":
                    stop = position + 1 + a % 4
                    with self._batching(branch):
                        for _, inner, c, d in steps[position:stop]:
                            if inner not in ("batch", "reopen", "fork"):
                                self._step(branch, inner, c, d)
                                self._compare(branch)
                    position = stop
                else:
                    self._step(branch, name, a, b)
                for each in self.real:
                    self._compare(each)

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def _batching(self, branch: str) -> Iterator[None]:
        line, session = self.plain[branch], self.real[branch]
        saved, version = line.saved(), session.version
        self._batch = True
        with session.batch() as batch:
            yield
            assert session.version == version, "a batch commits at its end"
        self._batch = False
        assert batch.edit is not None
        assert bool(batch.edit) == (saved != line.saved())
        assert session.version == version + bool(batch.edit)
        if batch.edit:
            line.undo.append(saved)
            line.redo.clear()

    def _step(self, branch: str, name: str, a: int, b: int) -> None:
        line, session = self.plain[branch], self.real[branch]
        saved, version = line.saved(), session.version
        known = [entry.id for entry in line.path]
        operation: Callable[..., Sequence[Segment] | None] = getattr(self, "_" + name)
        try:
            added = operation(session, line, a, b)
        except (_Refused, TemplateUnsupported) as refused:
            if isinstance(refused, _Refused):
                _must_raise(refused)
            else:
                assert line.misordered(), f"{refused}: the plain session sees no reason"
            line.path, line.tail = saved
            assert session.version == version
            assert [s.id for s in session.path()] == known
            return
        assert not line.misordered(), "no message of the template can hold this"
        if added is None:
            return
        fresh = [entry for entry in line.path if not entry.id]
        assert [s.kind for s in added] == [entry.kind for entry in fresh]
        for segment, entry in zip(added, fresh, strict=True):
            assert segment.id not in known
            entry.id = segment.id
        if not self._batch:
            assert session.version > version
            line.undo.append(saved)
            line.redo.clear()

    def _compare(self, branch: str) -> None:
        line, session = self.plain[branch], self.real[branch]
        path = session.path()
        assert [(s.id, s.kind, s.text, s.error, s.stale) for s in path] == [
            (e.id, e.kind, e.text, e.error, e.stale) for e in line.path
        ]
        stored = session._handle.path
        assert stored.tail == line.tail
        assert [place.joins for place in stored.places] == [e.joined for e in line.path]
        answers = [s.call_id for s in path if s.kind == "tool_result"]
        calls = [s.call_id for s in path if s.kind == "tool_call"]
        assert answers == [c for c in calls if c in answers], "results in call order, none alone"
        waiting = [s.id for s in path if s.kind == "tool_call" and s.call_id not in answers]
        assert waiting == [e.id for e in line.open_calls()]
        if waiting:
            end = path[[s.id for s in path].index(waiting[0]) :]
            assert {s.kind for s in end} <= {"tool_call", "tool_result"}
        text = self._render(line.path)
        assert text is None or session.render() == text
        assert sum(s.num_tokens + s.frame_tokens for s in path) == len(session.ids())
        plan = session.plan()
        assert plan.reused_tokens + plan.prefill_tokens == plan.input_tokens
        self._check(session)

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

    def _append(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment]:
        kind = ("user", "text", "thinking")[a % 3]
        text, partial = self.text(), kind != "user" and b % 3 == 0
        line.add(
            Entry(kind, text),
            "partial" if partial else "open" if kind == "thinking" else "closed",
        )
        return self._new_ones(session, lambda: session.append(kind, text, open=partial))

    def _append_call(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment]:
        entry = self.call(a)
        line.add(entry, "closed")
        return self._new_ones(session, lambda: session.append_call(entry.tool, {"n": a}))

    def _append_result(
        self, session: Session, line: Line, a: int, b: int
    ) -> Sequence[Segment] | None:
        calls = [entry for entry in line.path if entry.kind == "tool_call"]
        if not calls:
            raise _Refused(lambda: session.append_result("none", "r"), SegmentNotFound)
        call, text = calls[a % len(calls)], self.text()
        if not any(call is entry for entry in line.open_calls()):
            raise _Refused(lambda: session.append_result(call.id, text), PairingError)
        line.answer(call, text, error=bool(b % 2))
        return [session.append_result(call.id, text, error=bool(b % 2))]

    def _replace(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
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

    def _insert(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        where = line.position(a, b)
        if where is None:
            return None
        index, position = where
        kind, text = ("user", "text", "thinking")[b % 3], self.text()

        def insert() -> Edit:
            return session.insert(kind=kind, content=text, **position)

        if line.inside_group(index):
            raise _Refused(insert, PairingError)
        if index == len(line.path):
            line.add(Entry(kind, text), "open" if kind == "thinking" else "closed")
        else:
            before, inside = list(line.path), line.path[index].joined and kind in ASSISTANT
            line.path.insert(index, Entry(kind, text, joined=inside))
            line.relink(before)
        return insert().added

    def _insert_call(
        self, session: Session, line: Line, a: int, b: int
    ) -> Sequence[Segment] | None:
        where = line.position(a, b)
        if where is None:
            return None
        index, position = where
        call, text = self.call(b), self.text()

        def insert() -> Edit:
            return session.insert_call(call.tool, {"n": b}, text, **position)

        if line.inside_group(index):
            raise _Refused(insert, PairingError)
        if index == len(line.path):
            line.add(call, "closed")
            line.answer(call, text)
        else:
            before, call.joined = list(line.path), line.path[index].joined
            line.path[index:index] = [call, Entry("tool_result", text, pair=call.pair)]
            line.relink(before)
        return insert().added

    def _delete(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        found = [e for e in (line.pick(a), line.pick(b)) if e is not None]
        if not found:
            return None
        line.remove(found)
        return session.delete(*{entry.id for entry in found}).added

    def _drop(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
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

    def _rewind(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        users = [i for i, entry in enumerate(line.path) if entry.kind == "user"]
        if a % 3 == 0:
            turns = b % 4
            if not 1 <= turns <= len(users):
                raise _Refused(lambda: session.rewind(turns=turns), InvalidEdit)
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

    def _generate(self, session: Session, line: Line, a: int, b: int) -> Sequence[Segment] | None:
        last = line.path[-1].kind if line.path else None
        if self._batch:
            raise _Refused(session.generate_sync, InvalidEdit)
        if last is None or line.open_calls() or (last in ASSISTANT and line.tail == "closed"):
            raise _Refused(session.generate_sync, NothingToGenerate)
        goes_on = line.tail != "closed"
        written, entries, tail = self._write(session, line, a, b)
        for index, entry in enumerate(entries):
            entry.joined = goes_on or index > 0
            if entry.kind == "tool_call" and not entry.pair:
                entry.pair = next(self._pairs)
        assert [(s.kind, s.text) for s in written] == [(e.kind, e.text) for e in entries]
        line.path, line.tail = [*line.path, *entries], tail
        return written

    def _undo(self, session: Session, line: Line, a: int, b: int) -> None:
        steps = 1 + a % 3
        if self._batch:
            raise _Refused(session.undo, InvalidEdit)
        if steps > len(line.undo):
            raise _Refused(lambda: session.undo(steps), NothingToUndo)
        session.undo(steps)
        for _ in range(steps):
            line.redo.append((line.path, line.tail))
            line.path, line.tail = line.undo.pop()

    def _redo(self, session: Session, line: Line, a: int, b: int) -> None:
        steps = 1 + a % 2
        if self._batch:
            raise _Refused(session.redo, InvalidEdit)
        if steps > len(line.redo):
            raise _Refused(lambda: session.redo(steps), NothingToRedo)
        session.redo(steps)
        for _ in range(steps):
            line.undo.append((line.path, line.tail))
            line.path, line.tail = line.redo.pop()

    def _fork(self, session: Session, line: Line, a: int, b: int) -> None:
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

    def _reopen(self, session: Session, line: Line, a: int, b: int) -> None:
        self._store.close()
        self._store = Store(self._folder)
        self.real = {n: self._store.open("s", self._model, branch=n) for n in self.real}


class _Refused(Exception):
    """The plain session says that this call must raise this error."""

    def __init__(self, call: Callable[[], object], error: type[Exception]) -> None:
        self.call = call
        self.error = error


def _must_raise(refused: _Refused) -> None:
    try:
        refused.call()
    except refused.error:
        return
    raise AssertionError(f"{refused.error.__name__} was expected")

# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, run on a session and on plain lists at once. For tests.

A program is a list of (branch, operation, a, b): small numbers that each operation reads in its own
way, so that any list is a program and shrinks well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from ..errors import TemplateUnsupported
from ..model import Model
from ..segments import Segment
from ..session import Session
from .plain_session import Entry, Line
from .session_operations import Operations, Refused, Writer

Step = tuple[int, str, int, int]

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
    branch after every operation as well. `foreign`: a template other than `testing.CHATML`, which
    may refuse what it likes and writes calls and blanks in its own way.
    """

    def __init__(
        self,
        folder: str,
        model: Model,
        *,
        write: Writer,
        render: Callable[[list[Entry]], str | None] = lambda _: None,
        check: Callable[[Session], None] = lambda _: None,
        foreign: bool = False,
    ) -> None:
        self._do = Operations(folder, model, write)
        self._render = render
        self._check = check
        self._foreign = foreign
        self.num_refused = 0  # edits that a foreign template refused

    @property
    def real(self) -> dict[str, Session]:
        """The session's branches."""
        return self._do.real

    @property
    def plain(self) -> dict[str, Line]:
        """The same as plain lists."""
        return self._do.plain

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
        self._do.store.close()

    @contextmanager
    def _batching(self, branch: str) -> Iterator[None]:
        line, session = self.plain[branch], self.real[branch]
        saved, version = line.saved(), session.version
        self._do.in_batch = True
        with session.batch() as batch:
            yield
            assert session.version == version, "a batch commits at its end"
        self._do.in_batch = False
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
        operation: Callable[..., Sequence[Segment] | None] = getattr(self._do, name)
        try:
            added = operation(session, line, a, b)
        except (Refused, TemplateUnsupported) as refused:
            if isinstance(refused, Refused):
                refused.check()
            else:
                assert self._foreign or line.misordered(), f"{refused}: no reason is known"
                self.num_refused += 1
            line.path, line.tail = saved
            assert session.version == version
            assert [s.id for s in session.path()] == known
            return
        assert self._foreign or not line.misordered(), "no message of CHATML can hold this"
        if added is None:
            return
        fresh = [entry for entry in line.path if not entry.id]
        assert [s.kind for s in added] == [entry.kind for entry in fresh]
        for segment, entry in zip(added, fresh, strict=True):
            assert segment.id not in known
            entry.id = segment.id
        if not self._do.in_batch:
            assert session.version > version
            line.undo.append(saved)
            line.redo.clear()

    def _compare(self, branch: str) -> None:
        line, session = self.plain[branch], self.real[branch]
        path = session.path()
        if self._foreign:
            _adopt_spelling(line.path, path)
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


def _adopt_spelling(entries: Sequence[Entry], path: Sequence[Segment]) -> None:
    """Take over how the template writes calls, escapes, trims or extends a content."""
    for entry, segment in zip(entries, path, strict=True):
        core = entry.text.strip()
        if entry.kind == "tool_call" or core in segment.text or segment.content == entry.text:
            entry.text = segment.text

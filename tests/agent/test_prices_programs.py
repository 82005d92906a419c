# SPDX-License-Identifier: Apache-2.0
"""Random edits, and what every plan says of them. Oracle: the ids of every path that was forwarded,
as plain lists; positions and segments follow by comparing and counting."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import Miss, ReusePlan, Session, Store
from freetoken_agent.errors import NothingToUndo
from freetoken_agent.testing import ScriptedModel

OPENER = "<|im_end|>\n<|im_start|>assistant\n"
TEXTS = ("a", "ab", "abc", "b", "ba", "")
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "replace", "replace", "delete", "insert", "undo", "fork", "warm"]
        ),
        st.integers(0, 11),
        st.integers(0, 11),
    ),
    min_size=4,
    max_size=24,
)


def common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class Program:
    """A session with its forks, and the lists."""

    def __init__(self, store: Store) -> None:
        self.model = ScriptedModel()
        self.sessions = [store.create("s", self.model, system="be")]
        self.forwarded: list[list[int]] = []
        self.session: Session = self.sessions[0]

    def run(self, step: Step) -> None:
        name, a, b = step
        self.session = self.sessions[a % len(self.sessions)]
        act: Callable[[int, int], object] = getattr(self, name)
        act(a, b)
        self.check()

    def append(self, a: int, b: int) -> None:
        self.session.append("user" if a % 2 else "assistant", TEXTS[b % len(TEXTS)] or "x")

    def replace(self, a: int, b: int) -> None:
        path = self.session.path()
        edit = self.session.replace(path[a % len(path)], TEXTS[b % len(TEXTS)] or "y")
        assert edit.plan == self.session.plan()

    def delete(self, a: int, b: int) -> None:
        path = self.session.path()[1:]
        if path:
            self.session.delete(path[b % len(path)])

    def insert(self, a: int, b: int) -> None:
        path = self.session.path()[1:]
        if path:
            self.session.insert(before=path[a % len(path)], kind="user", content=TEXTS[b % 5])

    def undo(self, a: int, b: int) -> None:
        with suppress(NothingToUndo):
            self.session.undo()

    def fork(self, a: int, b: int) -> None:
        if len(self.sessions) < 4:
            path = self.session.path()
            self.sessions.append(self.session.fork(at=path[b % len(path)]))

    def warm(self, a: int, b: int) -> None:
        before = self.session.plan() if self.session.path()[-1].kind == "text" else None
        usage = asyncio.run(self.session.warm())
        self.forwarded.append(self.session.ids())
        assert usage.miss is None or usage.miss.tokens == usage.prefill_tokens
        assert before is None or usage.miss == before.miss

    def check(self) -> None:
        plan, path = self.session.plan(), self.session.path()
        opener = (
            OPENER if path[-1].kind == "user" else OPENER[: 0 if path[-1].kind == "text" else 99]
        )
        ids = self.session.ids() + self.model.tokenizer.encode_frame(opener)
        assert plan.input_tokens == len(ids)
        rows = max((common(known, ids) for known in self.forwarded), default=0)
        if rows == len(ids) and plan.miss is None:
            assert plan.prefill_tokens == 0
            return
        assert plan.miss is not None
        assert plan.miss.position == min(rows, len(ids) - 1)
        assert plan.miss.tokens == plan.prefill_tokens
        self.check_segment(plan.miss)
        self.check_change(plan, plan.miss, ids)

    def check_segment(self, miss: Miss) -> None:
        end = 0
        for segment in self.session.path():
            end += segment.frame_tokens + segment.num_tokens
            if miss.position < end:
                assert miss.segment is not None and miss.segment.id == segment.id
                in_frame = miss.position < end - segment.num_tokens
                assert miss.part == ("frame" if in_frame else "content")
                return
        assert (miss.segment, miss.part) == (None, "opener")

    def check_change(self, plan: ReusePlan, miss: Miss, ids: list[int]) -> None:
        """What stood there was forwarded there; the words fit; where ids differ, something did."""
        if miss.cause != "different_ids":
            assert (miss.change, miss.was) == (None, None)
            return
        was, here = miss.was, [s.id for s in self.session.path()]
        assert was is not None and miss.change is not None, plan
        content = self.model.tokenizer.encode_content(was.content)
        known = [k for k in self.forwarded if common(k, ids) == miss.position < len(k)]
        assert any(holds(k, content, miss.position) for k in known), (plan, known)
        expected = {
            "edited": miss.segment is not None and was.origin == miss.segment.origin,
            "framed": miss.segment is not None and was.id == miss.segment.id,
            "inserted": miss.segment is not None and was.id in here[here.index(miss.segment.id) :],
            "removed": was.id not in here,
            "diverged": miss.segment is None or was.origin != miss.segment.origin,
        }
        assert expected[miss.change], plan


def holds(known: list[int], content: list[int], position: int) -> bool:
    """Whether the path has this content at the position, or just before or behind it."""
    near = range(max(0, position - 40), position + 40)
    return any(known[at : at + len(content)] == content for at in near)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_plans_name_what_differs_through_random_edits(steps: list[Step]) -> None:
    """See the module."""
    with Store(":memory:") as store:
        program = Program(store)
        program.session.append("user", "start")
        program.warm(0, 0)
        for step in steps:
            program.run(step)

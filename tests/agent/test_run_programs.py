# SPDX-License-Identifier: Apache-2.0
"""Random runs of an agent, cancelled, left and edited at any event, against plain lists.

After every event the session is what a rendering by hand makes of its contents, calls and results
are paired, and every result is what its tool said. Every price is the one that a list of forwarded
paths gives, and comes true.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from freetoken_agent import Agent, RunContext, Segment, Store, ToolFailed
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.model import PathUsage
from freetoken_agent.proving.plain_session import ASSISTANT, NATURAL, Entry, render_chatml
from freetoken_agent.segments import ReusePlan
from freetoken_agent.testing import CHATML, Call, Request, ScriptedModel, Think
from freetoken_agent.tools import AnyTool, tool
from freetoken_storage.errors import FreetokenError

DENIED = "not this time"


class Model(ScriptedModel):
    """Writes what chance says, and keeps a list of the paths that it forwarded."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.forwarded: list[list[int]] = []
        self._chance = chance
        self._texts = 0
        self.extend(*[self._reply] * 200)

    def _reply(self, request: Request) -> Any:
        chance = self._chance
        parts: list[str | Think | Call] = []
        if chance.random() < 0.3:
            parts.append(Think(self._text()))
        calls = chance.choice((0, 0, 1, 1, 2, 3))
        if not calls or chance.random() < 0.4:
            parts.append(self._text())
        names = chance.choices(("quick", "threaded", "fails", "asks"), (4, 3, 2, 1), k=calls)
        parts += [Call(name, {"text": self._text()}) for name in names]
        output = [token for token in self.emit(parts) if isinstance(token, int)]
        self.forwarded.append([*request.ids, *output[:-1]])
        return parts

    def _text(self) -> str:
        self._texts += 1
        return f"t{self._texts}" + "é" * (self._texts % 3)

    def warm(
        self, ids: Sequence[int], *, anchors: Sequence[int] = (), lasting: Sequence[int] = ()
    ) -> PathUsage:
        self.forwarded.append(list(ids))
        return super().warm(ids, anchors=anchors, lasting=lasting)


@dataclass
class Tools:
    """Tools that say what they were called with, and how often each call ran."""

    ran: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def all(self) -> list[AnyTool]:
        @tool
        async def quick(context: RunContext[None], text: str) -> str:
            """Say it."""
            return self._answer(context, text)

        @tool
        def threaded(context: RunContext[None], text: str) -> str:
            """Say it, from a thread."""
            return self._answer(context, text)

        @tool
        async def fails(context: RunContext[None], text: str) -> str:
            """Fail."""
            raise ToolFailed(self._answer(context, text))

        @tool(needs_approval=True)
        async def asks(context: RunContext[None], text: str) -> str:
            """Say it, if it may."""
            return self._answer(context, text)

        return [quick, threaded, fails, asks]

    def _answer(self, context: RunContext[None], text: str) -> str:
        self.ran[context.call_id] = self.ran.get(context.call_id, 0) + 1
        said = f"{context.tool_name} of {text}"
        self.said[context.call_id] = said
        return said


def preamble(tools: Sequence[AnyTool]) -> str:
    """What the template makes of the system text and the tools, by jinja2 alone."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(CHATML).render(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "X"}],
        tools=[json.loads(json.dumps(one.schema)) for one in tools],
    )
    return text[: text.index("<|im_start|>user")]


class Program:
    """One session, an agent, and the lists."""

    def __init__(self, store: Store, seed: int) -> None:
        self.chance = random.Random(seed)
        self.model, self.tools = Model(self.chance), Tools()
        tools = self.tools.all()
        self.agent: Agent[None, str] = Agent(self.model, tools=tools, instructions="Be brief.")
        self.session = store.create("s", self.model, system="Be brief.", tools=tools)
        self.preamble = preamble(tools)
        self.edited: set[str] = set()  # results that somebody wrote
        self.rewound = False  # calls may run again
        self.stopped = 0  # runs that were cancelled or left
        self.paid = 0  # prices that were compared

    async def run(self) -> None:
        for number in range(self.chance.randint(2, 4)):
            before = self.ids()
            edits, finished = await self.turn(f"question {number}")
            self.check()
            if finished and not edits:
                self.check_undo(before)
            if self.chance.random() < 0.4:
                self.edit()
                self.check()
        await self.settle()

    def ids(self) -> list[str]:
        return [segment.id for segment in self.session.path()]

    async def turn(self, prompt: str) -> tuple[int, bool]:
        """A run with interruptions; how many edits there were, and whether it was not resumed."""
        plan = {
            self.chance.randrange(40): self.chance.choice(("cancel", "after_step", "leave", "edit"))
            for _ in range(self.chance.choice((0, 1, 1, 2)))
        }
        edits = number = 0
        started = self.agent.run_stream(prompt, session=self.session)
        with suppress(FreetokenError):  # an edit may take away what the run needs
            async with started as run:
                announced: ReusePlan | None = None
                async for event in run:
                    self.check()
                    if event.type == "plan_ready":
                        announced = self.check_plan(event.plan)
                    elif event.type == "reply_finished" and announced is not None:
                        self.check_paid(announced, event.reply.usage)
                    action = plan.get(number)
                    number += 1
                    if action == "leave":
                        self.stopped += 1
                        break
                    if action in ("cancel", "after_step"):
                        self.stopped += 1
                        run.cancel("immediate" if action == "cancel" else "after_step")
                    elif action == "edit":
                        edits += self.edit()
        return edits, True

    async def settle(self) -> None:
        """Decide what is open, and let the model come to an end."""
        for _ in range(20):
            path = self.session.path()
            if path[-1].kind not in ("tool_call", "tool_result"):
                break
            answered = {s.call_id for s in path if s.kind == "tool_result"}
            open_ids = [s.call_id for s in path if s.kind == "tool_call"]
            decisions = {
                str(call_id): self.chance.choice((True, False, DENIED))
                for call_id in open_ids
                if call_id not in answered
            }
            await self.agent.resume(self.session, decisions)
            self.check()
        result = await self.agent.run("and now?", session=self.session)
        while result.pending:
            decisions = {str(call.call_id): True for call in result.pending}
            result = await self.agent.resume(self.session, decisions)
        self.check()
        assert result.output is not None and self.session.path()[-1].kind == "text"

    def edit(self) -> bool:
        """One random edit; whether something changed. What is refused changes nothing."""
        before, places = self._state(), self.session.path()[2:]
        if not places:
            return False
        target = self.chance.choice(places)
        action = self.chance.choice(("replace", "delete", "insert", "append", "undo", "rewind"))
        try:
            self._act(action, target)
        except FreetokenError:
            assert self._state() == before
            return False
        self.rewound = self.rewound or action in ("undo", "rewind", "replace")
        return self._state() != before

    def _act(self, action: str, target: Segment) -> None:
        match action:
            case "replace" if target.kind == "tool_call":
                self.session.replace(target, arguments={"text": "other"})
            case "replace":
                edit = self.session.replace(target, "other")
                self.edited.update(segment.id for segment in edit.added)
            case "delete":
                self.session.delete(target)
            case "insert":
                self.session.insert(kind="user", content="by the way", before=target)
            case "append":
                self.session.append("user", "wait")
            case "undo":
                self.session.undo()
            case "rewind":
                self.session.rewind(to=target)

    def _state(self) -> tuple[list[str], list[int]]:
        return self.ids(), self.session.ids()

    def check(self) -> None:
        """Contents and frames are the rendering by hand; pairs and results are right."""
        path = self.session.path()
        assert [segment.kind for segment in path[:2]] == ["system", "tools"]
        text = self.preamble + render_chatml(entries(path[2:]))
        if not path[2:]:
            text = text.removesuffix("\n</tools><|im_end|>\n")  # a closer is the next one's frame
        assert self.session.render() == text
        assert self.session.ids() == self.model.tokenizer.encode_frame(text)
        assert len({segment.id for segment in path}) == len(path)
        self.check_results(path)

    def check_results(self, path: Sequence[Segment]) -> None:
        waiting: list[Segment] = []
        for index, segment in enumerate(path):
            if segment.kind == "tool_result":
                call = next(call for call in waiting if call.call_id == segment.call_id)
                if not self.rewound:  # an undo may take an earlier result back
                    assert call is waiting[0], "results out of the order of their calls"
                waiting.remove(call)
                self.check_result(segment)
            elif segment.kind == "tool_call":
                assert not waiting or path[index - 1].kind == "tool_call"
                waiting.append(segment)
            else:
                assert not waiting, f"a {segment.kind} follows an open call"
        if not self.rewound:
            assert all(count == 1 for count in self.tools.ran.values()), "a call ran twice"

    def check_result(self, result: Segment) -> None:
        call_id = str(result.call_id)
        if result.id in self.edited:
            return
        said = self.tools.said.get(call_id)
        unsaid = said is None or self.rewound
        assert result.content in (said, INTERRUPTED) or (unsaid and result.error), result

    def check_plan(self, plan: ReusePlan) -> ReusePlan:
        """What the list of forwarded paths says."""
        opener = "<|im_start|>assistant\n"
        last = self.session.path()[-1]
        closer = "\n</tool_response><|im_end|>\n" if last.kind == "tool_result" else "<|im_end|>\n"
        ids = self.session.ids() + self.model.tokenizer.encode_frame(closer + opener)
        assert plan.input_tokens == len(ids)
        rows = max((common(known, ids) for known in self.model.forwarded), default=0)
        # What is being warmed at the moment may be on the list already.
        assert plan.reused_tokens <= min(rows, len(ids) - 1)
        return plan

    def check_paid(self, plan: ReusePlan, usage: Any) -> None:
        if usage.changed is None and not usage.unforwarded_tokens:  # cancelled before that
            assert usage.prefill_tokens == plan.prefill_tokens
            assert usage.reused_tokens == plan.reused_tokens
            self.paid += 1

    def check_undo(self, before: Sequence[str]) -> None:
        """A run is one step: undone, the path is as it was before it."""
        after = self.ids()
        self.session.undo()
        assert self.ids() == list(before)
        self.session.redo()
        assert self.ids() == after
        self.check()


def entries(path: Sequence[Segment]) -> list[Entry]:
    """The contents as plain ones. A call's text follows from its arguments."""
    made: list[Entry] = []
    for segment in path:
        text = segment.content
        if segment.kind == "tool_call":
            text = call_text(str(segment.tool), segment.arguments or {})
        entry = Entry(segment.kind, text)
        kinds = (made[-1].kind if made else "", entry.kind)
        entry.joined = set(kinds) <= set(ASSISTANT) and kinds in NATURAL
        made.append(entry)
    return made


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    body = json.dumps(dict(arguments), ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@contextmanager
def program(seed: int) -> Iterator[Program]:
    with Store(":memory:") as store:
        yield Program(store, seed)


SETTINGS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],  # a program follows from its seed: nothing to shrink
)


def play(seed: int) -> None:
    with program(seed) as made:
        asyncio.run(made.run())


@settings(SETTINGS, max_examples=15)
@given(st.integers(0, 1 << 32))
def test_s12_runs_that_are_cancelled_and_edited_anywhere_equal_plain_lists(seed: int) -> None:
    """Oracle: a rendering by hand, what the tools said, and a list of forwarded paths."""
    play(seed)


@pytest.mark.slow
@settings(SETTINGS, max_examples=500)
@given(st.integers(0, 1 << 32))
def test_s12_many_runs_equal_plain_lists(seed: int) -> None:
    """The same, on 500 programs."""
    play(seed)

# SPDX-License-Identifier: Apache-2.0
"""Tools and streams, case by case, on each way to run an agent: `run`, `run_sync`, `run_stream`.

What a case says of one part alone (a parser, a grammar, a schema) is tested beside that part. Here
the agent is whole. The cases of runs that are stopped or edited are in test_run_cases.py.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from freetoken_agent import Agent, Limits, Result, Session, Store
from freetoken_agent.testing import Call, Raw, ScriptedModel, ScriptedStream, Step, Think
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer
from freetoken_agent.tools import AnyTool, tool

Play = Callable[..., Result[Any]]
Check = Callable[[Session], None]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def echo(text: str = "nothing") -> str:
    """Say the text."""
    return f"<{text}>"


@tool
async def late(text: str) -> str:
    """Say the text after a while."""
    await asyncio.sleep(0.02)
    return text


@tool
def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


TOOLS: list[AnyTool] = [add, echo, late, fail]
ADD = Call("add", {"a": 1, "b": 2})


def agent(*script: Step, tools: Sequence[AnyTool] = TOOLS, **fields: Any) -> Agent[Any, Any]:
    return Agent(ScriptedModel(script), tools=tools, **fields)


def written(text: str) -> Raw:
    """A turn exactly as a model writes it; tags are its control tokens."""
    return Raw(f"{text}<|im_end|>")


def calls_of(result: Result[Any]) -> list[tuple[str | None, Any]]:
    return [(c.tool, c.arguments) for c in result.session.find(kind="tool_call")]


def answers_of(result: Result[Any]) -> list[str]:
    return [answer.content for answer in result.session.find(kind="tool_result")]


@pytest.mark.parametrize("text", ["a </tool_call> b", "</tool_call>", '"</tool_call>\n{', "\\"])
@pytest.mark.parametrize("marker", ["text", "control token"])
def test_s30_a_closing_tag_inside_an_argument(play: Play, text: str, marker: str) -> None:
    """Oracle: the argument. The scripted model writes a byte at a time, so that every chunking ends
    inside the tag; the tag is plain text, or the tokenizer's own token for it."""
    call = Call("echo", {"text": text})
    whole = f'<tool_call>\n{{"name": "echo", "arguments": {json.dumps({"text": text})}}}\n'
    made = agent(call if marker == "text" else written(f"{whole}</tool_call>"), "done")
    result = play(made, "go")
    assert calls_of(result) == [("echo", {"text": text})]
    assert answers_of(result) == [f"<{text}>"] and result.output == "done"


def test_s32_two_adjacent_calls_are_two(play: Play) -> None:
    """Oracle: two call ids; results in the calls' order, though the first one ends last."""
    result = play(agent([Call("late", {"text": "1"}), Call("echo", {"text": "2"})], "done"), "go")
    calls = result.session.find(kind="tool_call")
    answers = result.session.find(kind="tool_result")
    assert [c.tool for c in calls] == ["late", "echo"] and len({c.call_id for c in calls}) == 2
    assert [a.call_id for a in answers] == [c.call_id for c in calls]
    assert [a.content for a in answers] == ["1", "<2>"]


def test_s33_arguments_written_as_a_string_become_the_object(play: Play) -> None:
    """Oracle: the object; rendering it again, as another session does, is stable."""
    string = json.dumps(json.dumps({"a": 1, "b": 2}))
    text = f'<tool_call>\n{{"name": "add", "arguments": {string}}}\n</tool_call>'
    result = play(agent(written(text), "3"), "go")
    assert calls_of(result) == [("add", {"a": 1, "b": 2})] and answers_of(result) == ["3"]
    [call] = result.session.find(kind="tool_call")
    assert call.text == text, "the ids stay as they were sampled"
    messages = result.session.to_messages("openai")
    with Store(":memory:") as store:
        other = store.create("other", result.session.model)
        other.append_messages(messages, "openai")
        assert other.find(kind="tool_call")[0].arguments == {"a": 1, "b": 2}
        assert other.to_messages("openai") == messages
        again = other.ids()
        assert not other.sync_messages(messages, "openai") and other.ids() == again


def test_s34_the_schema_leads_coercion(play: Play) -> None:
    """Oracle: the tool's own types; what cannot be read is told to the model, which tries again."""
    got: list[object] = []

    @tool
    def note(code: str, count: int = 0) -> str:
        """Note."""
        got.extend([code, count])
        return "noted"

    result = play(
        agent(
            Call("note", {"code": "02134", "count": "7"}),
            Call("note", {"code": 2134}),
            Call("note", {"code": "x", "count": "many"}),
            Call("note", {"code": "x", "count": 3}),
            "done",
            tools=[note],
        ),
        "go",
    )
    assert got == ["02134", 7, "2134", 0, "x", 3] and result.output == "done"
    first, second, refused, last = result.session.find(kind="tool_result")
    assert "count" in refused.content and refused.error
    assert not any(one.error for one in (first, second, last))


def test_s35_an_unterminated_string_ends_the_loop(play: Play) -> None:
    """Oracle: the run ends; nothing was called; the next turn renders and is answered."""
    made = agent(written('<tool_call>\n{"name": "echo", "arguments": {"text": "abc'), "then")
    result = play(made, "go")
    assert result.finish_reason == "stop" and calls_of(result) == []
    assert play(made, "go on", session=result.session).output == "then"
    assert result.session.render().endswith("<|im_start|>user\ngo on<|im_end|>\n" + _turn("then"))


def _turn(text: str) -> str:
    return f"<|im_start|>assistant\n{text}"


def test_s36_an_unknown_tool_gets_a_list_of_the_tools(play: Play) -> None:
    """Oracle: the names; the run goes on."""
    result = play(agent(Call("subtract", {}), "sorry"), "go")
    [answer] = result.session.find(kind="tool_result")
    assert answer.error and all(one.name in answer.content for one in TOOLS)
    assert result.output == "sorry"


def test_s37_a_call_inside_a_thought_is_not_executed(play: Play) -> None:
    """Oracle: no call, no result; the thought holds the text."""
    text = '<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>'
    for thought in (Think(text), Raw(f"<think>\n{text}\n</think>\n\n")):
        result = play(agent([thought, "No."]), "go")
        assert result.output == "No." and result.finish_reason == "stop"
        assert [s.kind for s in result.segments if s.kind != "tools"] == [
            "user", "thinking", "text",
        ]  # fmt: skip
        assert text in result.session.find(kind="thinking")[0].text


def test_s38_a_call_cut_by_the_token_limit_never_executes(play: Play) -> None:
    """Oracle: every cut of the call's tokens; its tool has defaults for what is missing. Whole, it
    runs."""
    ran: list[str] = []

    @tool
    def note(text: str = "nothing") -> str:
        """Note."""
        ran.append(text)
        return "noted"

    call = Call("note", {"text": "abc"})
    whole = len(ScriptedModel().emit(call)) - 1  # without the id that ends the turn
    model = ScriptedModel([call] * whole)
    for limit in range(1, whole):
        made: Agent[Any, Any] = Agent(model, tools=[note], sampling={"max_tokens": limit})
        result = play(made, "go")
        assert result.finish_reason == "length" and result.output is None and not ran, limit
        [text] = result.session.find(kind="text")
        assert text.meta == {"cut_call": True}
    assert play(agent(call, "done", tools=[note]), "go").output == "done" and ran == ["abc"]


def test_s42_text_before_a_call_does_not_end_the_run(play: Play) -> None:
    """Oracle: the script's last answer."""
    result = play(agent(["First I add.", ADD], ["Now again.", ADD], "It is 3."), "go")
    assert result.output == "It is 3." and result.steps == 3 and answers_of(result) == ["3", "3"]


def test_s47_the_middle_one_of_three_parallel_tools_raises(play: Play) -> None:
    """Oracle: three results, in the calls' order."""
    calls = [Call("late", {"text": "1"}), Call("fail", {"text": "2"}), Call("echo", {"text": "3"})]
    result = play(agent(calls, "done"), "go")
    assert answers_of(result) == ["1", "RuntimeError: 2", "<3>"] and result.output == "done"
    assert [a.error for a in result.session.find(kind="tool_result")] == [False, True, False]


class Wilful(ScriptedModel):
    """Writes what it wishes wherever its grammar allows it: at each place the first allowed id of
    those that `wish` names, given what was written."""

    def __init__(self, wish: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._wish = wish

    def generate(self, ids: Sequence[int], sampling: Any, **options: Any) -> ScriptedStream:
        constraint = None if sampling.constraint is None else sampling.constraint.copy()
        ends = sorted(sampling.stop_ids)
        output: list[int] = []
        while len(output) < sampling.max_tokens and not (output and output[-1] in ends):
            row = np.zeros(self.tokenizer.vocab_size, dtype=np.float32)
            if constraint is not None:
                constraint.mask(row)
            wished = (*self._wish(self.tokenizer.decode(output)), *range(len(row)))
            output.append(next(token for token in wished if row[token] == 0))
            if constraint is not None:
                constraint.accept(output[-1])
        self.extend(Raw(output))
        return super().generate(ids, sampling, **options)


class Place(BaseModel):
    name: str
    people: int


BLANKS = tuple(map(ord, " \n\t"))


def test_s49_a_grammar_bounds_white_space(play: Play) -> None:
    """Oracle: a model that writes a blank wherever it may, but for its strings: without the bound
    it never closes the value. It has to call a tool, and then to answer with a record."""
    model = Wilful(lambda said: (ord('"'),) if said.count('"') % 2 else BLANKS)
    sampling = {"max_tokens": 200, "thinking": False, "parallel_tool_calls": False}
    made: Agent[Any, Any] = Agent(model, tools=[add], output_type=Place, sampling=sampling)
    called = play(made.replace(limits=Limits(max_steps=2)), "go", tool_choice="add")
    assert called.finish_reason == "stop" and isinstance(called.output, Place)
    [(name, arguments)] = calls_of(called)
    assert name == "add" and set(arguments) == {"a", "b"}
    for segment in called.session.path()[1:]:
        assert "  " not in segment.text


def test_s50_a_schema_binds_only_after_the_thought(play: Play) -> None:
    """Oracle: the thought holds what no value may; the answer is of the type. The model wishes to
    go on thinking out loud behind the thought, and may not."""
    thought = "<think>\nNo { JSON ] here.\n</think>\n\n"

    ids = ByteTokenizer().encode_frame(thought + "No JSON")

    def wish(said: str) -> Sequence[int]:
        written = len(ByteTokenizer().encode_frame(said))
        return (*ids[written : written + 1], ord('"'), ord("}"))

    made: Agent[Any, Any] = Agent(Wilful(wish), output_type=Place, sampling={"max_tokens": 200})
    result = play(made, "go")
    [thinking] = result.session.find(kind="thinking")
    assert thinking.content == "No { JSON ] here."
    assert isinstance(result.output, Place)


def _plain(city: str, days: int = 1) -> str:
    """Forecast the weather.

    Args:
        city: Where to look.
        days: How many days.
    """
    return f"{city} {days}"


def _google_types(city: str, days: int = 1) -> str:
    """Forecast the weather.

    Args:
        city (str): Where to look.
        days (int, optional): How many days.

    Returns:
        str: The forecast.
    """
    return f"{city} {days}"


def _numpy(city: str, days: int = 1) -> str:
    """Forecast the weather.

    Parameters
    ----------
    city : str
        Where to look.
    days : int
        How many days.
    """
    return f"{city} {days}"


def _sphinx(city: str, days: int = 1) -> str:
    """Forecast the weather.

    :param city: Where to look.
    :param days: How many days.
    """
    return f"{city} {days}"


def _sphinx_types(city: str, days: int = 1) -> str:
    """Forecast the weather.

    :param str city: Where to look.
    :param int days: How many days.
    :returns: The forecast.
    """
    return f"{city} {days}"


def _epydoc(city: str, days: int = 1) -> str:
    """Forecast the weather.

    @param city: Where to look.
    @param days: How many days.
    """
    return f"{city} {days}"


SHAPES = (_plain, _google_types, _numpy, _sphinx, _sphinx_types, _epydoc)


def test_s56_six_docstring_shapes_are_one_tool_to_the_model(play: Play) -> None:
    """Oracle: the ids of the first request, which are the same for all; the text is written out."""
    asked: set[tuple[int, ...]] = set()
    for function in SHAPES:
        model = ScriptedModel([Call("forecast", {"city": "Oslo"}), "Sun."])
        result = play(Agent(model, tools=[tool(function, name="forecast")]), "go")
        assert answers_of(result) == ["Oslo 1"]
        asked.add(model.requests[0].ids)
    assert len(asked) == 1
    [tools] = result.session.find(kind="tools")
    [schema] = json.loads(tools.content)
    properties: Mapping[str, Any] = schema["function"]["parameters"]["properties"]
    assert schema["function"]["description"] == "Forecast the weather."
    assert properties["city"]["description"] == "Where to look."
    assert properties["days"]["description"] == "How many days."

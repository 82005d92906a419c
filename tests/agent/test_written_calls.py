# SPDX-License-Identifier: Apache-2.0
"""Calls that are not what they should be: cut, malformed, or of other types than their schema."""

import ast
import json
from typing import Any

import pytest

from freetoken_agent import Agent, Session, Store
from freetoken_agent.testing import Call, Raw, ScriptedModel
from freetoken_agent.tools import tool

XML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@tool
def write(path: str, content: str, mode: int = 0) -> str:
    """Write a file."""
    return f"{len(content)} characters"


def session_of(store: Store, model: ScriptedModel) -> Session:
    session = store.create("s", model, tools=[write])
    session.append("user", "go")
    return session


def raw(model: ScriptedModel, text: str) -> Raw:
    return Raw([*model.tokenizer.encode_frame(text), min(model.format.closers)])


@pytest.mark.parametrize("content", ['{\n    "a": 1.50\n}', "1.50", "True", "02134", "null"])
def test_s34_a_tagged_string_keeps_its_spelling(content: str) -> None:
    """Oracle: the text between the tags; the schema says that it is a string."""
    model = ScriptedModel([], template=XML)
    text = (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n"
        f"{content}\n</parameter>\n<parameter=mode>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    model.extend(raw(model, text))
    with Store(":memory:") as store:
        [call] = session_of(store, model).generate_sync().calls
        assert call.arguments == {"path": "a", "content": content, "mode": 7}
        assert call.text == text and "repaired" not in call.meta


def test_arguments_of_other_types_are_repaired_and_said_to_be() -> None:
    """Oracle: the schema; the ids are those that were sampled."""
    model = ScriptedModel([])
    written = {"path": "a", "content": "x", "mode": "7"}
    model.extend(Call("write", written), Call("write", {**written, "mode": 7}))
    with Store(":memory:") as store:
        session = session_of(store, model)
        [call] = session.generate_sync().calls
        assert call.arguments == {"path": "a", "content": "x", "mode": 7}
        assert call.meta == {"repaired": True} and '"mode": "7"' in call.text
        session.append_result(call, "ok")
        [call] = session.generate_sync().calls
        assert call.meta == {}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path": "a", "content": "x", "mode": 7,}',
        "{'path': 'a', 'content': \"x\", 'mode': 7}",
        '{"path": "a", "content": "x", "mode": 7, "more": None}',
    ],
)
def test_arguments_written_as_in_python_are_repaired_and_said_to_be(arguments: str) -> None:
    """Oracle: the values that Python's reader has of the text; its ids are those sampled."""
    model = ScriptedModel([])
    text = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
    model.extend(raw(model, text))
    with Store(":memory:") as store:
        [call] = session_of(store, model).generate_sync().calls
        assert call.arguments == ast.literal_eval(arguments)
        assert call.meta == {"repaired": True} and call.text == text


@pytest.mark.parametrize(
    "arguments",
    ['{"path": "a", "content": x}', '{"path": "a" "content": "x"}', '{"path": "a", "path": "b",}'],
)
def test_arguments_that_could_mean_something_else_are_not_repaired(arguments: str) -> None:
    """Oracle: the text has no value, also in Python, or more than one."""
    model = ScriptedModel([])
    text = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
    model.extend(raw(model, text))
    with Store(":memory:") as store:
        [call] = session_of(store, model).generate_sync().calls
        assert (call.tool, call.arguments, call.meta, call.text) == ("write", None, {}, text)


def test_s38_a_cut_call_says_so_and_never_runs() -> None:
    """Oracle: the segment; the tool has defaults for what was cut."""
    ran: list[str] = []

    @tool
    def note(text: str = "nothing") -> str:
        """Note."""
        ran.append(text)
        return "noted"

    model = ScriptedModel([Call("note", {"text": "a long text that will be cut"})])
    result = Agent(model, tools=[note], sampling={"max_tokens": 50}).run_sync("go")
    [text] = result.session.find(kind="text")
    assert result.finish_reason == "length" and not ran
    assert text.meta == {"cut_call": True} and text.text.startswith("<tool_call>")


def test_a_malformed_call_is_answered_with_an_error_and_the_model_goes_on() -> None:
    """Oracle: the ids as sampled, and what the model is told."""
    model = ScriptedModel([])
    broken = '<tool_call>\n{"name": "write", "arguments": {"path": a}}\n</tool_call>'
    model.extend(raw(model, broken), "I see.")
    result = Agent(model, tools=[write]).run_sync("go")
    [call] = result.session.find(kind="tool_call")
    [answer] = result.session.find(kind="tool_result")
    assert (call.tool, call.arguments, call.text) == ("write", None, broken)
    assert answer.error and "write" in answer.content and result.output == "I see."
    for format in ("openai", "anthropic"):
        messages: list[dict[str, Any]] = result.session.to_messages(format)
        assert json.loads(json.dumps(messages))

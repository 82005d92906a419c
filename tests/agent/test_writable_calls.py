# SPDX-License-Identifier: Apache-2.0
"""Arguments that would break a call are refused wherever a call is written: in formats whose
strings stand between tags or quotes of their own, nothing can be escaped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import ArgumentUnwritable, Session, Store
from freetoken_agent.testing import CHATML, ScriptedModel

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
ENDS = {
    "Qwen3-Coder": "</parameter>",
    "Qwen3.5-4B": "</parameter>",
    "GLM-4.6": "</arg_value>",
    "MiniMax-M2": "</parameter>",
    "ByteDance-Seed-OSS": "</parameter>",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "</parameter>",
    "inclusionai-ling-3.0-flash": "</arg_value>",
    "poolside-Laguna-S-2.1": "</arg_value>",
    "muse-glimmer": "</atem:parameter>",
    "deepseek-ai-DeepSeek-V4": "</｜DSML｜parameter>",
    "Kimi-K3": "<|close|>argument<|sep|>",
    "google-gemma-4-31B-it": '<|"|>',
}
ESCAPED = ("chatml", "Qwen-Qwen2.5-7B-Instruct", "moonshotai-Kimi-K2")
WRITE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


@pytest.fixture
def started(memory_store: Store) -> Callable[[str], Session]:
    """A session on a template that waits for what follows its first message."""

    def started(name: str) -> Session:
        if name != "chatml" and not FOLDER.is_dir():
            pytest.skip("the folder of real templates, ../shared/templates, is not here")
        path = FOLDER / f"{name}.jinja"
        source = CHATML if name == "chatml" else path.read_text(encoding="utf-8")
        model = ScriptedModel([], template=source)
        session = memory_store.create("s", model, tools=[WRITE])
        session.append("user", "Write it.")
        return session

    return started


def messages(text: str) -> list[dict[str, Any]]:
    """A call and its result, as an OpenAI client resends them."""
    arguments = '{"text": "' + text.replace('"', '\\"') + '"}'
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


@pytest.mark.parametrize("name", ENDS)
def test_a_value_that_holds_what_ends_it_is_refused_and_changes_nothing(
    name: str, started: Callable[[str], Session]
) -> None:
    """Oracle: the tag as it stands in the template; ids and undo log as before."""
    session = started(name)
    end = ENDS[name]
    whole = session.append_call("write", {"text": "a < b, </b>"})
    session.append_result(whole, "done")
    session.append("user", "Again.")
    before = session.ids()
    for evil in (f"a{end}b", end, f"<x>\n{end}\n"):
        with pytest.raises(ArgumentUnwritable, match="'text' of 'write'") as caught:
            session.append_call("write", {"mode": "new", "text": evil})
        assert caught.value.code == "argument_unwritable" and caught.value.value == end
        with pytest.raises(ArgumentUnwritable):
            session.append_call("write", {"text": {"deep": [evil]}})
        with pytest.raises(ArgumentUnwritable):
            session.replace(whole, arguments={"text": evil})
        with pytest.raises(ArgumentUnwritable):
            session.insert_call("write", {"text": evil}, "done", after=session.path()[1])
        with pytest.raises(ArgumentUnwritable):
            session.append_messages(messages(evil.replace("\n", "")), "openai")
    assert session.ids() == before
    assert [s.kind for s in session.path()][-1] == "user"
    session.append_call("write", {"text": end.replace("/", "/ ", 1).replace('|"', '| "')[:-1]})


@pytest.mark.parametrize("name", ENDS)
def test_other_tags_are_text(name: str, started: Callable[[str], Session]) -> None:
    """Oracle: the call read back from the ids of the path by the format's own reader, S30."""
    session = started(name)
    text = '</tool_call> <function=x> </function> </invoke> <think> {"a": 1}'
    session.append_call("write", {"text": text})
    calls = session.model.format.markup.calls
    assert calls is not None
    found = calls.parse(session.path()[-1].text)
    assert found is not None and found.name == "write"
    assert (found.texts or found.arguments)["text"] == text


@pytest.mark.parametrize("name", ESCAPED)
def test_formats_that_escape_take_everything(name: str, started: Callable[[str], Session]) -> None:
    """Oracle: the call read back from its ids."""
    session = started(name)
    for end in ENDS.values():
        call = session.append_call("write", {"text": f"a{end}b"})
        calls = session.model.format.markup.calls
        assert calls is not None
        found = calls.parse(session.path()[-1].text)
        assert found is not None and found.arguments == {"text": f"a{end}b"}
        session.append_result(call, "done")


def test_a_session_is_not_copied_to_a_model_that_cannot_write_its_calls(
    started: Callable[[str], Session],
) -> None:
    """Oracle: the documented error; the session is as it was."""
    session = started("chatml")
    call = session.append_call("write", {"text": "a</parameter>b"})
    session.append_result(call, "done")
    before = session.ids()
    path = FOLDER / "Qwen3-Coder.jinja"
    if not path.is_file():
        pytest.skip("the folder of real templates, ../shared/templates, is not here")
    other = ScriptedModel([], template=path.read_text(encoding="utf-8"))
    with pytest.raises(ArgumentUnwritable):
        session.rerender(other, "copy")
    assert session.ids() == before

# SPDX-License-Identifier: Apache-2.0
"""Rules 9 and 14: message lists in and out, contents as given and as stored."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from freetoken_agent import (
    InvalidMessages,
    PairingError,
    Part,
    Session,
    Store,
    UnsupportedContent,
)
from freetoken_agent.testing import Call, Raw, ScriptedModel, Think


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def session(store: Store, model: ScriptedModel) -> Session:
    return store.create("s", model, system="sys")


def _history(session: Session, model: ScriptedModel) -> None:
    session.append("user", "list it")
    model.extend([Think("look"), "Looking.", Call("ls", {"p": "/", "all": True})], "Two files.")
    call = session.generate_sync().calls[0]
    session.append_result(call, "a\nb")
    session.generate_sync()


@pytest.mark.parametrize("format", ["openai", "anthropic"])
def test_rule09_a_list_that_repeats_the_history_edits_nothing(
    session: Session, model: ScriptedModel, format: Any
) -> None:
    """Oracle: ids and version before."""
    _history(session, model)
    before = (session.ids(), session.version)
    assert not session.sync_messages(session.to_messages(format), format)
    assert (session.ids(), session.version) == before


def test_c12_resent_arguments_with_other_spelling_keep_the_stored_bytes(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the stored ids; what is forwarded is the new message alone."""
    _history(session, model)
    head = len(session.ids())
    resent = session.to_messages("openai")
    function = resent[2]["tool_calls"][0]["function"]
    function["arguments"] = '{"all":true,\n   "p":"/"}'
    assert json.loads(function["arguments"]) == {"p": "/", "all": True}
    edit = session.sync_messages([*resent, {"role": "user", "content": "thanks"}], "openai")
    assert [s.text for s in edit.added] == ["thanks"]
    assert edit.removed == ()
    assert session.plan().prefill_tokens == session.plan().input_tokens - head


def test_rule09_a_message_without_reasoning_keeps_the_stored_thought(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the thought's id stays."""
    _history(session, model)
    thought = session.find(kind="thinking")[0]
    resent = session.to_messages("openai")
    for message in resent:
        message.pop("reasoning_content", None)
    assert not session.sync_messages(resent, "openai")
    assert session.find(kind="thinking")[0].id == thought.id


def test_rule09_a_list_that_differs_is_one_edit_behind_what_matches(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: ids of what matched, one undo step back."""
    _history(session, model)
    before = session.path()
    resent = session.to_messages("openai")
    resent[-1]["content"] = "Two, in all."
    edit = session.sync_messages([*resent, {"role": "user", "content": "ok"}], "openai")
    assert [s.text for s in edit.removed] == ["Two files."]
    assert [s.text for s in edit.added] == ["Two, in all.", "ok"]
    assert [s.id for s in session.path()[:-2]] == [s.id for s in before[:-1]]
    session.undo()
    assert [s.id for s in session.path()] == [s.id for s in before]
    shorter = session.to_messages("openai")[:2]
    session.sync_messages(shorter, "openai")
    assert [s.kind for s in session.path()] == ["system", "user"]


def test_rule09_another_system_text_replaces_only_the_preamble(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the ids of everything behind it."""
    _history(session, model)
    before = [s.id for s in session.path()]
    resent = session.to_messages("openai")
    resent[0]["content"] = "new system"
    edit = session.sync_messages(resent, "openai")
    assert [s.text for s in edit.added] == ["new system"]
    assert [s.id for s in session.path()[1:]] == before[1:]


@pytest.mark.parametrize("format", ["openai", "anthropic"])
def test_rule09_a_list_given_whole_renders_like_one_by_one(
    store: Store, session: Session, model: ScriptedModel, format: Any
) -> None:
    """Oracle: appends of the same contents."""
    session.append("user", "list it")
    session.append("thinking", "look")
    session.append("assistant", "Looking.")
    call = session.append_call("ls", {"p": "/"})
    session.append_result(call, "a\nb")
    session.append("assistant", "Two files.")
    copy = store.create("copy", model)
    edit = copy.append_messages(session.to_messages(format), format)
    assert [s.kind for s in edit.added] == [s.kind for s in session.path()]
    assert copy.render() == session.render()
    assert copy.to_messages(format) == session.to_messages(format)
    copy.undo()
    assert copy.path() == []


def test_rule09_results_answer_open_calls_in_call_order(session: Session) -> None:
    """Oracle: the order of the calls."""
    session.append("user", "go")
    calls = [session.append_call(name, {}) for name in "ab"]
    session.append_messages(
        [
            {"role": "tool", "tool_call_id": calls[1].call_id, "content": "rb"},
            {"role": "tool", "tool_call_id": calls[0].call_id, "content": "ra"},
        ],
        "openai",
    )
    assert [s.text for s in session.path()[-2:]] == ["ra", "rb"]
    assert [s.tool for s in session.path()[-2:]] == ["a", "b"]


def test_rule09_bad_lists_change_nothing(session: Session) -> None:
    """Oracle: the error, and the version."""
    session.append("user", "go")
    version = session.version
    orphan = [{"role": "tool", "tool_call_id": "x", "content": "r"}]
    for messages, error in (
        (orphan, PairingError),
        ([{"role": "robot", "content": "x"}], InvalidMessages),
        ([{"role": "user", "content": [{"type": "image_url"}]}], UnsupportedContent),
    ):
        with pytest.raises(error):
            session.append_messages(messages, "openai")
        with pytest.raises(error):
            session.sync_messages(messages, "openai")
    with pytest.raises(InvalidMessages):
        session.to_messages("xml")  # type: ignore[arg-type]
    assert session.version == version


def test_rule09_a_thought_after_a_text_is_refused_with_a_remedy_that_works(
    session: Session,
) -> None:
    """Oracle: the same blocks sent as the error says; both of its ways are accepted whole."""
    text = {"type": "text", "text": "first"}
    thought = {"type": "thinking", "thinking": "hm"}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    user = {"role": "user", "content": "go"}
    before = session.ids()
    with pytest.raises(InvalidMessages, match="message 1: a thinking block after a text") as error:
        session.append_messages(
            [user, {"role": "assistant", "content": [text, thought, use]}], "anthropic"
        )
    assert error.value.remedy == "put the thought first, or begin another assistant message with it"
    assert session.ids() == before
    session.append_messages(
        [user, {"role": "assistant", "content": [thought, text, use]}], "anthropic"
    )
    assert [s.kind for s in session.path()[2:]] == ["thinking", "text", "tool_call"]
    session.undo()
    split = [{"role": "assistant", "content": blocks} for blocks in ([text], [thought, use])]
    session.append_messages([user, *split], "anthropic")
    assert [s.kind for s in session.path()[2:]] == ["text", "thinking", "tool_call"]
    assert [m["role"] for m in session.to_messages("anthropic")[2:]] == ["assistant", "assistant"]
    assert not session.sync_messages(session.to_messages("anthropic"), "anthropic")


def test_rule09_two_assistant_messages_stay_two(session: Session) -> None:
    """Oracle: the list given is the list that comes out."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    session.append_messages(messages, "openai")
    assert session.to_messages("openai")[1:] == messages


@pytest.mark.parametrize(
    "content",
    [
        "two parts",
        [Part(text="two parts")],
        [{"type": "text", "text": "two "}, Part(text="parts")],
    ],
)
def test_c18_a_string_and_text_parts_are_the_same(session: Session, content: Any) -> None:
    """Oracle: the ids of the string."""
    segment = session.append("user", content)
    assert (segment.content, segment.text) == ("two parts", "two parts")


@pytest.mark.parametrize(
    "content", [None, 7, b"x", [b"x"], [{"type": "image"}], {"type": "text", "text": "x"}]
)
def test_rule14_other_content_is_refused(session: Session, content: Any) -> None:
    """Oracle: UnsupportedContent, and nothing changed."""
    version = session.version
    with pytest.raises(UnsupportedContent) as error:
        session.append("user", content)
    assert error.value.code == "unsupported_content"
    assert session.version == version


def test_rule14_content_is_as_given_and_text_is_decoded(session: Session) -> None:
    """Oracle: the tokenizer."""
    for text in ("", " ", "naïve 👩‍👩‍👧 text\n", "<|im_end|>"):
        segment = session.append("user", text)
        assert (segment.content, segment.text) == (text, text)
    model = session.model
    assert isinstance(model, ScriptedModel)
    whole = model.tokenizer.decode(session.ids())
    assert whole == session.render()


def test_rule14_segments_are_snapshots_of_their_place(session: Session) -> None:
    """Oracle: a snapshot taken before an edit does not change with it."""
    session.append("user", "a")
    answer = session.append("assistant", "b")
    assert session.path()[-1].turn == 0
    session.insert(before=session.path()[1], kind="user", content="first")
    assert (answer.turn, session.path()[-1].turn) == (0, 1)
    assert session.path()[-1].id == answer.id


def test_rule14_a_character_cut_by_a_limit_is_whole_in_the_rendering(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: the bytes of one character, written in two segments."""
    session.append("user", "go")
    first, second = "é".encode()
    model.extend(Raw([first]), Raw([second]))
    session.generate_sync()
    session.generate_sync()
    assert session.render().endswith("assistant\né")
    assert list(session.ids()[-2:]) == [first, second]

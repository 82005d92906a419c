# SPDX-License-Identifier: Apache-2.0
"""Faults that were found by trying to break sessions, each with the value that is right."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from freetoken_agent import (
    FreetokenError,
    InvalidEdit,
    InvalidMessages,
    NothingToGenerate,
    PairingError,
    SegmentNotFound,
    Session,
    Store,
)
from freetoken_agent.testing import CHATML, Raw, ScriptedModel


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def session(store: Store, model: ScriptedModel) -> Session:
    return store.create("s", model, system="sys")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, *calls: str, arguments: str = "{}") -> dict[str, Any]:
    made = [{"id": i, "function": {"name": "f", "arguments": arguments}} for i in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def _result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


# Steps, ids, branches


@pytest.mark.parametrize("steps", [0, -1, 1.5, "1", None])
def test_rule01_undo_and_redo_take_whole_steps(session: Session, steps: Any) -> None:
    """Oracle: the path before. A negative undo was a redo."""
    session.append("user", "a")
    session.undo()
    for move in (session.undo, session.redo):
        with pytest.raises(InvalidEdit):
            move(steps)
    assert [s.kind for s in session.path()] == ["system"]


@pytest.mark.parametrize("turns", ["1", 1.5, None])
def test_counts_of_turns_are_whole_numbers(session: Session, turns: Any) -> None:
    """Oracle: the error's type."""
    session.append("user", "a")
    with pytest.raises(InvalidEdit):
        session.rewind(turns=turns)
    with pytest.raises(InvalidEdit):
        session.drop(kind="thinking", keep_turns=turns)


@pytest.mark.parametrize("name", ["", "x" * 200, "a\nb", "\ud800"])
def test_rule01_what_cannot_be_an_id_is_unknown(session: Session, name: str) -> None:
    """Oracle: the error of any id that the session never gave out."""
    for use in (session.versions, session.delete, session.pin):
        with pytest.raises(SegmentNotFound) as error:
            use(name)
        assert error.value.reason == "unknown"


@pytest.mark.parametrize("name", [5, None, [], b"x"])
def test_a_segment_is_named_by_itself_or_its_id(session: Session, name: Any) -> None:
    """Oracle: the error's type, and the path before."""
    before = session.ids()
    uses: Sequence[Callable[[], object]] = (
        lambda: session.delete(name),
        lambda: session.replace(name, "x"),
        lambda: session.versions(name),
        lambda: session.append_result(name, "x"),
        lambda: session.append(name, "x"),
        lambda: session.append_call(name, {}),
        lambda: session.append_call("f", {}, id=[] if name is None else name),  # type: ignore
    )
    for use in uses:
        with pytest.raises(InvalidEdit):
            use()
    assert session.ids() == before


def test_rule03_the_main_branch_stays(store: Store, session: Session, model: ScriptedModel) -> None:
    """Oracle: the session opens as before. Without `main` nothing could open or delete it."""
    session.append("user", "a")
    fork = session.fork(name="other")
    with pytest.raises(InvalidEdit):
        fork.delete_branch("main")
    assert store.open("s", model, branch="other").ids() == session.ids()
    store.delete("s")


# Calls


def test_rule08_two_open_calls_cannot_share_an_id(session: Session) -> None:
    """Oracle: nothing is there afterwards, and each result answers one call."""
    before = session.ids()
    lists = (
        [_user("a"), _assistant(None, "c", "c"), _result("c", "1"), _result("c", "2")],
        [_user("a"), _assistant(None, "c"), _assistant(None, "c"), _result("c", "1")],
    )
    for messages in lists:
        with pytest.raises(PairingError):
            session.append_messages(messages, "openai")
        assert session.ids() == before


def test_rule08_a_generated_call_gets_an_id_of_its_own(store: Store) -> None:
    """Oracle: two ids. The format writes ids, and the model wrote the same one twice."""
    template = CHATML.replace('{"name": "', '{"id": "\' + call.id + \'", "name": "')
    unit = '<tool_call>\n{"id": "c1", "name": "f", "arguments": {}}\n</tool_call>'
    model = ScriptedModel([Raw(f"{unit}\n{unit}<|im_end|>")], template=template)
    session = store.create("s", model)
    session.append("user", "go")
    first, second = session.generate_sync().calls
    assert first.call_id == "c1"
    assert second.call_id != "c1"
    session.append_result(second, "two")
    session.append_result(first, "one")
    assert [s.text for s in session.find(kind="tool_result")] == ["one", "two"]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 2**300])
def test_arguments_hold_numbers_of_any_size(tmp_path: Any, number: int) -> None:
    """Oracle: the number, also after reopening and when the model wrote it."""
    unit = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {number}}}}}\n</tool_call>'
    model = ScriptedModel([Raw(unit + "<|im_end|>")])
    with Store(tmp_path / "store") as store:
        session = store.create("s", model, meta={"n": number})
        session.append("user", "go", meta={"n": number})
        session.generate_sync()
        session.append_call("f", {"n": number})
    with Store(tmp_path / "store") as store:
        session = store.open("s")
        assert [c.arguments for c in session.find(kind="tool_call")] == [{"n": number}] * 2
        assert session.path()[0].meta == session.meta == {"n": number}


@pytest.mark.parametrize("depth", [100, 600, 5000])
def test_json_that_is_too_deep_is_refused(
    store: Store, session: Session, model: ScriptedModel, depth: int
) -> None:
    """Oracle: an error that says so, and the path before."""
    session.append("user", "a")
    deep = {"n": _nested(depth)}
    before = session.ids()
    uses: Mapping[type[FreetokenError], Sequence[Callable[[], object]]] = {
        InvalidEdit: (
            lambda: session.append_call("f", deep),
            lambda: session.append("user", "b", meta=deep),
            lambda: session.set_tools([{"name": "f", "parameters": deep}]),
            lambda: store.create("t", model, meta=deep),
        ),
        InvalidMessages: (
            lambda: session.append_messages(
                [_assistant(None, "c", arguments='{"n": ' + "[" * depth + "]" * depth + "}")],
                "openai",
            ),
        ),
    }
    for kind, calls in uses.items():
        for call in calls:
            with pytest.raises(kind):
                call()
    assert session.ids() == before


@pytest.mark.parametrize(
    "value", ["[" * 400 + "]" * 400, "[" * 5000 + "]" * 5000, "NaN", "-Infinity", "1e999"]
)
def test_s37_a_call_whose_arguments_are_not_json_has_none(store: Store, value: str) -> None:
    """Oracle: what was sampled, as the call's text; the session goes on."""
    unit = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {value}}}}}\n</tool_call>'
    model = ScriptedModel([Raw(unit + "<|im_end|>"), "fine"])
    session = store.create("s", model)
    session.append("user", "go")
    reply = session.generate_sync(max_tokens=20_000)
    [call] = reply.calls
    assert (call.tool, call.arguments, call.text) == ("f", None, unit)
    session.append("user", "again")
    assert session.generate_sync().text == "fine"


# Message lists


def test_rule09_a_list_that_ends_inside_a_message_closes_it(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the same list in a fresh session. The shortened message was left open, and the next
    one was glued to it."""
    long = [_user("a"), _assistant("hello", "c"), _result("c", "1"), _assistant("done")]
    for short in ([_user("a"), *map(_assistant, texts)] for texts in (["hello"], ["hello", "x"])):
        session.sync_messages(long, "openai")
        session.sync_messages(short, "openai")
        with Store(":memory:") as other:
            fresh = other.create("s", model, system="sys")
            fresh.append_messages(short, "openai")
            assert session.ids() == fresh.ids()
            assert session.to_messages("openai") == fresh.to_messages("openai")
        with pytest.raises(NothingToGenerate):
            session.generate_sync()


def test_rule09_a_second_message_is_not_glued_to_an_open_one(
    store: Store, session: Session
) -> None:
    """Oracle: the list."""
    session.append("user", "a")
    session.append("assistant", "cut", open=True)
    messages = [_user("a"), _assistant("cut"), _assistant("next")]
    session.sync_messages(messages, "openai")
    assert session.to_messages("openai")[1:] == messages


@pytest.mark.parametrize("calls", [("c",), ("c", "d")])
def test_rule09_an_unanswered_call_in_a_list_is_interrupted_once(
    session: Session, calls: Sequence[str]
) -> None:
    """Oracle: sending the list again edits nothing, and answering the call does."""
    answered = [_result(call, "late") for call in calls[1:]]
    messages = [_user("a"), _assistant("hm", *calls), *answered, _user("b")]
    assert session.sync_messages(messages, "openai")
    before = session.ids()
    assert not session.sync_messages(messages, "openai")
    assert session.ids() == before
    messages.insert(2, _result("c", "now"))
    assert session.sync_messages(messages, "openai")
    assert session.find(kind="tool_result")[0].text == "now"


def test_rule09_equal_arguments_are_equal_json(session: Session) -> None:
    """Oracle: JSON has one kind of number, and true is not 1."""
    messages = [_user("a"), _assistant(None, "c", arguments='{"x": 1.0}'), _result("c", "r")]
    session.append_messages(messages, "openai")
    messages[1] = _assistant(None, "c", arguments='{"x": 1}')
    assert not session.sync_messages(messages, "openai")
    assert not session.replace(session.find(kind="tool_call")[0], arguments={"x": 1})
    messages[1] = _assistant(None, "c", arguments='{"x": true}')
    assert session.sync_messages(messages, "openai")
    assert session.find(kind="tool_call")[0].arguments == {"x": True}


def test_rule09_results_are_ordered_by_the_calls_before_them(session: Session) -> None:
    """Oracle: sending the list again edits nothing. Two turns use the same ids in another order."""
    messages = [
        _user("a"),
        _assistant(None, "c0", "c1"),
        _result("c0", "1"),
        _result("c1", "2"),
        _user("b"),
        _assistant(None, "c1", "c0"),
        _result("c1", "3"),
        _result("c0", "4"),
    ]
    session.append_messages(messages, "openai")
    assert [s.text for s in session.find(kind="tool_result")] == ["1", "2", "3", "4"]
    assert not session.sync_messages(messages, "openai")


@pytest.mark.parametrize(
    "messages",
    [
        5,
        None,
        [_user("a"), {"role": "assistant", "content": None, "tool_calls": 5}],
        [_user("a"), {"role": "assistant", "content": None, "function_call": {"name": "f"}}],
        [_user("a"), _assistant(None, "c", arguments='{"x": NaN}')],
    ],
)
def test_messages_of_another_shape_are_refused(session: Session, messages: Any) -> None:
    """Oracle: the error's type, and the path before."""
    before = session.ids()
    for use in (session.append_messages, session.sync_messages):
        with pytest.raises(InvalidMessages):
            use(messages, "openai")
    with pytest.raises(InvalidMessages):
        session.to_messages([])  # type: ignore[arg-type]
    assert session.ids() == before


# Layout


def test_rule05_a_preamble_that_loses_a_part_is_laid_out_again(store: Store) -> None:
    """Oracle: a session that never had the tools. The template says at the start that it has some,
    and nothing follows the preamble."""
    model = ScriptedModel(template="{% if tools %}{{ 'Tools!\\n' }}{% endif %}" + CHATML)
    plain = store.create("plain", model, system="sys")
    ways: Sequence[Callable[[Session], object]] = (
        lambda s: s.set_tools([]),
        lambda s: s.rewind(before=s.path()[1]),
        lambda s: s.delete(s.path()[1]),
    )
    for index, way in enumerate(ways):
        session = store.create(f"s{index}", model, system="sys", tools=[{"name": "f"}])
        assert session.render().startswith("Tools!")
        way(session)
        assert session.ids() == plain.ids()

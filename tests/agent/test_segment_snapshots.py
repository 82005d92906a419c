# SPDX-License-Identifier: Apache-2.0
"""Segments are snapshots: whoever holds one cannot change what a session shows or stores."""

import copy
import json
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from freetoken_agent import Segment, Session, Store
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tooling.json_values import frozen, thawed

ARGUMENTS: dict[str, Any] = {"path": "/srv", "deep": {"list": [1, {"x": None}], "n": 2.5}}
META: dict[str, Any] = {"by": "me", "tags": ["a", ["b"]]}


@pytest.fixture
def session() -> Iterator[Session]:
    """A system text, a user message with meta data, a call, its result."""
    with Store(":memory:") as store:
        session = store.create("s", ScriptedModel(), meta=copy.deepcopy(META))
        session.append("user", "go", meta=copy.deepcopy(META))
        call = session.append_call("ls", copy.deepcopy(ARGUMENTS), id="call00001")
        session.append_result(call, "r")
        yield session


def _mutations(value: Any) -> list[Callable[[], object]]:
    """Every way to change a dict or a list in place."""
    if isinstance(value, dict):
        return [
            lambda: value.__setitem__("new", 1),
            lambda: value.__delitem__(next(iter(value))),
            lambda: value.update(new=1),
            lambda: value.setdefault("new", 1),
            lambda: value.pop(next(iter(value))),
            lambda: value.popitem(),
            lambda: value.clear(),
            lambda: value.__ior__({"new": 1}),
        ]
    return [
        lambda: value.__setitem__(0, 1),
        lambda: value.__delitem__(0),
        lambda: value.append(1),
        lambda: value.extend([1]),
        lambda: value.insert(0, 1),
        lambda: value.pop(),
        lambda: value.remove(value[0]),
        lambda: value.clear(),
        lambda: value.sort(),
        lambda: value.reverse(),
        lambda: value.__iadd__([1]),
        lambda: value.__imul__(2),
    ]


def test_snapshots_refuse_every_change_at_every_depth(session: Session) -> None:
    """Oracle: the error, and the values as they were given."""
    user, call, _ = session.path()
    assert call.arguments is not None
    for value in (
        call.arguments,
        call.arguments["deep"],
        call.arguments["deep"]["list"],
        call.arguments["deep"]["list"][1],
        user.meta,
        user.meta["tags"],
        user.meta["tags"][1],
    ):
        for mutate in _mutations(value):
            with pytest.raises(TypeError, match="deepcopy"):
                mutate()
    assert [s.arguments for s in session.path()] == [None, ARGUMENTS, None]
    assert [s.meta for s in session.path()] == [META, {}, {}]


def test_snapshots_from_every_reader_are_independent(session: Session) -> None:
    """Oracle: what is stored, after every reader's dicts were attacked."""
    model = session.model
    assert isinstance(model, ScriptedModel)
    user, call, _ = session.path()
    model.extend(Call("rm", {"deep": {"list": [1]}}))
    reply = session.generate_sync()
    edit = session.replace(call, arguments={"deep": {"list": [2]}}, dry_run=True)
    fork = session.fork()
    fork.replace(call, arguments={"deep": {"list": [3]}})
    found: list[Segment] = [
        *reply.segments,
        *edit.added,
        *edit.removed,
        *session.find(kind="tool_call"),
        *session.versions(call),
        *(node.segment for node in session.tree().nodes),
        *(s for turn in session.turns() for s in turn.segments),
        *session.diff(fork).removed,
        *session.path(frames=True),
    ]
    before = session.to_messages("openai")
    for segment in found:
        for value in (segment.meta, segment.arguments):
            if value is not None:
                with pytest.raises(TypeError):
                    value["deep"] = 1  # type: ignore[index]
    assert session.to_messages("openai") == before
    assert session.path()[0].meta == META


def test_snapshots_do_not_share_messages_or_the_sessions_meta(session: Session) -> None:
    """Oracle: a second reading, after the first was changed in place."""
    emitted = session.to_messages("anthropic")
    emitted[1]["content"][0]["input"]["deep"]["list"].append("changed")
    assert session.to_messages("anthropic")[1]["content"][0]["input"] == ARGUMENTS
    meta: Any = session.meta
    meta["tags"].append("changed")
    assert session.meta == META


def test_snapshots_are_dicts_for_encoders_and_copies_may_be_changed(session: Session) -> None:
    """Oracle: the plain values, through JSON, pydantic, copy and pickle."""
    call = session.find(kind="tool_call")[0]
    assert call.arguments == ARGUMENTS
    assert json.loads(json.dumps(call.arguments)) == ARGUMENTS
    assert call.model_dump()["arguments"] == ARGUMENTS
    assert json.loads(call.model_dump_json())["arguments"] == ARGUMENTS
    assert Segment.model_validate_json(call.model_dump_json()) == call
    assert {**call.arguments} == ARGUMENTS
    for copied in (copy.deepcopy(call.arguments), pickle.loads(pickle.dumps(call.arguments))):
        assert copied == ARGUMENTS
        copied["deep"]["list"].append(1)
        copied["deep"]["list"][1]["x"] = 1
    assert thawed(call.arguments) == ARGUMENTS == call.arguments
    shallow = copy.copy(call.arguments["deep"]["list"])
    shallow.append(1)
    assert pickle.loads(pickle.dumps(call)) == call
    replaced = session.replace(call, arguments=copy.deepcopy(ARGUMENTS) | {"path": "/"}).added[0]
    assert replaced.arguments == ARGUMENTS | {"path": "/"}


def test_snapshots_cost_a_long_path_nothing_the_second_time(session: Session) -> None:
    """Oracle: identity, which is what the cache promises, and a bound that a copy of 400 nested
    arguments for each of 50 readings would break by far."""
    rounds: list[dict[str, Any]] = []
    for number in range(400):
        call_id = f"c{number:08}"
        arguments = json.dumps({"rows": [{"n": i} for i in range(50)], "k": number})
        function = {"name": "f", "arguments": arguments}
        rounds += [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": "ok"},
        ]
    session.append_messages(rounds, "openai")
    first = session.path()
    begin = time.perf_counter()
    for _ in range(50):
        session.path()
    assert time.perf_counter() - begin < 1.0
    assert all(a is b for a, b in zip(first, session.path(), strict=True))


def test_frozen_values_are_made_of_what_json_has() -> None:
    """Oracle: by hand."""
    value = frozen({"a": (1, {"b": []}), "c": "x"})
    assert value == {"a": [1, {"b": []}], "c": "x"}
    assert repr(value) == "{'a': [1, {'b': []}], 'c': 'x'}"
    assert type(thawed(value)["a"]) is list
    assert type(copy.copy(value)) is dict

# SPDX-License-Identifier: Apache-2.0
"""Rules 5, 6 and 15: the preamble, frames, and thinking in the history."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken_agent import InvalidEdit, NothingToUndo, Session, Store, TemplateUnsupported
from freetoken_agent.testing import CHATML, ScriptedModel, Think

TOOL = {"name": "ls", "description": "List a folder.", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": TOOL}

# Drops the reasoning of every turn but the last, as Qwen3's template does.
DROPPING = CHATML.replace(
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and loop.index0 > ns.last %}",
).replace(
    "{%- for message in messages %}",
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}",
    1,
)
# Refuses two user messages in a row, and a system message anywhere but first.
STRICT = CHATML.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}"
    "{%- if not loop.first and message.role == 'system' %}"
    "{{ raise_exception('system must be first') }}{% endif %}"
    "{%- if not loop.first and message.role == 'user' and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


def _kinds(session: Session) -> list[str]:
    return [segment.kind for segment in session.path()]


def test_rule05_system_and_tools_are_one_preamble_set_by_edits(store: Store) -> None:
    """Oracle: the rendering of the same preamble made at creation."""
    model = ScriptedModel()
    whole = store.create("whole", model, system="sys", tools=[TOOL])
    whole.append("user", "hi")
    built = store.create("built", model)
    user = built.append("user", "hi")
    assert built.set_tools([WRAPPED])
    edit = built.set_system("sys")
    assert [s.kind for s in edit.added] == ["system"]
    assert built.ids() == whole.ids()
    assert built.path()[-1].id == user.id
    tools = built.find(kind="tools")[0]
    assert json.loads(tools.content) == [WRAPPED]
    changed = built.set_system("other")
    assert changed.added[0].replaces == changed.removed[0].id
    assert built.find(kind="tools")[0].id == tools.id
    assert built.set_system(None)
    assert built.set_tools([])
    assert _kinds(built) == ["user"]
    assert not built.set_tools([])
    assert not built.set_system(None)
    bare = store.create("bare", model)
    bare.append("user", "hi")
    assert built.ids() == bare.ids()
    built.undo(4)
    assert built.find(kind="tools")[0].id == tools.id


def test_rule05_the_creation_is_no_undo_step(store: Store) -> None:
    """Oracle: the path at creation."""
    session = store.create("s", ScriptedModel(), system="sys")
    with pytest.raises(NothingToUndo):
        session.undo()
    assert _kinds(session) == ["system"]


def test_rule05_a_first_system_append_is_the_preamble(store: Store) -> None:
    """Oracle: the rendering of a session created with that text."""
    model = ScriptedModel()
    session = store.create("s", model, tools=[TOOL])
    segment = session.append("system", "sys", meta={"by": "me"})
    assert (segment.kind, segment.meta) == ("system", {"by": "me"})
    assert session.ids() == store.create("t", model, system="sys", tools=[TOOL]).ids()
    assert session.find(kind="system")[0].id == segment.id


def test_rule05_a_system_inserted_at_the_preamble_is_the_preambles(store: Store) -> None:
    """Oracle: a session created with that text; the place of system and tools is the template's."""
    model = ScriptedModel()
    whole = store.create("whole", model, system="sys", tools=[TOOL])
    whole.append("user", "hi")
    session = store.create("s", model, tools=[TOOL])
    user = session.append("user", "hi")
    session.insert(before=user, kind="system", content="sys")
    assert session.ids() == whole.ids()
    bare = store.create("bare", model)
    bare.insert(before=bare.append("user", "hi"), kind="system", content="sys")
    assert _kinds(bare) == ["system", "user"]


def test_rule05_a_later_system_text_only_where_the_template_keeps_it(store: Store) -> None:
    """Oracle: the template; a refusal changes nothing."""
    kept = store.create("kept", ScriptedModel(), system="sys")
    kept.append("user", "hi")
    kept.append("assistant", "hello")
    kept.append("system", "be brief")
    assert kept.render().endswith("<|im_end|>\n<|im_start|>system\nbe brief")
    strict = store.create("strict", ScriptedModel(template=STRICT), system="sys")
    strict.append("user", "hi")
    strict.append("assistant", "hello")
    before = (strict.ids(), strict.version)
    with pytest.raises(TemplateUnsupported) as error:
        strict.append("system", "be brief")
    assert error.value.code == "template_unsupported"
    assert (strict.ids(), strict.version) == before


def test_rule05_nothing_goes_inside_or_before_the_preamble(store: Store) -> None:
    """Oracle: InvalidEdit; deleting a part of the preamble is the same as setting it to none."""
    session = store.create("s", ScriptedModel(), system="sys", tools=[TOOL])
    session.append("user", "hi")
    system, tools, _ = session.path()
    for place in (system, tools):
        with pytest.raises(InvalidEdit):
            session.insert(before=place, kind="user", content="x")
    with pytest.raises(InvalidEdit):
        session.replace(tools, "[]")
    session.delete(tools)
    assert session.ids() == _fresh(store, system="sys").ids()


def _fresh(store: Store, **preamble: str) -> Session:
    session = store.create("fresh", ScriptedModel(), system=preamble["system"])
    session.append("user", "hi")
    return session


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"name": ""}],
        [TOOL, TOOL],
        [{"name": "a", "parameters": []}],
        [{"type": "x"}],
        ["ls"],
    ],
)
def test_rule05_bad_tools_are_named(store: Store, tools: list[object]) -> None:
    """Oracle: the error, and nothing was created."""
    with pytest.raises(InvalidEdit):
        store.create("s", ScriptedModel(), tools=tools)  # type: ignore[arg-type]
    assert store.list() == []


def test_rule06_an_edit_derives_only_the_gaps_it_touches(store: Store) -> None:
    """Oracle: gaps and ids of all other places, byte for byte."""
    session = store.create("s", ScriptedModel(), system="sys")
    for i in range(4):
        session.append("user", f"u{i}")
        session.append("assistant", f"a{i}")
    places = session._handle.path.places
    session.replace(session.path()[4], "changed")
    after = session._handle.path.places
    for i, (old, new) in enumerate(zip(places, after, strict=True)):
        assert new.gap_ids == old.gap_ids
        assert (new.body is old.body) == (i != 4)
        assert (new.node == old.node) == (i < 4)


def test_rule06_frame_tokens_count_the_gap_and_frames_show_it(store: Store) -> None:
    """Oracle: the frames' tokens and the contents' tokens are all of the path."""
    session = store.create("s", ScriptedModel(), system="sys")
    session.append("user", "u")
    session.append("assistant", "a")
    everything = session.path(frames=True)
    assert [s.kind for s in everything] == ["frame", "system", "frame", "user", "frame", "text"]
    assert "".join(s.text for s in everything) == session.render()
    assert sum(s.num_tokens for s in everything) == len(session.ids())
    assert [s.frame_tokens for s in session.path()] == [
        s.num_tokens for s in everything if s.kind == "frame"
    ]


def test_rule06_a_refused_edit_changes_nothing(store: Store) -> None:
    """Oracle: ids and version before; the template refuses two user messages in a row."""
    session = store.create("s", ScriptedModel(template=STRICT))
    session.append("user", "a")
    answer = session.append("assistant", "b")
    session.append("user", "c")
    before = (session.ids(), session.version)
    for refused in (
        lambda: session.delete(answer),
        lambda: session.append("user", "d"),
        lambda: session.insert(before=answer, kind="user", content="x"),
    ):
        with pytest.raises(TemplateUnsupported):
            refused()
        assert (session.ids(), session.version) == before
    with pytest.raises(TemplateUnsupported), session.batch():
        session.delete(answer)
    assert (session.ids(), session.version) == before


@pytest.mark.parametrize("policy", ["keep", "template"])
def test_c03_a_user_message_drops_thinking_only_by_policy(store: Store, policy: str) -> None:
    """Oracle: keep forwards only what is new; template removes the thoughts in a recorded step,
    and the plan says from where on."""
    model = ScriptedModel(template=DROPPING)
    assert model.format.report.drops_thinking
    session = store.create("s", model, history_thinking=policy)  # type: ignore[arg-type]
    session.append("user", "a")
    model.extend([Think("because"), "b"])
    session.generate_sync()
    before = session.path()
    thought = session.find(kind="thinking")[0]
    head = len(session.ids())
    session.append("user", "c")
    plan = session.plan()
    if policy == "keep":
        assert _kinds(session) == ["user", "thinking", "text", "user"]
        assert plan.prefill_tokens == plan.input_tokens - head
    else:
        assert _kinds(session) == ["user", "text", "user"]
        assert plan.miss is not None and plan.miss.segment is not None
        assert plan.miss.segment.text == "b"
        assert "because" not in session.render()
        assert [v.id for v in session.versions(thought)] == [thought.id]
    session.undo()
    assert [s.id for s in session.path()] == [s.id for s in before]


def test_rule06_history_thinking_is_checked_and_stored(store: Store) -> None:
    """Oracle: the option as given."""
    with pytest.raises(InvalidEdit):
        store.create("s", ScriptedModel(), history_thinking="maybe")  # type: ignore[arg-type]
    store.create("s", ScriptedModel(), history_thinking="template")
    assert store.open("s").history_thinking == "template"


def test_rule06_a_stop_id_that_is_the_closers_first_is_not_stored_twice(store: Store) -> None:
    """Oracle: the template's rendering has one closer between the turns."""
    model = ScriptedModel(["b"])
    session = store.create("s", model)
    session.append("user", "a")
    session.generate_sync()
    session.append("user", "c")
    assert session.render().count("<|im_end|>") == 2


def test_rule15_the_report_names_the_fallbacks(store: Store) -> None:
    """Oracle: a template that knows neither thoughts nor calls, and the documented inline forms."""
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = ScriptedModel(template=plain)
    report = model.format.report
    assert report.fallback_thinking and report.fallback_tools
    session = store.create("s", model, system="sys", tools=[TOOL])
    session.append("user", "hi")
    session.append("thinking", "hm")
    call = session.append_call("ls", {"p": "/"})
    session.append_result(call, "a")
    text = session.render()
    assert "<think>\nhm\n</think>\n\n" in text
    assert '<tool_call>\n{"name": "ls", "arguments": {"p": "/"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\na\n</tool_response>" in text + "\n</tool_response>"


@pytest.mark.parametrize("at", ["system", "tools"])
def test_rule04_a_fork_inside_the_preamble_is_what_a_rewind_there_is(
    tmp_path: Path, at: str
) -> None:
    """Oracle: the ids of a session that was created with this part only, and of a rewind."""
    with Store(tmp_path / "store") as store:
        model = ScriptedModel()
        session = store.create("s", model, system="sys", tools=[TOOL])
        session.append("user", "a")
        before = session.ids()
        segment = session.find(kind=at)[0]
        alone = store.create("alone", model, system="sys", tools=[TOOL] if at == "tools" else ())
        fork = session.fork(at=segment, name="inside")
        assert fork.ids() == alone.ids()
        assert fork.path()[-1].id == segment.id
        assert (fork.branch, session.ids()) == ("inside", before)
        with pytest.raises(NothingToUndo):
            fork.undo()
        fork.append("user", "b")
        fork.undo()
        assert fork.ids() == alone.ids()
        session.rewind(to=segment)
        assert session.ids() == alone.ids()
        auto = session.fork(before=session.path()[0])
        assert (auto.ids(), auto.branch) == ([], "fork-1")
    with Store(tmp_path / "store") as store:
        reopened = store.open("s", model, branch="inside")
        assert reopened.ids() == alone.ids()

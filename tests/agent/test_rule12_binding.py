# SPDX-License-Identifier: Apache-2.0
"""Rules 12 and 13: which model may write a session, what a read-only one can do, and errors."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import freetoken_agent
from freetoken_agent import (
    FreetokenError,
    Session,
    SessionReadOnly,
    Store,
    StoreMismatch,
    TemplateUnsupported,
)
from freetoken_agent.model import Fingerprint
from freetoken_agent.testing import CHATML, Call, ScriptedModel, Think
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer

OTHER = CHATML.replace("<|im_start|>", "<|im_start|>~")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    model = ScriptedModel([[Think("hm"), "hello", Call("ls", {"p": "/"})], "bye"])
    with Store(path) as store:
        session = store.create("s", model, system="sys", tools=[{"name": "ls"}], meta={"k": [1]})
        session.append("user", "hi")
        call = session.generate_sync().calls[0]
        session.append_result(call, "files")
        session.generate_sync()
        session.fork(name="side")
    yield path


def _contents(session: Session) -> list[tuple[str, str, object]]:
    return [(s.kind, s.content, s.arguments) for s in session.path()]


def test_rule12_a_folder_store_attaches_one_model(folder: Path) -> None:
    """Oracle: StoreMismatch for a second one, for a second store, and a fresh start after close."""
    model, other = ScriptedModel(), ScriptedModel()
    with Store(folder) as store:
        store.open("s", model)
        store.open("s", model)
        store.create("t", model)
        with pytest.raises(StoreMismatch) as error:
            store.open("s", other)
        assert error.value.code == "store_mismatch"
        with pytest.raises(StoreMismatch):
            store.create("u", other)
        with Store(folder.with_name("second")) as second:
            with pytest.raises(StoreMismatch):
                second.create("v", model)
            assert second.list() == []
        assert [info.name for info in store.list()] == ["s", "t"]
    with Store(folder) as store:
        store.open("s", other)


def test_rule12_memory_stores_never_attach() -> None:
    """Oracle: two models in one store, one model in two stores."""
    one, two = ScriptedModel(), ScriptedModel()
    with Store(":memory:") as store, Store(":memory:") as second:
        store.create("a", one)
        store.create("b", two)
        second.create("a", one)
        assert one.ledger.snapshots is None


def _shown(session: Session) -> tuple[object, ...]:
    """Everything a handle shows without a model. Whether states are there depends on one."""
    return (
        session.ids(),
        session.render(),
        [s.model_copy(update={"anchored": False}) for s in session.path()],
        session.to_messages("openai"),
        session.tree().model_dump(),
        session.branches(),
        [[s.id for s in turn.segments] for turn in session.turns()],
        [[v.id for v in session.versions(s)] for s in session.path()],
        bool(session.diff("side")),
        session.open_branch("side").ids(),
    )


def _foreign(how: str) -> ScriptedModel | None:
    if how == "no model":
        return None
    if how == "other template":
        return ScriptedModel(template=OTHER)
    model = ScriptedModel()
    model.tokenizer = _Renamed()
    return model


@pytest.mark.parametrize("how", ["no model", "other template", "other tokenizer"])
def test_rule12_read_only_shows_everything(folder: Path, how: str) -> None:
    """Oracle: what a handle with the right model shows."""
    with Store(folder) as store:
        expected = _shown(store.open("s", ScriptedModel()))
    with Store(folder) as store:
        session = store.open("s", _foreign(how))
        assert session.binding.state == "read_only"
        assert how.split()[1] in (session.binding.reason or "")
        assert _shown(session) == expected


@pytest.mark.parametrize("how", ["no model", "other template", "other tokenizer"])
def test_rule12_read_only_writes_nothing(folder: Path, how: str) -> None:
    """Oracle: every mutator raises the same error, which says why and what to do."""
    with Store(folder) as store:
        s = store.open("s", _foreign(how))
        user, call = s.find(kind="user")[0], s.find(kind="tool_call")[0]
        writers: tuple[Callable[[], object], ...] = (
            lambda: s.append("user", "x"),
            lambda: s.append_call("f", {}),
            lambda: s.append_result(call, "x"),
            lambda: s.append_messages([], "openai"),
            lambda: s.sync_messages([], "openai"),
            lambda: s.set_system("x"),
            lambda: s.set_tools([]),
            lambda: s.replace(user, "x"),
            lambda: s.insert(after=user, kind="user", content="x"),
            lambda: s.insert_call("f", {}, "r", after=user),
            lambda: s.delete(user),
            lambda: s.drop(kind="user"),
            lambda: s.rewind(turns=1),
            lambda: s.undo(),
            lambda: s.redo(),
            lambda: s.batch().__enter__(),
            lambda: s.fork(),
            lambda: s.delete_branch("side"),
            lambda: s.pin(user),
            lambda: s.unpin(user),
            lambda: s.generate_sync(),
            lambda: s.plan(),
            lambda: s.model,
        )
        for write in writers:
            with pytest.raises(SessionReadOnly) as error:
                write()
            assert error.value.code == "session_read_only"
            assert "remedy" in str(error.value)


async def test_rule12_read_only_refuses_purge_and_warm(folder: Path) -> None:
    """Oracle: the error."""
    with Store(folder) as store:
        s = store.open("s")
        with pytest.raises(SessionReadOnly):
            await s.purge(s.path()[0])
        with pytest.raises(SessionReadOnly):
            await s.warm()


class _Renamed(ByteTokenizer):
    """A tokenizer that differs in its digest only."""

    @property
    def digest(self) -> str:
        return "another"


def test_rule12_rerender_copies_into_a_new_session(folder: Path) -> None:
    """Oracle: the contents of the old one, in the other template's frames."""
    model = ScriptedModel(template=OTHER)
    with Store(folder) as store:
        old = store.open("s", model)
        new = old.rerender(model, "copy")
        assert _contents(new) == _contents(old)
        assert not {s.id for s in new.path()} & {s.id for s in old.path()}
        assert new.render() == old.render().replace("<|im_start|>", "<|im_start|>~")
        assert (new.meta, new.binding.state) == (old.meta, "bound")
        new.append("user", "more")
        assert [info.name for info in store.list()] == ["copy", "s"]
    with Store(folder) as store:
        assert len(store.open("copy", model).path()) == len(store.open("s").path()) + 1


def test_rule12_a_refused_rerender_creates_nothing(folder: Path) -> None:
    """Oracle: the list of sessions; the other template refuses two user messages in a row."""
    strict = CHATML.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}"
        "{%- if not loop.first and message.role == 'user' and loop.previtem.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}",
        1,
    )
    with Store(folder) as store:
        session = store.open("s", ScriptedModel())
        session.append("user", "one")
        session.append("user", "two")
    model = ScriptedModel(template=strict)
    with Store(folder) as store:
        old = store.open("s", model)
        with pytest.raises(TemplateUnsupported):
            old.rerender(model, "copy")
        assert [info.name for info in store.list()] == ["s"]


def test_rule12_rerender_leaves_out_options_the_other_template_lacks() -> None:
    """Oracle: the other template's rendering without them; the clock is the old session's."""
    asks = CHATML.replace("{%- macro close() %}", "{{- cwd }}{%- macro close() %}", 1)
    first, second = ScriptedModel(template=asks), ScriptedModel()
    with Store(":memory:") as store:
        old = store.create("s", first, template_options={"cwd": "/srv/app"})
        old.append("user", "a")
        assert old.render() == "/srv/app<|im_start|>user\na"
        assert old.rerender(second, "copy").render() == "<|im_start|>user\na"
        assert old.rerender(first, "same").ids() == old.ids()


def test_rule12_another_quantisation_opens_cold_and_says_so(folder: Path) -> None:
    """Oracle: the differing part is named, nothing is reused, and writing works."""
    model = ScriptedModel(["ok"], parts={"quant": "int4"})
    with Store(folder) as store:
        s = store.open("s", model)
        assert s.binding.state == "cold"
        assert "quant" in (s.binding.reason or "")
        assert s.plan().reused_tokens == 0
        s.append("user", "again")
        assert s.generate_sync().text == "ok"


def test_rule12_a_model_without_weights_is_not_cold(folder: Path) -> None:
    """Oracle: it has no states, so none of the session's are lost to it."""
    model = ScriptedModel()
    model.fingerprint = Fingerprint(b"", {"weights": "not loaded"})
    with Store(folder) as store:
        session = store.open("s", model)
        assert session.binding.state == "bound"
        session.append("user", "edited without weights")
        made = store.create("made", model)
    with Store(folder) as store:
        assert store.open(made.name, ScriptedModel()).binding.state == "bound"
        assert repr(store.open("made")) == "Session('made', branch='main', version=1)"


def test_c16_clock_and_options_are_frozen_at_creation(tmp_path: Path) -> None:
    """Oracle: ids of the first day, whatever the clock says when it is reopened."""
    dated = CHATML.replace(
        "{%- macro close() %}",
        "{{- 'Today is ' + strftime_now('%Y-%m-%d') + ' in ' + (cwd or '?') + '\\n' }}"
        "{%- macro close() %}",
        1,
    )
    model = ScriptedModel(template=dated)
    with Store(tmp_path / "s") as store:
        session = store.create("s", model, system="sys", template_options={"cwd": "/srv/app"})
        session.append("user", "a")
        ids, text = session.ids(), session.render()
    assert "in /srv/app" in text
    assert "1970" not in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 4e9)
        with Store(tmp_path / "s") as store:
            session = store.open("s", model)
            assert session.ids() == ids
            assert not session.set_system("sys")
            session.set_system("other")
            session.set_system("sys")
            assert session.ids() == ids
            assert session.append("user", "b").turn == 1
            later = store.create("later", model, system="sys")
            assert "2096" in later.render()


def test_rule13_every_error_has_a_stable_code_and_one_root() -> None:
    """Oracle: the tree; codes are unique except where a subclass is the same news."""
    exported = [getattr(freetoken_agent, name) for name in freetoken_agent.__all__]
    errors = [e for e in exported if inspect.isclass(e) and issubclass(e, Exception)]
    assert len(errors) > 40
    codes = {e.__name__: e.code for e in errors if issubclass(e, FreetokenError)}
    assert len(codes) == len(errors)
    assert codes.pop("GenerationConflict") == codes["SessionConflict"]
    assert len(set(codes.values())) == len(codes)


def test_rule13_messages_say_what_value_limit_and_remedy() -> None:
    """Oracle: the parts given."""
    error = FreetokenError("too long", value=5, limit="3 tokens", remedy="cut it")
    assert str(error) == "too long; got 5; limit: 3 tokens; remedy: cut it"


def test_rule12_meta_is_json(tmp_path: Path) -> None:
    """Oracle: what was given comes back, also after reopening."""
    with Store(tmp_path / "s") as store:
        session = store.create("s", ScriptedModel(), meta={"who": "me", "n": [1, None]})
        session.append("user", "x", meta={"file": "a.py"})
    with Store(tmp_path / "s") as store:
        s = store.open("s")
        assert s.meta == {"who": "me", "n": [1, None]}
        assert s.path()[0].meta == {"file": "a.py"}
        assert json.dumps(store.list()[0].meta) == json.dumps(s.meta)

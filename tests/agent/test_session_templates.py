# SPDX-License-Identifier: Apache-2.0
"""Sessions on real chat templates: random programs keep ids, pairing, turns and undo whatever the
template does, and an edit it refuses changes nothing."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.messages import parse_messages
from freetoken_agent.proving.plain_session import Entry, Line
from freetoken_agent.proving.session_operations import Writer
from freetoken_agent.proving.session_programs import OPERATIONS, Program
from freetoken_agent.segments import Segment
from freetoken_agent.session import Session
from freetoken_agent.store import Store
from freetoken_agent.testing import Call, Raw, ScriptedModel, Think

TEMPLATES = Path(__file__).parents[2].parent / "shared" / "templates"
NAMES = sorted(path.name for path in TEMPLATES.glob("*.jinja"))
TOOL = {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The word."}},
        "required": ["word"],
    },
}
WITHOUT_DISK = [name for name in OPERATIONS if name != "reopen"]


def _writer(model: ScriptedModel) -> Writer:
    """Lets the model write one short text."""
    stop = min(model.format.closers)
    texts = iter(range(10**6))

    def write(
        session: Session, line: Line, a: int, b: int
    ) -> tuple[Sequence[Segment], list[Entry], str]:
        text = f"m{next(texts)}"
        model.extend(Raw([*text.encode(), stop]))
        written = session.generate_sync().segments
        return written, [Entry(segment.kind, text) for segment in written], "closed"

    return write


def _model(name: str) -> ScriptedModel:
    try:
        return ScriptedModel(template=(TEMPLATES / name).read_text())
    except TemplateUnsupported as error:
        pytest.skip(f"the template cannot be learned: {error}")


def _run(name: str, seed: int) -> None:
    model = _model(name)
    choose = random.Random(seed)

    def small() -> int:
        return choose.randrange(12)

    steps = [(small(), choose.choice(WITHOUT_DISK), small(), small()) for _ in range(30)]
    program = Program(":memory:", model, write=_writer(model), foreign=True)
    program.run(steps)
    assert program.num_refused < 10, "most edits must be possible"


EACH = pytest.mark.parametrize(
    "name", NAMES or [pytest.param("", marks=pytest.mark.skip("../shared/templates is not there"))]
)


@EACH
def test_session_program_on_a_real_template(name: str) -> None:
    """Oracle: plain lists, after every operation. The spelling of calls and blanks is the
    template's; everything else must be as in the lists."""
    _run(name, seed=0)


def _message(thought: bool, text: bool) -> list[dict[str, Any]]:
    call = {"id": "call00001", "function": {"name": "look_up", "arguments": '{"word": "heron"}'}}
    answer: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if thought:
        answer["reasoning_content"] = "hm"
    if text:
        answer["content"] = "I look."
    result = {"role": "tool", "tool_call_id": "call00001", "content": "out"}
    return [{"role": "user", "content": "go"}, answer, result]


def _append_each(session: Session, messages: list[dict[str, Any]]) -> None:
    for item in parse_messages(messages, "openai"):
        if item.kind == "tool_call":
            session.append_call(item.name or "", item.arguments or {}, id=item.call_id)
        elif item.kind == "tool_result":
            session.append_result(item.call_id or "", item.text)
        else:
            session.append(item.kind, item.text)


_WAYS_OUT = {
    "leave the text out": [(True, False)],
    "leave the thought out": [(False, True)],
    "leave one of the two out": [(True, False), (False, True)],
    "leave both out": [(False, False)],
}


@EACH
def test_a_text_beside_a_call_is_kept_or_the_remedy_works(name: str) -> None:
    """Oracle: the same message whole and one by one: both are taken, or both refused with the same
    error; then the message without what the error names is taken, where calls are at all."""
    model = _model(name)
    with Store(":memory:") as store:
        for thought, text in ((False, True), (True, True)):
            errors = []
            for way in (Session.append_messages, None):
                session = store.create(f"{thought} {way}", model, tools=[TOOL])
                try:
                    if way is None:
                        _append_each(session, _message(thought, text))
                    else:
                        session.append_messages(_message(thought, text), "openai")
                except TemplateUnsupported as error:
                    errors.append(error)
            assert len(errors) in (0, 2), errors
            refused = [e for e in errors if " beside a tool call in one assistant " in e.what]
            if not errors:
                continue
            if not refused:  # the thought alone, or the call alone, has no place
                for alone in [1, 2] if thought else [2]:
                    session = store.create(f"{thought} {alone}", model, tools=[TOOL])
                    try:
                        session.append_messages(_message(alone == 1, False), "openai")
                    except TemplateUnsupported:
                        break
                else:
                    pytest.fail(str(errors[0]))
                continue
            assert len(refused) == 2 and str(refused[0]) == str(refused[1])
            remedy = str(refused[0].remedy).partition(" of the message")[0]
            for kept_thought, kept_text in _WAYS_OUT[remedy]:
                messages = _message(thought and kept_thought, text and kept_text)
                session = store.create(f"{thought} {kept_thought} {kept_text}", model, tools=[TOOL])
                session.append_messages(messages, "openai")


@EACH
def test_a_call_in_the_templates_own_spelling_is_read_back(name: str) -> None:
    """Oracle: the arguments that were rendered. No truth value is among them: where parameters are
    between tags, some templates write True, which only a schema can tell from a text."""
    model = _model(name)
    arguments = {"path": 'a, {b}: "c"', "n": 3, "list": [1.5, 2], "none": []}
    with Store(":memory:") as store:
        session = store.create("s", model)
        session.append("user", "go")
        draft = session.begin_generation()
        draft.release()
        call = Call("look_up", arguments)
        try:
            emitted = model.emit([Think("hm"), call] if draft.kind == "thinking" else call)
        except TemplateUnsupported as error:
            pytest.skip(f"the template has no place for the call: {error.what}")
        model.extend(Raw([token for token in emitted if isinstance(token, int)]))
        calls = session.generate_sync().calls
        assert [(c.tool, c.arguments) for c in calls] == [("look_up", arguments)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
@EACH
def test_session_programs_on_a_real_template(name: str, seed: int) -> None:
    """Oracle: as above, on five more programs."""
    _run(name, seed)

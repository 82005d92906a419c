# SPDX-License-Identifier: Apache-2.0
"""Several calls in one message: kept where the template has a place for them; one call in a step,
and a reply that says so, where it has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken_agent import Agent, InvalidSampling, Session, Store, TemplateUnsupported, tool
from freetoken_agent.grammars.constraint import GrammarConstraint
from freetoken_agent.grammars.step_grammar import step_constraint
from freetoken_agent.model_calls.generate_options import GenerateOptions
from freetoken_agent.testing import CHATML, Call, Raw, ScriptedModel

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
SINGLE = (
    "GigaChat3-10B-A1.8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
)
INLINED = ("LFM2-8B-A1B", "LFM2.5-Instruct")  # they drop every call: all are inlined
PARALLEL = ("chatml", "Qwen3-Coder", "moonshotai-Kimi-K2", "Qwen-Qwen2.5-7B-Instruct", *INLINED)
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 9}},
            "required": ["word"],
        },
    },
}


def model_of(name: str) -> ScriptedModel:
    if name == "chatml":
        return ScriptedModel([], template=CHATML)
    if not FOLDER.is_dir():
        pytest.skip("the folder of real templates, ../shared/templates, is not here")
    return ScriptedModel([], template=(FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


def written(model: ScriptedModel, *words: str) -> list[int]:
    """Calls as the model writes them, without the id that ends its turn; where the template has no
    place for a second one, the first one's text again."""
    if model.format.report.parallel_calls:
        emitted = model.emit([Call("look_up", {"word": word}) for word in words])
        return [i for i in emitted if isinstance(i, int) and i not in model.format.closers]
    each = [model.emit(Call("look_up", {"word": word})) for word in words]
    return [i for one in each for i in one if isinstance(i, int) and i not in model.format.closers]


def asked(model: ScriptedModel, store: Store, name: str) -> Session:
    session = store.create(name, model, tools=[LOOK_UP])
    session.append("user", "Look up two birds.")
    return session


def fits(constraint: GrammarConstraint, model: ScriptedModel, ids: list[int]) -> int:
    """How many of the ids are allowed, from the first one on."""
    for count, token_id in enumerate(ids):
        row = np.zeros(model.tokenizer.vocab_size, dtype=np.float32)
        constraint.mask(row)
        if row[token_id] != 0:
            return count
        constraint.accept(token_id)
    return len(ids)


@pytest.mark.parametrize("choice", ["auto", "required", "look_up"])
@pytest.mark.parametrize("name", SINGLE)
def test_the_grammar_has_one_call_where_the_template_has_no_place_for_two(
    name: str, choice: str
) -> None:
    """Oracle: the call as the template writes it is allowed once, whatever was asked for."""
    model = model_of(name)
    options = GenerateOptions.parse({"tool_choice": choice, "parallel_tool_calls": True})
    constraint = step_constraint(model, [LOOK_UP], "start", options)
    assert constraint is not None
    one = written(model, "heron")
    assert fits(constraint, model, one) == len(one) and constraint.accepting
    assert fits(constraint, model, one) < len(one)


@pytest.mark.parametrize("name", PARALLEL)
def test_the_grammar_has_two_calls_where_the_template_has(name: str) -> None:
    """Oracle: two calls as the template writes them; where two are not wanted, what follows the
    first one alone is its end."""
    model = model_of(name)
    both, one = written(model, "heron", "egret"), written(model, "heron")
    shared = next(n for n, (a, b) in enumerate(zip(both, [*one, -1], strict=False)) if a != b)
    for parallel, allowed in ((True, len(both)), (False, shared)):
        options = {"tool_choice": "required", "parallel_tool_calls": parallel, "thinking": False}
        parsed = GenerateOptions.parse(options)
        constraint = step_constraint(model, [LOOK_UP], "start", parsed)
        assert constraint is not None
        assert fits(constraint, model, both) == allowed
        assert not parallel or constraint.accepting


@pytest.mark.parametrize("name", SINGLE)
def test_one_call_of_two_is_kept_and_the_reply_says_so(name: str, memory_store: Store) -> None:
    """Oracle: the template itself, which has to render what was kept; what a model that is bound by
    nothing wrote behind the first call is no part of the path."""
    model = model_of(name)
    session = asked(model, memory_store, "s")
    model.extend(Raw([*written(model, "heron", "egret"), min(model.format.closers)]))
    reply = session.generate_sync(parallel_tool_calls=True)
    assert [call.arguments for call in reply.calls] == [{"word": "heron"}]
    assert reply.finish_reason == "tool_calls" and not reply.parallel_tool_calls
    session.append_result(reply.calls[0], "A grey bird.")
    model.extend("It is grey.")
    assert session.generate_sync().text == "It is grey."
    assert any("a step holds one call" in note for note in model.format.report.notes)


@pytest.mark.parametrize("name", PARALLEL)
def test_both_calls_are_kept_where_two_are_wanted(name: str, memory_store: Store) -> None:
    """Oracle: what was asked for, and the path."""
    model = model_of(name)
    for parallel, words in ((True, ["heron", "egret"]), (False, ["heron"])):
        session = asked(model, memory_store, f"s{parallel}")
        model.extend(Raw([*written(model, "heron", "egret"), min(model.format.closers)]))
        reply = session.generate_sync(parallel_tool_calls=parallel, thinking=False)
        assert [(call.arguments or {})["word"] for call in reply.calls] == words
        assert reply.parallel_tool_calls is parallel
        for call in reply.calls:
            session.append_result(call, "A bird.")
        model.extend("Two birds.")
        assert session.generate_sync().text == "Two birds."


@pytest.mark.parametrize("name", SINGLE)
def test_a_run_goes_on_with_one_call_in_a_step(
    name: str, play: Callable[..., Any], memory_store: Store
) -> None:
    """Oracle: the calls that the tool saw, one in each of two steps."""
    seen: list[str] = []

    @tool
    def look_up(word: str) -> str:
        """Look a word up."""
        seen.append(word)
        return f"{word}: a bird."

    model = model_of(name)
    ends = min(model.format.closers)
    for words in (("heron", "egret"), ("egret", "heron")):
        model.extend(Raw([*written(model, *words), ends]))
    model.extend("Both are birds.")
    agent: Agent[None, str] = Agent(model, name="birds", tools=[look_up])
    result = play(agent, "Look up two birds.", session=memory_store.create("run", model))
    assert result.output == "Both are birds." and seen == ["heron", "egret"]


@pytest.mark.parametrize("name", SINGLE)
def test_a_second_call_that_the_caller_adds_is_refused_and_changes_nothing(
    name: str, memory_store: Store
) -> None:
    """Oracle: the path before, and the words of the error."""
    session = asked(model_of(name), memory_store, "s")
    session.append_call("look_up", {"word": "heron"})
    before = session.ids()
    with pytest.raises(TemplateUnsupported, match="keeps no second call"):
        session.append_call("look_up", {"word": "egret"})
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        for n in range(2)
    ]
    with pytest.raises(TemplateUnsupported, match="keeps no second call"):
        session.append_messages([{"role": "assistant", "tool_calls": calls}], "openai")
    assert session.ids() == before


def test_a_tool_that_may_not_be_called_is_refused_before_that(memory_store: Store) -> None:
    """Oracle: the documented error; one call in a step changes nothing about it."""
    model = model_of("chatml")
    with pytest.raises(InvalidSampling):
        asked(model, memory_store, "s").generate_sync(tool_choice="dog", parallel_tool_calls=False)

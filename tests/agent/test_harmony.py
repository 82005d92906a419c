# SPDX-License-Identifier: Apache-2.0
"""A run in which the model writes as gpt-oss does, on its own template."""

import re
from pathlib import Path

import pytest

from freetoken_agent import Agent, Store
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import Raw, ScriptedModel
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer
from freetoken_agent.tools import tool

TEMPLATE = Path(__file__).parents[2].parent / "shared/templates/openai-gpt-oss-120b.jinja"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
REPLIES = [
    f'<|channel|>analysis<|message|>Hm.{NEXT}{CALL}{{"at": "SF"}}<|call|>',
    f"<|channel|>analysis<|message|>More.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
    f'{CALL}{{"at": "LA"}}<|call|>',
    f'<|channel|>commentary<|message|>Once more.{NEXT}{CALL}{{"at": "NY"}}<|call|>',
    f"<|channel|>analysis<|message|>Good.{NEXT}<|channel|>final<|message|>Sunny.<|return|>",
]


@tool
def look(at: str) -> str:
    """Look."""
    return f"sun over {at}"


def test_every_header_that_the_model_writes_is_read_and_answered() -> None:
    """Oracle: the contents by hand; the text is what was sampled, with the template's frames."""
    if not TEMPLATE.exists():
        pytest.skip("the folder of real templates is not there")
    source = TEMPLATE.read_text(encoding="utf-8")
    controls = dict.fromkeys([*re.findall(r"<\|[a-z]+\|>", source), "<|constrain|>"])
    model = ScriptedModel([Raw(text) for text in REPLIES])
    model.tokenizer = ByteTokenizer(list(controls), stop=("<|return|>", "<|call|>"))
    model.format = ChatFormat.learn(source, model.tokenizer)
    with Store(":memory:") as store:
        session = store.create("s", model)
        result = Agent(model, tools=[look]).run_sync("How is it?", session=session)
        assert result.output == "Sunny."
        calls = session.find(kind="tool_call")
        assert [call.arguments for call in calls] == [{"at": "SF"}, {"at": "LA"}, {"at": "NY"}]
        answers = session.find(kind="tool_result")
        assert [one.content for one in answers] == ["sun over SF", "sun over LA", "sun over NY"]
        texts = [one.text for one in session.find(kind="text")]
        assert texts == ["I look.", "Once more.", "Sunny."]
        thoughts = [one.text for one in session.find(kind="thinking")]
        assert thoughts == ["Hm.", "More.", "Good."]
        for reply in REPLIES:
            assert reply.removesuffix("<|return|>") in session.render()

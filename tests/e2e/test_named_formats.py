# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 calls in each named format, in ids of its own tokenizer, and goes on after that."""

from typing import Any

import jsonschema
import pytest

from freetoken_agent import LocalModel, Store
from freetoken_agent.call_formats.named_formats import FORMATS
from freetoken_agent.template import ChatFormat

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days", "sunny"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "description": "Forecast.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FORECAST}]
QUICK = ("lfm2", "llama3")


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FORMATS],
)
def test_a_real_model_calls_in_a_chosen_format(smollm2: LocalModel, name: str) -> None:
    """Oracle: jsonschema for arguments, the format's literals for the text, and the path for ids:
    what was sampled, with what follows, is forwarded once."""
    tokenizer = smollm2.tokenizer
    assert tokenizer.chat_template is not None
    format = ChatFormat.learn(tokenizer.chat_template, tokenizer, call_format=name)
    model = LocalModel(f"smollm2-{name}", tokenizer, format, smollm2.engine)
    with Store(":memory:") as store:
        session = store.create("s", model, tools=TOOLS)
        session.append("user", "How will the weather be in Oslo for 3 days?")
        reply = session.generate_sync(tool_choice="required", max_tokens=160)
        assert reply.calls and reply.finish_reason in ("tool_calls", "length")
        for call in reply.calls:
            jsonschema.validate(call.arguments, PARAMETERS)
            session.append_result(call, "sun")
        text = session.render()
        assert (
            FORMATS[name].begin in text and FORMATS[name].sample not in text[text.index("Oslo") :]
        )
        sampled = session.ids()
        answer = session.generate_sync(tool_choice="none", max_tokens=8)
        assert session.ids()[: len(sampled)] == sampled
        assert answer.usage.reused_tokens >= reply.usage.input_tokens

# SPDX-License-Identifier: Apache-2.0
"""How a program built on sessions is tested: a scripted model, no weights, no torch."""

from freetoken_agent import Store
from freetoken_agent.testing import Call, ScriptedModel


def ask_with_tool(store: Store, model: ScriptedModel) -> str:
    """The program under test: it answers one tool call by itself."""
    s = store.create("ask", model)
    s.append("user", "What is 6 times 7?")
    reply = s.generate_sync()
    for call in reply.calls:
        numbers = call.arguments or {}
        s.append_result(call, str(numbers["a"] * numbers["b"]))
    return s.generate_sync().text


model = ScriptedModel([Call("multiply", {"a": 6, "b": 7}), "It is 42."])
with Store(":memory:") as store:
    assert ask_with_tool(store, model) == "It is 42."
    first, second = model.requests
    assert model.tokenizer.decode(second.ids).count("42") == 1  # the result reached the model
    print("second call: the prompt grew by", len(second.ids) - len(first.ids), "tokens")

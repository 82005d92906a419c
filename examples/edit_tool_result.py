# SPDX-License-Identifier: Apache-2.0
"""Correct what a tool returned, and pay only for what follows it."""

from freetoken_agent import Agent, LocalModel, Store, tool


@tool
def get_weather(city: str) -> str:
    """Tell the weather of tomorrow in a city."""
    return f"Tomorrow in {city}: sunny, 24 degrees."


brief = "You are a helpful travel assistant."
sampling = {"max_tokens": 40, "repetition_penalty": 1.1, "parallel_tool_calls": False}
agent = Agent(instructions=brief, tools=[get_weather], sampling=sampling)
ask = "What clothes should I pack for Oslo?"
with LocalModel.load("smollm2") as model, Store(":memory:") as store:  # or a folder
    s = store.create("oslo", model)
    print("before:", agent.run_sync(ask, session=s, tool_choice="required").output)
    [result] = s.find(kind="tool_result")
    s.rewind(to=result)  # drop the answer
    edit = s.replace(result, "Tomorrow in Oslo: heavy snow, -8 degrees.")
    second = agent.run_sync(session=s)
    print("after: ", second.output)
    print("told:", edit.plan.prefill_tokens, "paid:", second.usage.prefill_tokens, "tokens")
    s.undo(3)  # the second answer, the edit, the rewind: the first answer is back

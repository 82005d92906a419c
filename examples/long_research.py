# SPDX-License-Identifier: Apache-2.0
"""A long run that keeps its context small: old results are cleared, at a price told beforehand."""

from typing import Any

from freetoken_agent import Agent, ClearToolResults, Edit, Hooks, RunContext, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool
def read_page(number: int) -> str:
    """Read a page of the archive."""
    return f"Page {number}. " + "The herring came in great numbers that year. " * 20


def told(context: RunContext[Any], edit: Edit) -> None:
    cleared, plan = len(edit.added), edit.plan
    print(f"step {context.step}: {cleared} results cleared; {plan.prefill_tokens} to forward")


# With a pulled model: Agent("smollm2", …)
model = ScriptedModel([*(Call("read_page", {"number": n}) for n in range(8)), "It is about fish."])
reader = Agent(
    model,
    instructions="Find out what the archive is about.",
    tools=[read_page],
    context_rules=[ClearToolResults(trigger=3000, keep=2, clear_at_least=1500)],
    hooks=Hooks(on_edit=told),
)
result = reader.run_sync("What is the archive about?")
session = result.session
kept = [r for r in session.find(kind="tool_result") if r.content.startswith("Page")]
assert result.output == "It is about fish." and 2 <= len(kept) < 8
print("tokens of the context:", len(session.ids()), "- results still whole:", len(kept))

first = session.find(kind="tool_result")[0]
assert session.versions(first)[0].content.startswith("Page 0.")  # nothing is lost
session.undo()  # the run, its edits included
assert session.path() == []

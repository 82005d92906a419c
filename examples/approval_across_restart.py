# SPDX-License-Identifier: Apache-2.0
"""A call that needs approval is asked for in one process and granted in another."""

import asyncio

from freetoken_agent import Agent, Store, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool(needs_approval=True)
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


clerk = Agent(name="clerk", instructions="You write mails.", tools=[send_mail])
MAIL = Call("send_mail", {"to": "ann@example.org", "text": "The report is ready."})


def ask() -> None:
    """What the first process does: it may end, or be killed, at any time after this."""
    model = ScriptedModel([MAIL])  # a scripted model in the place of LocalModel.load("smollm2")
    with Store("mail-store") as store:
        result = clerk.run_sync("Tell Ann.", session=store.create("mails", model))
        for call in result.pending:
            print("waits for approval:", call.tool, dict(call.arguments or {}))


def approve() -> None:
    """What the second process does, perhaps days later."""
    model = ScriptedModel(["Ann knows."])
    with Store("mail-store") as store:
        session = store.open("mails", model)
        waiting = asyncio.run(clerk.resume(session))  # nobody has decided: nothing runs
        decisions = {str(call.call_id): True for call in waiting.pending}
        result = asyncio.run(clerk.resume(session, decisions))
        print("then:", session.find(kind="tool_result")[0].content)
        print("answer:", result.output)
        assert result.output == "Ann knows."


ask()
approve()

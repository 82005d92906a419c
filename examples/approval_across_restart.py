# SPDX-License-Identifier: Apache-2.0
"""A call that needs approval is asked for in one process, which is killed, and granted in another.

python approval_across_restart.py ask        ends as if the power had failed
python approval_across_restart.py approve    perhaps days later
"""

import asyncio
import os
import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

from freetoken_agent import Agent, Store, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool(needs_approval=True)
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


# Each process brings the model: LocalModel.load("smollm2") in the place of the scripts below.
clerk = Agent(name="clerk", instructions="You write mails.", tools=[send_mail])


def ask() -> None:
    """The run ends where a person must decide. All of it is on disk by then."""
    mail = Call("send_mail", {"to": "ann@example.org", "text": "The report is ready."})
    with Store("mail-store") as store:
        session = store.create("mails", ScriptedModel([mail]))
        result = clerk.run_sync("Tell Ann.", session=session)
        assert result.finish_reason == "pending"
        os.kill(os.getpid(), signal.SIGKILL)


def approve() -> None:
    """Show what waits, decide, and let the run go on: the tool runs once, now."""
    with Store("mail-store") as store:
        session = store.open("mails", ScriptedModel(["Ann knows."]))
        waiting = asyncio.run(clerk.resume(session))  # nobody has decided: nothing runs
        for call in waiting.pending:
            print("waits for approval:", call.tool, dict(call.arguments or {}))
        decisions = {str(call.call_id): True for call in waiting.pending}  # or False, or why not
        result = asyncio.run(clerk.resume(session, decisions))
        print("then:", session.find(kind="tool_result")[0].content)
        print("answer:", result.output)
        assert result.output == "Ann knows."


match sys.argv[1:]:
    case ["ask"]:
        ask()
    case ["approve"]:
        approve()
    case _:  # both, in processes of their own
        this = os.path.abspath(__file__)
        with TemporaryDirectory() as folder:
            killed = subprocess.run([sys.executable, this, "ask"], cwd=folder, check=False)
            assert killed.returncode == -signal.SIGKILL
            subprocess.run([sys.executable, this, "approve"], cwd=folder, check=True)

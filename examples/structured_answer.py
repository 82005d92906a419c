# SPDX-License-Identifier: Apache-2.0
"""An answer that is a value: bound by a grammar, checked by pydantic, asked for again if wrong."""

from typing import Annotated

from pydantic import BaseModel, Field

from freetoken_agent import Agent
from freetoken_agent.testing import ScriptedModel


class Invoice(BaseModel):
    """What is to be found in a mail."""

    sender: str
    cents: Annotated[int, Field(gt=0)]
    items: list[str]


# A real model is bound by the grammar; a script is not, so the first answer here may be wrong.
model = ScriptedModel(
    [
        '{"sender": "Nordic Paper", "cents": -1, "items": ["A4"]}',
        '{"sender": "Nordic Paper", "cents": 4990, "items": ["A4", "envelopes"]}',
    ]
)
clerk = Agent(model, instructions="Read the invoice.", output_type=Invoice)
result = clerk.run_sync("Nordic Paper sends A4 paper and envelopes, 49.90 in all.")

assert result.output == Invoice(sender="Nordic Paper", cents=4990, items=["A4", "envelopes"])
print(result.output)
complaint = result.session.find(kind="user")[-1].content
print("after", result.steps, "answers; the first one was refused with:", complaint)

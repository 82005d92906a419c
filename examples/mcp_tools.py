# SPDX-License-Identifier: Apache-2.0
"""An agent with the tools of an MCP server. The server is this file, too: `mcp_tools.py serve`."""

import asyncio
import sys

from mcp.server.mcpserver import MCPServer as Server
from mcp.server.mcpserver.exceptions import ToolError

from freetoken_agent import Agent, MCPServer, Result
from freetoken_agent.testing import Call, ScriptedModel

PRICES = {"tea": 3.5, "cake": 4.2}
server = Server("shop", log_level="WARNING")


@server.tool()
def price(article: str) -> float:
    """The price of an article."""
    if article not in PRICES:
        raise ToolError(f"There is no {article}. There are: {', '.join(PRICES)}.")
    return PRICES[article]


async def ask(question: str) -> Result[str]:
    """Start the server, let the agent use it, and end it. An agent takes any number of servers."""
    shop = MCPServer.stdio(sys.executable, [__file__, "serve"], prefix="shop", timeout=30)
    # With a pulled model: Agent("smollm2", …)
    model = ScriptedModel(
        [
            [Call("shop_price", {"article": "tea"}), Call("shop_price", {"article": "pie"})],
            Call("shop_price", {"article": "cake"}),
            "Tea and cake are 7.70.",
        ]
    )
    clerk = Agent(model, instructions="You sell tea and cake.", toolsets=[shop])
    async with shop:
        return await clerk.run(question)


if sys.argv[1:] == ["serve"]:
    server.run()
else:
    result = asyncio.run(ask("What are tea and pie?"))
    tea, pie, cake = result.session.find(kind="tool_result")
    assert (tea.content, cake.content) == ("3.5", "4.2")
    assert pie.error and "There are: tea, cake." in pie.content  # the model was told, and went on
    print(result.output)

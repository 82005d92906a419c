# SPDX-License-Identifier: Apache-2.0
"""A real MCP server, for tests: `python mcp_server_child.py LOG [PORT]`. `add`, `die` and `wait`
leave a line in the log."""

import os
import signal
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

LOG = Path(sys.argv[1])
server = MCPServer("test")


def note(line: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{line}\n")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    note("add")
    return a + b


@server.tool(name="read.page")
def read_page(number: int) -> list[TextContent | ImageContent]:
    """Read a page."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return [TextContent(type="text", text=f"page {number}"), image]


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool()
def die() -> str:
    """End the server at once."""
    note("die")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    note("wait")
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def process() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
def secret() -> str:
    """What the environment says."""
    return os.environ.get("SECRET", "none")


@server.tool()
def grow() -> str:
    """Get another tool."""

    @server.tool()
    def grown() -> str:
        """The other tool."""
        return "I am new"

    return "grown"


if len(sys.argv) > 2:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run()

# SPDX-License-Identifier: Apache-2.0
"""MCP servers as toolsets, through the official `mcp` package (the extra `mcp`).

A server is asked for its tools once per run. What is frozen is the list, not the connection: when
the server is killed, the call in flight gets an error as its result, for it may have had effects,
and the next call makes a new connection.
"""

import importlib.util
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import anyio

from .blocking import in_thread
from .errors import MCPMissing, MCPServerFailed, ToolFailed
from .mcp_connection import Link, MakeClient, ServerGone
from .tool_results import result_text
from .tools import AnyTool, Tool, ToolSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as ListedTool

_LOST = "The server of this tool ended during the call ({why}). The call may have had effects."
_NOT_MADE = "The server of this tool cannot be reached ({why}). The call was not made."

T = TypeVar("T")

CONNECT_S = 30.0  # until a server has answered for the first time
_READ_S = 300.0  # a server may take its time between two bytes; `timeout` of a tool is stricter
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class MCPServer:
    """A server's tools as a toolset: `Agent(toolsets=[MCPServer.stdio("python", ["server.py"])])`.

    It connects when it is entered (`async with`) or first used, and stays connected until it is
    left, `close()`d, or the process ends; after that, the next use connects again. Any number of
    agents, threads and event loops may share it. `name`: its command or url, for messages.
    """

    def __init__(
        self,
        name: str,
        make: MakeClient,
        *,
        prefix: str = "",
        connect_timeout_s: float = CONNECT_S,
        has_sessions: bool = False,
        settings: ToolSettings,
    ) -> None:
        """Use `stdio` or `http`. `make`: a new client, every time; `has_sessions`: as HTTP has."""
        if importlib.util.find_spec("mcp") is None:
            raise MCPMissing(
                "the package mcp is not installed",
                value=name,
                remedy="pip install 'freetoken-agent[mcp]'",
            )
        self.name = name
        self._make = make
        self._prefix = prefix
        self._timeout_s = connect_timeout_s
        self._has_sessions = has_sessions
        self._settings: ToolSettings = {"validate_after": True, **settings}
        self._lock = threading.Lock()
        self._link: Link | None = None

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        prefix: str = "",
        connect_timeout_s: float = CONNECT_S,
        **settings: Unpack[ToolSettings],
    ) -> Self:
        """A server that is started as a process and speaks over its standard streams. `env` is
        added to what it inherits, which is little: HOME, PATH, USER and the like. `settings` are
        those of a tool, for all of its tools: `timeout`, `needs_approval`, …"""

        def make() -> "Client":
            from mcp import Client, StdioServerParameters

            given = None if env is None else dict(env)
            return Client(StdioServerParameters(command=command, args=list(args), env=given))

        return cls(
            " ".join((command, *args)),
            make,
            prefix=prefix,
            connect_timeout_s=connect_timeout_s,
            settings=settings,
        )

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        connect_timeout_s: float = CONNECT_S,
        **settings: Unpack[ToolSettings],
    ) -> Self:
        """A server that is reached by streamable HTTP. `headers` go with each request."""

        @asynccontextmanager
        async def make() -> "AsyncIterator[Client]":
            from httpx2 import AsyncClient, Timeout
            from mcp import Client
            from mcp.client.streamable_http import streamable_http_client

            waits = Timeout(connect_timeout_s, read=_READ_S)
            async with AsyncClient(headers=dict(headers or {}), timeout=waits) as http:
                async with Client(streamable_http_client(url, http_client=http)) as client:
                    yield client

        return cls(
            url,
            make,
            prefix=prefix,
            connect_timeout_s=connect_timeout_s,
            has_sessions=True,
            settings=settings,
        )

    @property
    def known_tools(self) -> None:
        """Only the server knows its tools."""
        return

    async def list_tools(self) -> Sequence[AnyTool]:
        """The tools as they are now. MCPServerFailed; InvalidTool for one that no model can call.
        A connection that turns out to be dead is replaced, once."""
        from mcp import MCPError

        try:
            try:
                listed = await self._ask(_list)
            except (ServerGone, MCPError) as error:
                if isinstance(error, ServerGone) and not error.asked:
                    raise
                listed = await self._ask(_list)
        except (ServerGone, MCPError) as error:
            raise self._failed("could not be asked for its tools", error) from error
        return [self._tool(one) for one in listed]

    async def close(self) -> None:
        """Disconnect, and end a process that was started. Does nothing when there is none."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            await in_thread(link.close)

    async def __aenter__(self) -> Self:
        try:
            await self._open_link().connect()
        except ServerGone as gone:
            await self.close()
            raise self._failed("could not be reached", gone) from gone
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    def _open_link(self) -> Link:
        with self._lock:
            if self._link is None:
                self._link = Link(self._make, self._timeout_s, has_sessions=self._has_sessions)
            return self._link

    async def _ask(self, ask: "Callable[[Client], Awaitable[T]]") -> T:
        return await self._open_link().request(ask)

    def _tool(self, listed: "ListedTool") -> AnyTool:
        """A tool of the server. Characters that no name of a tool may hold become `_`."""
        settings: ToolSettings = {"description": listed.description or "", **self._settings}
        name = _NOT_IN_NAMES.sub("_", listed.name)
        function = partial(self._call, listed.name)
        return Tool.from_schema(name, listed.input_schema, function, **settings).prefixed(
            self._prefix
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> object:
        from mcp import MCPError

        try:
            result = await self._ask(partial(_call, name, arguments))
        except MCPError as refused:
            raise ToolFailed(refused.message) from refused
        except ServerGone as gone:
            what = _LOST if gone.asked else _NOT_MADE
            raise ToolFailed(what.format(why=gone)) from gone
        said = _text(result)
        if result.is_error:
            raise ToolFailed(said)
        return said

    def _failed(self, what: str, why: Exception) -> MCPServerFailed:
        return MCPServerFailed(
            f"the MCP server {what}: {why}",
            value=self.name,
            remedy="look at what it logs, start it by hand, and see that command or url are right",
        )

    def __repr__(self) -> str:
        return f"MCPServer({self.name!r})"


async def _list(client: "Client") -> "list[ListedTool]":
    """All pages; not from the client's cache."""
    tools: list[ListedTool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _call(name: str, arguments: dict[str, Any], client: "Client") -> "CallToolResult":
    return await client.call_tool(name, arguments)


def _text(result: "CallToolResult") -> str:
    """The texts of a result; of what is no text, what it is. Structured content stands alone only
    where no text comes with it."""
    if not result.content and result.structured_content is not None:
        return result_text(result.structured_content)
    return "\n".join(map(_block_text, result.content))


def _block_text(block: "ContentBlock") -> str:
    match block.type:
        case "text":
            return block.text
        case "resource":
            text = getattr(block.resource, "text", None)
            return f"[resource {block.resource.uri}]" if text is None else str(text)
        case "resource_link":
            return f"[resource {block.uri}]"
        case _:
            return f"[{block.type} of type {block.mime_type}, not shown]"

# SPDX-License-Identifier: Apache-2.0
"""MCP servers as toolsets, through the official `mcp` package (the extra `mcp`).

A server is asked for its tools once per run. What is frozen is the list, not the connection: when
the server is killed, the call in flight gets an error as its result, for it may have had effects,
and the next call makes a new connection.
"""

import hashlib
import importlib.util
import math
import re
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import anyio

from .errors import InvalidTool, MCPMissing, MCPServerFailed, ToolFailed
from .runs.blocking import in_thread
from .tooling.mcp_connection import Link, MakeClient, ServerGone, ServerRefused
from .tooling.tool_results import result_text
from .tools import AnyTool, Tool, ToolSettings, checked_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as ListedTool

_LOST = "The server of this tool ended during the call ({why}). The call may have had effects."
_NOT_MADE = "The server of this tool cannot be reached ({why}). The call was not made."
_SILENT_ERROR = "The server of this tool reports an error, and does not say which."

T = TypeVar("T")

CONNECT_S = 30.0  # until a server has answered for the first time
_READ_S = 300.0  # a server may take its time between two bytes; `timeout` of a tool is stricter
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_PREFIX = re.compile(r"|[A-Za-z_][A-Za-z0-9_-]{0,31}")
_NAME_CHARS = 64  # as of every tool


class MCPSettings(ToolSettings, total=False):
    """Settings of a tool, for all of a server's tools; and `only`: the names, as the server has
    them, of those that are offered."""

    only: Collection[str]


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
        settings: MCPSettings,
    ) -> None:
        """Use `stdio` or `http`. `make`: see `MakeClient`; `has_sessions`: as HTTP has.
        InvalidTool for a prefix, a time or settings that are none; MCPMissing."""
        if importlib.util.find_spec("mcp") is None:
            raise MCPMissing(
                "the package mcp is not installed",
                value=name,
                remedy="pip install 'freetoken-agent[mcp]'",
            )
        self.name = name
        self._make = make
        self._prefix = _checked_prefix(prefix)
        self._timeout_s = _checked_time(connect_timeout_s)
        self._has_sessions = has_sessions
        self._only, self._settings = _checked_settings(settings)
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
        **settings: Unpack[MCPSettings],
    ) -> Self:
        """A server that is started as a process and speaks over its standard streams. `env` is
        added to what it inherits, which is little: HOME, PATH, USER and the like. `settings` are
        those of a tool, for all of its tools: `timeout`, `needs_approval`, …; `only` names those
        that are offered. InvalidTool, MCPMissing."""
        words = (command, *([args] if isinstance(args, str) else args))
        if isinstance(args, str) or not all(isinstance(word, str) for word in words):
            raise InvalidTool(
                "a command is a text, and its arguments are a list of texts",
                value=[command, args],
                remedy='write MCPServer.stdio("python", ["server.py"])',
            )

        def make(begun: Callable[[], None]) -> "Client":
            from mcp import Client, StdioServerParameters, stdio_client

            given = None if env is None else dict(env)
            process = StdioServerParameters(command=command, args=list(args), env=given)

            @asynccontextmanager
            async def started() -> "AsyncIterator[Any]":
                async with stdio_client(process) as streams:
                    begun()
                    yield streams

            return Client(started())

        return cls(
            " ".join(words),
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
        **settings: Unpack[MCPSettings],
    ) -> Self:
        """A server that is reached by streamable HTTP. `headers` go with each request."""

        @asynccontextmanager
        async def make(begun: Callable[[], None]) -> "AsyncIterator[Client]":
            from httpx2 import AsyncClient, Timeout
            from mcp import Client
            from mcp.client.streamable_http import streamable_http_client

            begun()
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
        ask = partial(_list, self._timeout_s)
        try:
            try:
                listed = await self._ask(ask)
            except (ServerGone, ServerRefused) as error:
                if isinstance(error, ServerGone) and not error.asked:
                    raise
                listed = await self._ask(ask)
        except (ServerGone, ServerRefused, TimeoutError, ValueError) as error:
            raise self._failed("could not be asked for its tools", error) from error
        return [self._tool(one) for one in self._offered(listed)]

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

    def _offered(self, listed: "Sequence[ListedTool]") -> "Sequence[ListedTool]":
        if self._only is None:
            return listed
        names = [one.name for one in listed]
        missing = sorted(self._only - set(names))
        if missing:
            raise InvalidTool(
                "the MCP server has no such tool",
                value=missing[0],
                limit=f"tools of {self.name}: {', '.join(names)}",
                remedy="name in only= what it has",
            )
        return [one for one in listed if one.name in self._only]

    def _tool(self, listed: "ListedTool") -> AnyTool:
        said = listed.description or listed.title or ""
        settings: ToolSettings = {"description": said, **self._settings}
        function = partial(self._call, listed.name)
        name = _tool_name(self._prefix, listed.name)
        return Tool.from_schema(name, listed.input_schema, function, **settings)

    async def _call(self, name: str, arguments: dict[str, Any]) -> object:
        try:
            result = await self._ask(partial(_call, name, arguments))
        except ServerRefused as refused:
            raise ToolFailed(str(refused)) from refused
        except ServerGone as gone:
            what = _LOST if gone.asked else _NOT_MADE
            raise ToolFailed(what.format(why=gone)) from gone
        said = _text(result)
        if result.is_error:
            raise ToolFailed(said or _SILENT_ERROR)
        return said

    def _failed(self, what: str, why: Exception) -> MCPServerFailed:
        return MCPServerFailed(
            f"the MCP server {what}: {' '.join(str(why).split())}",
            value=self.name,
            remedy="look at what it logs, start it by hand, see that command or url are right; "
            "one that takes long to start needs another connect_timeout_s",
        )

    def __repr__(self) -> str:
        return f"MCPServer({self.name!r})"


def _checked_prefix(prefix: str) -> str:
    if isinstance(prefix, str) and _PREFIX.fullmatch(prefix):
        return prefix
    raise InvalidTool(
        "the prefix of a server's tools cannot be this",
        value=prefix,
        limit="up to 32 letters, digits, _ and -, not beginning with a digit or -",
    )


def _checked_time(seconds: float) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if is_number and seconds > 0 and math.isfinite(seconds):
        return seconds
    raise InvalidTool("connect_timeout_s cannot be this", value=seconds, limit="seconds above 0")


def _checked_settings(settings: MCPSettings) -> tuple[frozenset[str] | None, ToolSettings]:
    """The names that `only` has, and the settings of each tool."""
    given: dict[str, Any] = {"validate_after": True, **settings}
    only = given.pop("only", None)
    if isinstance(only, str) or not isinstance(only, Collection | None):
        raise InvalidTool("only= names tools", value=only, remedy='write only=["name"]')
    if "name" in given:
        raise InvalidTool("a server has more tools than one", value=given["name"])
    checked = cast(ToolSettings, checked_options(given))
    return None if only is None else frozenset(only), checked


def _tool_name(prefix: str, name: str) -> str:
    """`prefix_name`, where characters that no name of a tool may hold are `_`, and the end of a
    long one is a digest of it."""
    full = _NOT_IN_NAMES.sub("_", f"{prefix}_{name}" if prefix else name)
    if not re.match("[A-Za-z_]", full):
        full = f"_{full}"
    if len(full) <= _NAME_CHARS:
        return full
    digest = hashlib.blake2s(name.encode(), digest_size=4).hexdigest()
    return f"{full[: _NAME_CHARS - len(digest) - 1]}_{digest}"


async def _list(timeout_s: float, client: "Client") -> "list[ListedTool]":
    """All pages; not from the client's cache."""
    tools: list[ListedTool] = []
    cursor: str | None = None
    seen: set[str] = set()
    with anyio.move_on_after(timeout_s):
        while True:
            page = await client.list_tools(cursor=cursor, cache_mode="refresh")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
            if cursor in seen:
                raise ValueError("the pages of its list go in a circle")
            seen.add(cursor)
    raise TimeoutError(f"no list in {timeout_s:g} s")


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

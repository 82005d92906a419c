# SPDX-License-Identifier: Apache-2.0
"""One client of one MCP server, owned by one task.

    caller's loop                a thread of the server's own
    ─────────────                ─────────────────────────────────────────
    await call(…)  ──portal──▶   request ──▶ client ──▶ process or http
                                              ▲
                                 owner task: enters the client, waits, leaves it

The client's cancel scopes belong to the task that entered it. Here that task serves nothing else,
so that a server that is killed, or closed out of order, cannot cancel a caller.
"""

import asyncio
import atexit
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
MakeClient = Callable[[Callable[[], None]], "AbstractAsyncContextManager[Client]"]
"""A new client, every time. It calls what it is given as soon as it may be cancelled: a process
whose start is cancelled is left half made by asyncio."""

_CLOSING_S = (
    10.0  # the client itself gives a process 2 s to end, 2 s after SIGTERM, 2 s after SIGKILL
)
_log = logging.getLogger(__name__)


class ServerGone(Exception):
    """There is no connection, or it ended. `asked`: a request had been sent, and may have been
    served, or not."""

    def __init__(self, why: str, *, asked: bool) -> None:
        super().__init__(why)
        self.asked = asked


class ServerRefused(Exception):
    """The server answered with an error of the protocol; its message."""


class PortalThread:
    """An event loop in a thread that no interpreter waits for at its end. Any thread and any event
    loop may call into it."""

    def __init__(self, name: str) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    async def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """What it returns there. Cancelling the caller cancels it."""
        return await asyncio.wrap_future(self._portal.start_task_soon(function, *args))

    def call_sync(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The same, in the calling thread."""
        return self._portal.call(function, *args)

    def stop(self) -> None:
        """End the loop once nothing runs in it any more."""
        self._portal.start_task_soon(self._portal.stop)
        self._thread.join()

    def _run(self) -> None:
        anyio.run(self._serve)

    async def _serve(self) -> None:
        async with BlockingPortal() as self._portal:
            self._started.set()
            await self._portal.sleep_until_stopped()


class Link:
    """A server as seen from any thread and event loop: connected when that is needed, again and
    again, until it is closed; then everything is ServerGone. `has_sessions`: after an error of the
    protocol a new connection is made, for a server that was started again knows no old session, and
    says so in words of its own."""

    def __init__(self, make: MakeClient, timeout_s: float, *, has_sessions: bool = False) -> None:
        self._make = make
        self._has_sessions = has_sessions
        self._timeout_s = timeout_s
        self._thread = PortalThread("mcp")
        self._connection: Connection | None = None
        self._opening: anyio.Lock | None = None
        self._closed = False
        atexit.register(self.close)

    async def connect(self) -> None:
        """ServerGone if it cannot."""
        await self._call(self._connected)

    async def request(self, ask: "Callable[[Client], Awaitable[T]]") -> T:
        """Asked once. ServerGone if there is no connection, or it ended meanwhile; ServerRefused
        where it answers with an error."""
        return await self._call(self._request, ask)

    def close(self) -> None:
        """From any thread but its own; once."""
        atexit.unregister(self.close)
        self._thread.call_sync(self._end)
        self._thread.stop()

    async def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return await self._thread.call(function, *args)
        except RuntimeError as error:
            if not self._closed:
                raise
            raise ServerGone("it was closed", asked=False) from error

    async def _connected(self) -> "Connection":
        if self._opening is None:
            self._opening = anyio.Lock()
        async with self._opening:
            connection = self._connection
            if connection is not None and connection.is_gone:
                await connection.close()
                connection = None
            if self._closed:
                raise ServerGone("it was closed", asked=False)
            if connection is None:
                self._connection = connection = Connection(self._make)
                connection.start()
            await connection.ready(self._timeout_s)
            return connection

    async def _end(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def _request(self, ask: "Callable[[Client], Awaitable[T]]") -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self._connected()
        try:
            return await connection.request(ask)
        except MCPError as error:
            is_closed = error.code == CONNECTION_CLOSED
            if is_closed or self._has_sessions:
                connection.drop()
            if not is_closed:
                raise ServerRefused(error.message) from error
            raise ServerGone(_told(error), asked=True) from error


class Connection:
    """Lives in one event loop. `start` it once, `request` when it is `ready`, from any task; when
    it `is_gone`, nothing brings it back."""

    def __init__(self, make: MakeClient) -> None:
        self._make = make
        self._client: Client | None = None
        self._scope = anyio.CancelScope()
        self._begun = anyio.Event()  # it may be cancelled
        self._settled = anyio.Event()  # the client is there, or it never will be
        self._stop = anyio.Event()
        self._gone = anyio.Event()
        self._owner: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set() or self._stop.is_set()

    def start(self) -> None:
        """Begin to connect."""
        self._owner = asyncio.create_task(self._own())

    async def ready(self, timeout_s: float) -> None:
        """Wait for the client. ServerGone if it is not there within the time."""
        with anyio.move_on_after(timeout_s):
            await self._settled.wait()
        if self._client is None or self.is_gone:
            is_late = not self._settled.is_set()
            await self.close()
            why = f"no answer in {timeout_s:g} s" if is_late else _told(self.error)
            raise ServerGone(why, asked=False)

    async def request(self, ask: "Callable[[Client], Awaitable[T]]") -> T:
        """What the server answers. ServerGone if the connection ends first; what the client raises
        otherwise."""
        assert self._client is not None, "ready() comes first"
        answer: list[T] = []
        failure: list[Exception] = []
        client = self._client

        async def asked(scope: anyio.CancelScope) -> None:
            try:
                answer.append(await ask(client))
            except Exception as error:  # noqa: BLE001 - raised again below, out of the task group
                failure.append(error)
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(asked, group.cancel_scope)
            await self._gone.wait()
            group.cancel_scope.cancel()
        if answer:
            return answer[0]
        if failure:
            raise failure[0]
        raise ServerGone(_told(self.error), asked=True)

    def drop(self) -> None:
        """Let its owner leave the client; nobody waits for that."""
        self._stop.set()

    async def close(self) -> None:
        """Leave the client, at last by force."""
        self._stop.set()
        if self._owner is None:
            return
        with anyio.move_on_after(_CLOSING_S, shield=True):
            if self._client is None:
                await self._begun.wait()
                self._scope.cancel()
            await self._gone.wait()
        self._scope.cancel()

    async def _own(self) -> None:
        try:
            with self._scope:
                async with self._make(self._begun.set) as client:
                    self._client = client
                    self._settled.set()
                    await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - the edge of a process: the caller is told
            _log.info("an MCP server's connection ended: %s", error, exc_info=error)
            self.error = error
        finally:
            self._gone.set()
            self._begun.set()
            self._settled.set()


def _told(error: BaseException | None) -> str:
    """What is at the bottom of an error, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it ended" if error is None else f"{type(error).__name__}: {error}"

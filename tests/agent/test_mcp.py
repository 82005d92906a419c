# SPDX-License-Identifier: Apache-2.0
"""MCP servers as toolsets: real processes, over stdio and over HTTP on this machine."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from freetoken_agent import (
    Agent,
    MCPMissing,
    MCPServer,
    MCPServerFailed,
    Store,
    ToolNameTaken,
    tool,
)
from freetoken_agent.testing import Call, ScriptedModel, Step
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.mcp_connection import Link, ServerGone
from freetoken_agent.tooling.tool_calls import ToolOutcome
from freetoken_agent.tooling.toolsets import Toolset

CHILD = Path(__file__).with_name("mcp_server_child.py")


class HttpChild:
    """A server process on a port of its own, which can be started again."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        self.kill()
        command = [sys.executable, str(CHILD), str(self._log), str(self.port)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls.log"


@pytest.fixture
def http(log: Path) -> Iterator[HttpChild]:
    child = HttpChild(log)
    child.start()
    yield child
    child.kill()


def stdio(log: Path, **options: Any) -> MCPServer:
    return MCPServer.stdio(sys.executable, [str(CHILD), str(log)], **options)


def calls(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def until_logged(log: Path, line: str) -> None:
    while line not in calls(log):
        time.sleep(0.05)


async def ask(server: MCPServer, name: str, **arguments: Any) -> ToolOutcome:
    [found] = [one for one in await server.list_tools() if one.name == name]
    return await call_tool(found, arguments)


async def test_the_tools_of_a_server_are_tools(log: Path) -> None:
    """Oracle: the server's functions: names, schemas, results, errors, environment."""
    async with stdio(log, prefix="my", env={"SECRET": "42"}, timeout=50) as server:
        assert isinstance(server, Toolset) and server.known_tools is None
        tools = {one.name: one for one in await server.list_tools()}
        assert {"my_add", "my_read_page", "my_wait"} < set(tools)
        add = tools["my_add"]
        assert add.description == "Add two numbers." and add.timeout == 50
        assert list(add.parameters["required"]) == ["a", "b"]
        assert (await call_tool(add, {"a": "1", "b": 2})).text == "3"
        assert "is missing" in (await call_tool(add, {"a": 1})).text
        assert (await ask(server, "my_read_page", number=3)).text == (
            "page 3\n[image of type image/png, not shown]"
        )
        assert (await ask(server, "my_fail", text="no")).status == "failed"
        assert (await ask(server, "my_secret")).text == "42"
    assert calls(log) == ["add"]


async def check_a_kill(server: MCPServer, log: Path, restart: Any) -> None:
    @tool
    def start_again() -> str:
        """Start the server again."""
        restart()
        return "started"

    script: list[Step] = [
        Call("add", {"a": 1, "b": 2}),
        Call("die", {}),
        Call("start_again", {}),
        Call("add", {"a": 2, "b": 3}),
        "done",
    ]
    agent = Agent(ScriptedModel(script), tools=[start_again], toolsets=[server])
    async with server:
        result = await agent.run("go")
    assert result.output == "done"
    three, died, _, five = result.session.find(kind="tool_result")
    assert (three.content, five.content) == ("3", "5")
    assert died.error and "ended during the call" in died.content
    assert calls(log) == ["add", "die", "add"], "nothing was tried twice"


async def test_a_run_goes_on_when_a_process_is_killed_in_its_middle(log: Path) -> None:
    """Oracle: the results, and the server's log of calls."""
    await check_a_kill(stdio(log), log, lambda: None)


async def test_a_run_goes_on_when_an_http_server_is_killed_and_started_again(
    log: Path, http: HttpChild
) -> None:
    """Oracle: as above; the caller's cancel scopes stay whole."""
    with anyio.CancelScope() as scope:
        await check_a_kill(MCPServer.http(http.url), log, http.start)
    assert not scope.cancelled_caught


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_idle_server_that_was_started_again_is_used_again(
    log: Path, http: HttpChild, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the next run's results; of a tool listed before, the second call at the latest. Older
    servers keep sessions, which end with them."""
    monkeypatch.setattr("mcp.Client", partial(Client, mode=mode))
    async with MCPServer.http(http.url) as server:
        add = next(one for one in await server.list_tools() if one.name == "add")
        http.start()
        outcomes = [await call_tool(add, {"a": 1, "b": 2}) for _ in range(2)]
        assert outcomes[1].text == "3"
        http.start()
        assert (await ask(server, "add", a=2, b=3)).text == "5"


async def test_a_server_that_stays_away_is_an_error_by_name(log: Path, http: HttpChild) -> None:
    """Oracle: the call's result says that it was not made; a new run fails before its first model
    call, with the documented error."""
    server = MCPServer.http(http.url)
    model = ScriptedModel(["never"])
    async with server:
        add = next(one for one in await server.list_tools() if one.name == "add")
        http.kill()
        outcomes = [await call_tool(add, {"a": 1, "b": 2}) for _ in range(2)]
        assert all(outcome.status == "failed" for outcome in outcomes)
        assert "was not made" in outcomes[1].text and calls(log) == []
        with pytest.raises(MCPServerFailed, match="tools"):
            await Agent(model, toolsets=[server]).run("go")
    assert not model.requests
    with pytest.raises(MCPServerFailed, match="reached"):
        async with server:
            pass
    with pytest.raises(MCPServerFailed, match="no-such-command"):
        await MCPServer.stdio("no-such-command").list_tools()


async def test_a_server_that_says_nothing_is_late() -> None:
    """Oracle: the documented error, with the time."""
    silent = MCPServer.stdio(
        sys.executable, ["-c", "import time; time.sleep(60)"], connect_timeout_s=0.5
    )
    with pytest.raises(MCPServerFailed, match="no answer in 0.5 s"):
        async with silent:
            pass


async def test_names_that_are_taken_are_an_error_before_any_model_call(log: Path) -> None:
    """Oracle: the documented error; a prefix helps."""

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model = ScriptedModel(["fine"])
    async with stdio(log) as server:
        agent = Agent(model, tools=[add], toolsets=[server])
        with pytest.raises(ToolNameTaken, match="add"):
            await agent.run("go")
        assert not model.requests
        prefixed = stdio(log, prefix="other")
        async with prefixed:
            assert (await agent.replace(toolsets=[prefixed]).run("go")).output == "fine"


async def test_the_list_is_frozen_for_a_run(log: Path) -> None:
    """Oracle: a tool that comes during a run is unknown in it, and known to the next."""
    script: list[Step] = [Call("grow", {}), Call("grown", {}), "one", Call("grown", {}), "two"]
    async with stdio(log) as server:
        agent = Agent(ScriptedModel(script), toolsets=[server])
        with Store(":memory:") as store:
            session = store.create("s", agent.model)  # type: ignore[arg-type]
            for _ in range(2):
                await agent.run("go", session=session)
            results = session.find(kind="tool_result")
    assert [(r.error, "I am new" in r.content) for r in results] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("closed", ["stdio", "http"])
async def test_servers_are_closed_in_any_order_by_any_task(
    log: Path, http: HttpChild, closed: str
) -> None:
    """Oracle: nothing is cancelled but what was closed; a call in flight gets an error."""
    first, second = stdio(log), MCPServer.http(http.url)
    if closed == "http":
        first, second = second, first
    wait = next(one for one in await first.list_tools() if one.name == "wait")
    assert (await ask(second, "add", a=1, b=1)).text == "2"
    flying = asyncio.create_task(call_tool(wait, {"seconds": 60}))
    await asyncio.to_thread(until_logged, log, "wait")
    await asyncio.create_task(first.close())
    assert "ended during the call" in (await flying).text
    assert (await ask(second, "add", a=2, b=2)).text == "4"
    assert (await ask(first, "add", a=3, b=3)).text == "6", "the next use connects again"
    await asyncio.gather(first.close(), second.close(), first.close())


async def test_a_request_ends_with_its_connection(log: Path) -> None:
    """Oracle: the documented signal, for a request that would never end by itself."""
    server = StdioServerParameters(command=sys.executable, args=[str(CHILD), str(log)])
    link = Link(lambda begun: Client(server), 30.0)
    begun = threading.Event()

    async def never(_: Client) -> None:
        begun.set()
        await anyio.sleep_forever()

    flying = asyncio.create_task(link.request(never))
    await asyncio.to_thread(begun.wait, 30)
    await asyncio.to_thread(link.close)
    with pytest.raises(ServerGone) as gone:
        await flying
    assert gone.value.asked
    with pytest.raises(ServerGone, match="closed"):
        await link.connect()


async def test_a_cancelled_first_use_leaves_the_server_usable(log: Path) -> None:
    """Oracle: the next use answers; two at once make one process."""
    server = stdio(log)
    with anyio.move_on_after(0.05) as scope:
        await server.list_tools()
    assert scope.cancelled_caught
    seen = await asyncio.gather(ask(server, "process"), ask(server, "process"))
    assert seen[0].text == seen[1].text
    await server.close()


async def test_a_cancelled_call_leaves_the_connection_alone(log: Path) -> None:
    """Oracle: the same process answers afterwards; a timeout of a tool does the same."""
    async with stdio(log, timeout=0.5) as server:
        before = (await ask(server, "process")).text
        assert (await ask(server, "wait", seconds=60)).status == "timeout"
        with anyio.move_on_after(0.3) as scope:
            await ask(server, "wait", seconds=60)
        assert scope.cancelled_caught
        assert (await ask(server, "process")).text == before


def test_one_server_serves_many_event_loops(log: Path) -> None:
    """Oracle: the server's process, which stays the same until close()."""
    server = stdio(log)
    seen = {asyncio.run(ask(server, "process")).text for _ in range(2)}
    assert len(seen) == 1
    asyncio.run(server.close())
    [pid] = seen
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_program_that_forgets_to_close_ends(log: Path) -> None:
    """Oracle: the exit status, and the server's process, which is gone."""
    program = f"""
import asyncio, sys
from freetoken_agent import MCPServer
from freetoken_agent.tool_testing import call_tool
async def main():
    server = MCPServer.stdio(sys.executable, [{str(CHILD)!r}, {str(log)!r}])
    [one] = [t for t in await server.list_tools() if t.name == "process"]
    sys.stdout.write((await call_tool(one, {{}})).text)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIG_DFL)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the documented error."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MCPMissing, match=r"freetoken-agent\[mcp\]"):
        MCPServer.stdio("server")

# SPDX-License-Identifier: Apache-2.0
"""MCP servers that do what they should not, and what is refused before there is one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    InvalidTool,
    MCPServer,
    MCPServerFailed,
    ResultLimit,
    ToolNameTaken,
)
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.tool_calls import ToolOutcome

CHILD = Path(__file__).with_name("mcp_raw_child.py")


def raw(fault: str = "none", **options: Any) -> MCPServer:
    return MCPServer.stdio(sys.executable, [str(CHILD), fault], **options)


async def ask(server: MCPServer, name: str, **arguments: Any) -> ToolOutcome:
    [found] = [one for one in await server.list_tools() if one.name == name]
    return await call_tool(found, arguments)


async def test_results_of_every_kind_have_a_text() -> None:
    """Oracle: the text by hand; what is no text is named."""
    async with raw() as server:
        assert (await ask(server, "mixed")).text.splitlines() == [
            "one",
            "[image of type image/png, not shown]",
            "[audio of type audio/wav, not shown]",
            "two",
            "[resource file:///y]",
            "[resource file:///z]",
        ]
        assert (await ask(server, "structured")).text == '{"v":[1]}'
        large = await ask(server, "large")
        assert (len(large.text), large.cut_chars) == (20_101, 2_980_000)
        refused = await ask(server, "refused")
        assert (refused.status, refused.text) == ("failed", "not today")
        protest = await ask(server, "protest")
        assert (protest.status, protest.text) == ("failed", "not for you")
        mute = await ask(server, "mute")
        assert (mute.status, mute.text) == (
            "failed",
            "The server of this tool reports an error, and does not say which.",
        )


async def test_what_a_grammar_cannot_do_is_left_to_the_server() -> None:
    """Oracle: the server's echo; numbers in text are brought to the schema all the same."""
    async with raw() as server:
        outcome = await ask(server, "echo", x="5", y=[1])
        assert outcome.text == 'echo {"x": 5, "y": [1]}'


@pytest.mark.parametrize("fault", ["garbage", "pages", "lingers"])
async def test_a_server_may_be_odd(fault: str) -> None:
    """One that writes other lines among its messages, one that lists page by page, one that does
    not end by itself. Oracle: its tools, and a call's result."""
    async with raw(fault) as server:
        assert len(await server.list_tools()) == 12
        assert (await ask(server, "echo", x=1)).text == 'echo {"x": 1}'


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("schema", "inputSchema.type"),
        ("circle", "in a circle"),
        ("no list", "no list in 4 s"),
    ],
)
async def test_a_list_that_is_none_ends_the_run_before_its_first_call(fault: str, why: str) -> None:
    """Oracle: the documented error, with the reason; the model was not asked."""
    model = ScriptedModel(["never"])
    async with raw(fault, connect_timeout_s=4) as server:
        with pytest.raises(MCPServerFailed, match=why) as caught:
            await Agent(model, toolsets=[server]).run("go")
    assert "\n" not in str(caught.value) and not model.requests


async def test_names_become_names_that_models_can_write() -> None:
    """Oracle: the rule by hand; two long names stay two, and the server is asked by its own."""
    async with raw(only=["a.b", "2fa", "n" * 100, "n" * 101]) as server:
        tools = await server.list_tools()
        names = [one.name for one in tools]
        assert names[:2] == ["a_b", "_2fa"]
        assert [len(name) for name in names[2:]] == [64, 64] and len(set(names)) == 4
        assert (await call_tool(tools[3], {})).text == "n" * 101 + " {}"
        assert [one.name for one in await server.list_tools()] == names
    async with raw(only=["2fa"], prefix="my") as server:
        assert [one.name for one in await server.list_tools()] == ["my_2fa"]


async def test_only_some_of_a_servers_tools() -> None:
    """Oracle: what the model is shown. Two that come to one name are told apart by leaving one
    out; a name that the server does not have is an error."""
    model = ScriptedModel([Call("a_b", {}), "done"])
    async with raw() as server:
        with pytest.raises(ToolNameTaken, match="a_b"):
            await Agent(model, toolsets=[server]).run("go")
    async with raw(only=["a/b"]) as server:
        result = await Agent(model, toolsets=[server]).run("go")
        assert result.session.find(kind="tool_result")[0].content == "a/b {}"
        assert model.tokenizer.decode(model.requests[0].ids).count('"name"') == 1
    async with raw(only=["nothing"]) as server:
        with pytest.raises(InvalidTool, match="no such tool; got 'nothing'.*echo"):
            await server.list_tools()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": "a b"}, "prefix.*got 'a b'.*letters"),
        ({"prefix": "2"}, "prefix"),
        ({"prefix": "x" * 33}, "up to 32"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"connect_timeout_s": float("inf")}, "connect_timeout_s"),
        ({"connect_timeout_s": "30"}, "connect_timeout_s"),
        ({"timeout": -1}, "timeout of a tool"),
        ({"timout": 3}, "no option 'timout'.*use one of"),
        ({"name": "shop"}, "more tools than one"),
        ({"result_limit": 100}, "a ResultLimit"),
        ({"only": "echo"}, r"only=\[\"name\"\]"),
        ({"only": 3}, "only= names tools"),
    ],
)
def test_settings_are_checked_where_they_are_made(options: dict[str, Any], message: str) -> None:
    """Oracle: the documented error, before there is a process."""
    with pytest.raises(InvalidTool, match=message):
        raw(**options)
    with pytest.raises(InvalidTool, match=message):
        MCPServer.http("http://127.0.0.1:1/mcp", **options)


@pytest.mark.parametrize("command", [("python", "server.py"), (["python"],), ("python", [1])])
def test_a_command_is_a_text_and_a_list(command: Any) -> None:
    """`stdio("python", "server.py")` would start python with nine arguments."""
    with pytest.raises(InvalidTool, match=r'MCPServer.stdio\("python", \["server.py"\]\)'):
        MCPServer.stdio(*command)


async def test_settings_of_a_server_are_those_of_its_tools() -> None:
    """Oracle: each tool's own."""
    limit = ResultLimit(10)
    async with raw(timeout=5, needs_approval=True, retries=0, result_limit=limit) as server:
        for one in await server.list_tools():
            assert (one.timeout, one.needs_approval, one.retries) == (5, True, 0)
            assert one.result_limit is limit and one.validate_after


HURRIED = """
import asyncio, os, sys, threading
from freetoken_agent import MCPServer

def held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()

async def begin_and_leave(child, delay_s):
    server = MCPServer.stdio(sys.executable, [child, "none"])
    task = asyncio.create_task(server.list_tools())
    await asyncio.sleep(delay_s)
    task.cancel()
    await asyncio.wait([task])
    await server.close()

async def main():
    await begin_and_leave(sys.argv[1], 1)
    before = held()
    for number in range(40):
        await begin_and_leave(sys.argv[1], number / 2000)
    assert held() == before, (before, held())

asyncio.run(main())
"""


def test_a_server_that_is_left_while_it_starts_leaves_nothing() -> None:
    """Oracles: open files and threads, which are as many as before; and Python's warnings of
    processes and pipes that nobody closed."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", HURRIED, str(CHILD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr

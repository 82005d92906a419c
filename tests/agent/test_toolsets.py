# SPDX-License-Identifier: Apache-2.0
"""Tools under distinct names: collisions are errors before any call."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    InvalidTool,
    Tool,
    ToolList,
    ToolNameTaken,
    Toolset,
    UnsupportedSchema,
    tool,
)
from freetoken_agent.testing import ScriptedModel
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.toolsets import Toolbox, known_tools, listed_tools


@tool
def read(path: str) -> str:
    """Read a file."""
    return path


def write(path: str) -> None:
    """Write a file."""


class Remote:
    """A toolset whose tools must be asked for."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked = 0

    @property
    def known_tools(self) -> None:
        return None

    async def list_tools(self) -> Sequence[Tool[..., Any]]:
        self.asked += 1
        return [Tool.from_schema(name, {}, dict) for name in self.names]


def test_a_static_toolset_prefixes_its_tools() -> None:
    """Functions become tools; the description and the schema stay."""
    files = ToolList([read, write], prefix="files")
    assert isinstance(files, Toolset) and isinstance(Remote(), Toolset)
    names = [one.name for one in files.known_tools]
    assert names == ["files_read", "files_write"]
    assert files.known_tools[0].parameters == read.parameters
    assert [one.name for one in ToolList([read]).known_tools] == ["read"]


async def test_a_prefixed_tool_is_called_by_its_new_name() -> None:
    """What models are told names the tool as they know it."""
    (files_read,) = ToolList([read], prefix="files").known_tools
    assert (await call_tool(files_read, {"path": "a"})).text == "a"
    told = (await call_tool(files_read, {})).text
    assert "arguments of files_read are not valid" in told and "call files_read again" in told


def test_a_prefix_that_makes_no_name_is_refused() -> None:
    """Oracle: the documented limit of names."""
    with pytest.raises(InvalidTool, match="name"):
        read.prefixed("a b")
    with pytest.raises(InvalidTool, match="name"):
        read.prefixed("x" * 60)


def test_what_is_known_is_in_order() -> None:
    """The agent's own first, then toolsets; what must be asked for is not known yet."""
    remote = Remote("far")
    tools = known_tools([write], [remote, ToolList([read], "files")])
    assert [one.name for one in tools] == ["write", "files_read"]
    assert remote.asked == 0


async def test_listing_asks_each_toolset_once() -> None:
    """Oracle: the names, in the order of the toolsets."""
    remote = Remote("far", "near")
    tools = await listed_tools([write], [remote, ToolList([read])])
    assert [one.name for one in tools] == ["write", "far", "near", "read"]
    assert remote.asked == 1


@pytest.mark.parametrize(
    "collide",
    [
        lambda: known_tools([read, tool(write, name="read")]),
        lambda: known_tools([read], [ToolList([read, write])]),
        lambda: known_tools([], [ToolList([read], "a"), ToolList([tool(write, name="a_read")])]),
        lambda: Toolbox([read, tool(write, name="read")]),
    ],
    ids=["own", "own and toolset", "toolsets", "box"],
)
def test_static_collisions_are_errors_at_once(collide: Callable[[], object]) -> None:
    """Oracle: the documented error, which names the name."""
    with pytest.raises(ToolNameTaken, match="read") as caught:
        collide()
    assert caught.value.code == "tool_name_taken" and caught.value.remedy


async def test_listed_collisions_are_errors_when_listed() -> None:
    """Nothing is wrong before the server is asked."""
    remote = Remote("read")
    assert len(known_tools([read], [remote])) == 1
    with pytest.raises(ToolNameTaken, match="read"):
        await listed_tools([read], [remote])


def test_a_box_knows_what_may_be_called() -> None:
    """`allowed` restricts names, not schemas: the ids of the preamble stay."""
    box = Toolbox([read, tool(write)])
    assert (box.names, box.get("read")) == (("read", "write"), read)
    limited = Toolbox(box.tools, allowed=frozenset({"write"}))
    assert (limited.names, limited.get("read")) == (("write",), None)
    assert limited.schemas == box.schemas == [read.schema, tool(write).schema]
    assert Toolbox(box.tools, allowed=frozenset()).names == ()


def test_an_allowed_name_must_exist() -> None:
    """A misspelt name would silently forbid everything."""
    with pytest.raises(InvalidTool, match="reed"):
        Toolbox([read], allowed=frozenset({"reed"}))


class Files:
    @tool
    def list_files(self) -> list[str]:
        return []


def test_a_method_needs_its_instance() -> None:
    """The tool of the class cannot be called; the remedy says what to pass."""
    assert Toolbox([Files().list_files]).names == ("list_files",)
    with pytest.raises(InvalidTool, match="instance.list_files"):
        Toolbox([Files.list_files])


def test_functions_are_read_once() -> None:
    """Oracle: the very same tools each time, and after `replace`; a mistake in a list shows where
    the list is made."""

    def plain(x: int) -> int:
        return x

    readers = ToolList([plain], prefix="my")
    assert readers.known_tools[0] is readers.known_tools[0]
    agent = Agent(tools=[plain])
    assert agent.known_tools[0] is agent.replace(name="other").known_tools[0]
    with pytest.raises(InvalidTool, match="pass name="):
        ToolList([lambda x: x])
    with pytest.raises(InvalidTool, match="tools are a list"):
        ToolList(plain)  # type: ignore[arg-type]


async def test_toolsets_are_asked_at_the_same_time() -> None:
    """Oracle: each waits until all are asked, so one after the other would wait for ever (the
    test's timeout); the order is theirs. What one raises is raised plain, and the others end."""
    together = asyncio.Barrier(3)
    ended: list[str] = []

    class Slow(Remote):
        seconds = 0

        async def list_tools(self) -> Sequence[Tool[..., Any]]:
            await together.wait()
            try:
                await asyncio.sleep(self.seconds)
            finally:
                ended.append(self.names[0])
            return await super().list_tools()

    class Slower(Slow):
        seconds = 60

    class Broken(Remote):
        async def list_tools(self) -> Sequence[Tool[..., Any]]:
            await together.wait()
            raise LookupError("no tools today")

    found = await listed_tools([read], [Slow("c"), Slow("b"), Slow("a")])
    assert [one.name for one in found] == ["read", "c", "b", "a"]
    ended.clear()
    with pytest.raises(LookupError, match="no tools today"):
        await listed_tools([], [Slower("c"), Broken("b"), Slower("a")])
    assert set(ended) <= {"a", "c"}


async def test_a_toolset_may_hold_plain_functions() -> None:
    """Oracle: what `@tool` makes of it; a thing that is none is named."""

    class Loose(Remote):
        async def list_tools(self) -> Any:
            return [write] if self.names else [5]

    assert [one.name for one in await listed_tools([], [Loose("x")])] == ["write"]
    with pytest.raises(InvalidTool, match="a tool is a function; got 5"):
        await listed_tools([], [Loose()])


async def test_listed_schemas_that_cannot_be_enforced_are_named_before_any_model_call() -> None:
    """Oracle: the error that the same tool causes where an agent is made; no request was made."""
    one = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}
    schema = {"type": "object", "properties": {"a": one}, "required": ["a"]}

    class Listing(Remote):
        async def list_tools(self) -> Sequence[Tool[..., Any]]:
            later = self.names == ("later",)
            return [Tool.from_schema("odd", schema, dict, validate_after=later)]

    model = ScriptedModel(["fine"])
    with pytest.raises(UnsupportedSchema, match="'odd'.*contains"):
        await Agent(model, toolsets=[Listing()]).run("x")
    assert not model.requests
    assert (await Agent(model, toolsets=[Listing("later")]).run("x")).output == "fine"

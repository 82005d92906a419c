# SPDX-License-Identifier: Apache-2.0
"""The tools of an agent, from its own list and from toolsets, under distinct names."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..errors import InvalidTool, ToolNameTaken
from ..tools import AnyTool, ToolFunction, as_tool
from .tool_results import ResultLimit


@runtime_checkable
class Toolset(Protocol):
    """Tools that come together: a list of one's own, or those of a server."""

    @property
    def known_tools(self) -> Sequence[AnyTool] | None:
        """The tools, where they are known without asking anybody; else None."""

    async def list_tools(self) -> Sequence[AnyTool]:
        """The tools as they are now, under their final names. A run asks once."""


@dataclass(frozen=True)
class ToolList:
    """A toolset that does not change. Its tools are called `prefix_name`."""

    tools: Sequence[ToolFunction]  # of `@tool`, or plain functions
    prefix: str = ""  # empty: the tools keep their names
    _prefixed: Sequence[AnyTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        prefixed = tuple(one.prefixed(self.prefix) for one in as_tools(self.tools))
        object.__setattr__(self, "_prefixed", prefixed)

    @property
    def known_tools(self) -> Sequence[AnyTool]:
        return self._prefixed

    async def list_tools(self) -> Sequence[AnyTool]:
        return self._prefixed


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run, in order. `allowed`: those that may be called; None for all of them.

    ToolNameTaken for two of one name, InvalidTool for a method without its instance, or a name in
    `allowed` that no tool has.
    """

    tools: Sequence[AnyTool] = ()
    result_limit: ResultLimit = ResultLimit()
    allowed: frozenset[str] | None = None
    _by_name: Mapping[str, AnyTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, AnyTool] = {}
        for one in self.tools:
            if one.is_method:
                raise InvalidTool(
                    f"tool {one.name!r} is a method without its instance",
                    remedy=f"pass instance.{one.name}",
                )
            if one.name in by_name:
                raise ToolNameTaken(
                    "two tools have one name",
                    value=one.name,
                    remedy="give one of them another name=, or its toolset a prefix; only= leaves "
                    "out tools of an MCP server",
                )
            by_name[one.name] = one
        for name in self.allowed or ():
            if name not in by_name:
                raise InvalidTool(
                    "a tool is allowed that there is not",
                    value=name,
                    limit=f"tools: {', '.join(by_name)}",
                )
        object.__setattr__(self, "tools", tuple(by_name.values()))
        object.__setattr__(self, "_by_name", by_name)

    @property
    def checked_after(self) -> frozenset[str]:
        """Tools whose schemas need not bind the model: their arguments are checked anyway."""
        return frozenset(one.name for one in self.tools if one.validate_after)

    @property
    def names(self) -> tuple[str, ...]:
        """What may be called."""
        return tuple(n for n in self._by_name if self.allowed is None or n in self.allowed)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Every tool in the OpenAI form; `allowed` does not change them."""
        return [one.schema for one in self.tools]

    def get(self, name: str) -> AnyTool | None:
        """The tool of that name, if it may be called."""
        return self._by_name[name] if name in self.names else None


def as_tools(tools: Sequence[ToolFunction]) -> tuple[AnyTool, ...]:
    """Each as `as_tool` makes it; InvalidTool for what is no list."""
    _check_list("tools", tools)
    return tuple(map(as_tool, tools))


def known_tools(
    tools: Sequence[ToolFunction], toolsets: Sequence[Toolset] = ()
) -> tuple[AnyTool, ...]:
    """What is known without asking a server; ToolNameTaken at construction of an agent."""
    own = as_tools(tools)
    _check_list("toolsets", toolsets)
    for toolset in toolsets:
        if not isinstance(toolset, Toolset):
            raise InvalidTool(
                "this is no toolset",
                value=toolset,
                remedy="pass a ToolList, an MCPServer, or what has known_tools and list_tools(); "
                "single tools go into tools=",
            )
    known = [as_tool(one) for toolset in toolsets for one in toolset.known_tools or ()]
    return tuple(Toolbox([*own, *known]).tools)


async def listed_tools(
    tools: Sequence[ToolFunction], toolsets: Sequence[Toolset] = ()
) -> tuple[AnyTool, ...]:
    """Every tool, toolsets in their order, all asked at the same time; ToolNameTaken before any
    model call."""

    async def ask(toolset: Toolset) -> list[AnyTool]:
        return [as_tool(one) for one in await toolset.list_tools()]

    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(toolset)) for toolset in toolsets]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    listed = [one for task in asked for one in task.result()]
    return tuple(Toolbox([*map(as_tool, tools), *listed]).tools)


def _check_list(what: str, given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidTool(f"{what} are a list", value=given, remedy=f"write {what}=[…]")

# SPDX-License-Identifier: Apache-2.0
"""Calls a tool the way a run does, for tests of tools alone: no weights, no agent, no script."""

from collections.abc import Mapping
from typing import Any, cast

from .runs.run_context import RunContext
from .segments import Usage
from .session import Session
from .store import Store
from .testing import ScriptedModel
from .tooling.tool_calls import ToolCall, ToolOutcome, execute
from .tooling.toolsets import Toolbox
from .tools import ToolFunction, as_tool

__all__ = ["call_tool"]


async def call_tool(
    function: ToolFunction,
    arguments: Mapping[str, Any] | str,
    *,
    deps: Any = None,
    session: Session | None = None,
    retry: int = 0,
) -> ToolOutcome:
    """What the model would see of a call with these arguments, which are read and checked like a
    model's. The tool's `RunContext` has `deps`, `retry`, and `session` or an empty one."""
    [tool] = Toolbox([as_tool(function)]).tools
    if session is None and tool.takes_context:
        with Store(":memory:") as store:
            session = store.create("tool-test", ScriptedModel())
            return await call_tool(tool, arguments, deps=deps, session=session, retry=retry)
    usage = Usage(input_tokens=0, reused_tokens=0, prefill_tokens=0)
    unseen = cast(Session, session)  # None only where the tool asks for no context
    context = RunContext(deps=deps, session=unseen, usage=usage, retry=retry)
    return await execute(tool, ToolCall("call00000", tool.name, arguments), context)

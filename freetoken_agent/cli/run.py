# SPDX-License-Identifier: Apache-2.0
"""`run`: an agent of a Python file, with what each step reused and prefilled.

On a terminal it asks about calls that need approval; elsewhere the run ends there, and the same
command without a message goes on. Without `--session` the conversation is gone afterwards.
"""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from freetoken_agent.errors import InvalidAgent, RunUnfinished

from .opening import StorePath, opened_store
from .output import Json, console, progress, wants_json
from .run_view import RunView
from .views import describe

if TYPE_CHECKING:
    from freetoken_agent import Agent, Model, Segment, Session
    from freetoken_agent.loop import Run

Decisions = Mapping[str, bool | str]
_WHOLE = 1 << 20  # characters of a call: nobody should allow what is not shown


def run_command(
    target: Annotated[str, typer.Argument(help="FILE.py:NAME or MODULE:NAME of an Agent.")],
    message: Annotated[
        str | None, typer.Argument(help="Without one, the session's last run goes on.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", help="Keep the conversation under this name.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Instead of the agent's.")] = None,
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Run an agent; see its steps, their tokens, its tools and its answer."""
    agent = load_agent(target)
    chosen = _model(agent, model)
    if session is None:
        from freetoken_agent import Store

        with Store(":memory:") as memory:
            asyncio.run(_go(agent, memory.create(agent.name, chosen), message))
        return
    with opened_store(store) as opened:
        asyncio.run(_go(agent, opened.create(session, chosen, exist_ok=True), message))


def load_agent(target: str) -> "Agent[Any, Any]":
    """InvalidAgent unless the target names one. What its module raises is its author's to see."""
    from freetoken_agent import Agent

    where, _, name = target.rpartition(":")
    if not where or not name:
        raise InvalidAgent(
            "the target names no agent", value=target, remedy="write FILE.py:NAME or MODULE:NAME"
        )
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found = getattr(module, name, None)
    if not isinstance(found, Agent):
        agents = [key for key, value in vars(module).items() if isinstance(value, Agent)]
        raise InvalidAgent(
            f"{where} has no agent {name!r}",
            value=type(found).__name__ if hasattr(module, name) else None,
            remedy=f"it has: {', '.join(agents)}" if agents else "define one: Agent(…)",
        )
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidAgent("there is no such file", value=str(path), remedy="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` would find its neighbours
    sys.modules[path.stem] = module  # where pydantic and dataclasses look types up
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another one
        raise InvalidAgent(
            "there is no such module", value=name, remedy="write FILE.py:NAME for a file"
        ) from error


def _model(agent: "Agent[Any, Any]", name: str | None) -> "Model":
    from freetoken_agent.shared_models import shared_model

    chosen = agent.model if name is None else name
    if chosen is None:
        raise InvalidAgent("the agent has no model", value=agent.name, remedy="give --model")
    if not isinstance(chosen, str):
        return chosen
    with progress(f"loading {chosen}"):
        return shared_model(chosen)


async def _go(agent: "Agent[Any, Any]", session: "Session", message: str | None) -> None:
    if message is None or session.begin_run().open_calls():
        pending = await _decided(agent, session, await _show(agent.resume_stream(session), session))
        if pending and message is not None:
            raise RunUnfinished(
                "calls of this session wait for a decision; the message was not added",
                value=", ".join(describe(call) for call in pending),
                remedy="run this on a terminal, or agent.resume(session, decisions)",
            )
    if message is not None:
        waiting = await _show(agent.run_stream(message, session=session), session)
        await _decided(agent, session, waiting)


async def _decided(
    agent: "Agent[Any, Any]", session: "Session", waiting: Sequence["Segment"]
) -> Sequence["Segment"]:
    """Ask until nothing waits, or nobody answers; returns what still waits."""
    while waiting and (decisions := _ask(waiting)):
        waiting = await _show(agent.resume_stream(session, decisions), session)
    return waiting


async def _show(
    stream: "AbstractAsyncContextManager[Run[Any]]", session: "Session"
) -> Sequence["Segment"]:
    """Show a run to its end; returns the calls that wait for a decision."""
    waiting: list[Segment] = []
    view = RunView(session.name)
    lines = wants_json()
    out = console()
    live = nullcontext() if lines else Live(view.tree, console=out)
    async with stream as run:
        with live:
            async for event in run:
                if event.type == "approval_request":
                    waiting.append(event.call)
                if lines:
                    typer.echo(event.model_dump_json())
                else:
                    view.take(event)
    if not lines and not out.is_terminal:
        out.print()  # there, rich leaves the last line open
    return waiting


def _ask(calls: Sequence["Segment"]) -> Decisions:
    """What the user decides about each; nothing where nobody can be asked."""
    if wants_json() or not asks():
        return {}
    decisions: dict[str, bool | str] = {}
    for call in calls:
        answer = typer.prompt(f"{describe(call, _WHOLE)}  allow? [y/n, or why not]").strip()
        yes, no = answer.lower() in ("y", "yes"), answer.lower() in ("n", "no")
        decisions[call.call_id or ""] = yes if yes or no else answer
    return decisions


def asks() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty()

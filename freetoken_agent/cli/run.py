# SPDX-License-Identifier: Apache-2.0
"""`run`: an agent of a Python file, with what each step reused and prefilled.

On a terminal it asks about calls that need approval; elsewhere the run ends there, and the same
command without a message goes on. Without `--session` the conversation is gone afterwards.
"""

import asyncio
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from freetoken_agent.errors import InvalidAgent, RunUnfinished

from .opening import StorePath, opened_store
from .output import Json, console, error_console, progress, wants_json
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log, with tracebacks of tools.")
    ] = False,
    json: Json = False,
) -> None:
    """Run an agent; see its steps, their tokens, its tools and its answer."""
    if message is None and session is None:
        raise typer.BadParameter("give a message, or the --session that is to go on")
    agent = load_agent(target)
    chosen = _model(agent, model)
    out = error_console() if json else console()  # what is live and the log share it
    out.soft_wrap = False  # what is live would be cut
    if session is None:
        from freetoken_agent import Store

        with Store(":memory:") as memory, _log(verbose, out):
            _Command(agent, memory.create(agent.name, chosen), out).run(message)
        return
    with opened_store(store) as opened, _log(verbose, out):
        _Command(agent, opened.create(session, chosen, exist_ok=True), out).run(message)


@contextmanager
def _log(verbose: bool, out: Console) -> Iterator[None]:
    """The log, above what is live; or none, which Python would print by itself."""
    logger = logging.getLogger("freetoken_agent")
    handler: logging.Handler = logging.NullHandler()
    if verbose:
        handler = RichHandler(console=out, show_path=False, show_time=False)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def load_agent(target: str) -> "Agent[Any, Any]":
    """InvalidAgent unless the target names one; what its file raises is shown first."""
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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _unusable(str(path), error) from error
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _unusable(name, error) from error  # it is there, and misses another one
        raise InvalidAgent(
            "there is no such module", value=name, remedy="write FILE.py:NAME for a file"
        ) from error
    except Exception as error:
        raise _unusable(name, error) from error


def _unusable(where: str, error: Exception) -> InvalidAgent:
    """What importing a user's file raised, without the frames of whoever imported it."""
    if not wants_json():
        frames = error.__traceback__
        while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        shown = "".join(traceback.format_exception(error.with_traceback(frames)))
        error_console().print(shown.rstrip(), markup=False)
    said = f"{type(error).__name__}: {error}"
    return InvalidAgent(f"{where} cannot be imported", value=said)


def _is_ours(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")


def _model(agent: "Agent[Any, Any]", name: str | None) -> "Model":
    from freetoken_agent.runs.shared_models import shared_model

    chosen = agent.model if name is None else name
    if chosen is None:
        raise InvalidAgent("the agent has no model", value=agent.name, remedy="give --model")
    if not isinstance(chosen, str):
        return chosen
    with progress(f"loading {chosen}"):
        return shared_model(chosen)


class _Command:
    """One use of the command: an agent, its session, and an event loop that all runs share. It asks
    the user between runs, outside of the loop, which would keep Ctrl-C to itself."""

    def __init__(self, agent: "Agent[Any, Any]", session: "Session", out: Console) -> None:
        self._agent = agent
        self._session = session
        self._out = out

    def run(self, message: str | None) -> None:
        with asyncio.Runner() as self._runner:
            if message is None or self._open_calls():
                pending = self._decided(self._resumed(None))
                if pending and message is not None:
                    raise RunUnfinished(
                        "calls of this session wait for a decision; the message was not added",
                        value=", ".join(describe(call) for call in pending),
                        remedy="run this on a terminal, or agent.resume(session, decisions)",
                    )
            if message is not None:
                stream = self._agent.run_stream(message, session=self._session)
                self._decided(self._shown(stream))

    def _decided(self, waiting: Sequence["Segment"]) -> Sequence["Segment"]:
        """Ask until nothing waits, or nobody answers; returns what still waits."""
        while waiting and (decisions := _ask(waiting)):
            waiting = self._resumed(decisions)
        return waiting

    def _resumed(self, decisions: Decisions | None) -> Sequence["Segment"]:
        return self._shown(self._agent.resume_stream(self._session, decisions))

    def _shown(self, stream: "AbstractAsyncContextManager[Run[Any]]") -> Sequence["Segment"]:
        view = RunView(self._session.name, self._open_calls())
        show = _print_events(stream) if wants_json() else _show(stream, view, self._out)
        return self._runner.run(show)

    def _open_calls(self) -> Sequence["Segment"]:
        return self._session.begin_run().open_calls()


async def _print_events(
    stream: "AbstractAsyncContextManager[Run[Any]]",
) -> Sequence["Segment"]:
    """One JSON object a line; returns the calls that wait for a decision."""
    waiting: list[Segment] = []
    async with stream as run:
        async for event in run:
            typer.echo(event.model_dump_json())
            if event.type == "approval_request":
                waiting.append(event.call)
    return waiting


async def _show(
    stream: "AbstractAsyncContextManager[Run[Any]]", view: RunView, out: Console
) -> Sequence["Segment"]:
    """Show a run to its end; returns the calls that wait for a decision."""
    waiting: list[Segment] = []
    async with stream as run:
        with Live(view, console=out) as live:
            try:
                async for event in run:
                    if event.type == "approval_request":
                        waiting.append(event.call)
                    view.take(event)
            finally:
                view.follows = False
                live.refresh()
    if not out.is_terminal:
        out.print()  # there, rich leaves the last line open
    return waiting


def _ask(calls: Sequence["Segment"]) -> Decisions:
    """What the user decides about each; nothing where nobody can be asked."""
    if wants_json() or not asks():
        return {}
    decisions: dict[str, bool | str] = {}
    for call in calls:
        question = f"{describe(call, _WHOLE)}  allow? [y/n, or why not]"
        try:
            answer = typer.prompt(question).strip()
        except typer.Abort:  # Ctrl-C, or the end of the input: the call goes on waiting
            typer.echo(err=True)
            raise KeyboardInterrupt from None
        yes, no = answer.lower() in ("y", "yes"), answer.lower() in ("n", "no")
        decisions[call.call_id or ""] = yes if yes or no else answer
    return decisions


def asks() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty()

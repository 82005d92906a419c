# SPDX-License-Identifier: Apache-2.0
"""`chat`: a conversation in a store, edited while it goes on.

Lines that begin with `/` are commands, everything else is said to the model. Every reply shows
what was reused and what was prefilled. Leaving at any moment, by a kill too, loses nothing.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from freetoken_agent.errors import InvalidEdit
from freetoken_agent.events import (
    PrefillProgress,
    ReplyFinished,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
)
from freetoken_agent.segments import visible
from freetoken_storage.errors import FreetokenError

from .editor import edit_text
from .opening import ModelName, StorePath, opened_store, pick
from .output import console, progress, show_error
from .views import edit_lines, path_table, plan_line, tree_view, usage_line

if TYPE_CHECKING:
    from freetoken_agent import Session, Usage
    from freetoken_agent.model_calls.generate_options import GenerateKwargs

HELP = """\
/tree                 every branch and earlier version    /show            this branch, numbered
/edit N [text]        replace segment N ($EDITOR without text)
/drop N | thinking    delete a segment, or all thinking
/fork [N] [name]      a new branch at N (or here), and go there      /switch name     go to a branch
/rewind [N]           go back to segment N (without N: one turn)
/undo [n]  /redo [n]  steps of this branch                /plan            price of the next reply
/go                   let the model answer, or continue, here
/help  /quit"""


def chat_command(
    name: Annotated[str, typer.Argument(help="The session; it is made if it does not exist.")],
    system: Annotated[str | None, typer.Option("--system", help="For a new session.")] = None,
    branch: Annotated[str, typer.Option("--branch")] = "main",
    quant: Annotated[Literal["int8", "int4"] | None, typer.Option("--quant")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of one reply.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
    model: ModelName = "smollm2",
    store: StorePath = None,
) -> None:
    """Talk to a model; edit, fork, rewind and undo while you talk."""
    from freetoken_agent import LocalModel
    from freetoken_runtime import EngineConfig

    with opened_store(store) as opened:
        with progress(f"loading {model}"):
            loading = LocalModel.load(model, config=EngineConfig(quant=quant))
        with loading as loaded:
            session = opened.create(name, loaded, system=system, exist_ok=True)
            if branch != "main":
                session = session.open_branch(branch)
            options: GenerateKwargs = {"max_tokens": max_tokens, "temperature": temperature}
            Chat(session, console(), options).run(_lines())


def _lines() -> Iterator[str]:
    """Lines of a terminal (with editing and history where readline exists) or of a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  its import is what gives input() line editing
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("  (/quit leaves)", err=True)


class Chat:
    """The loop over one session. `session` changes when the user forks or switches."""

    def __init__(self, session: "Session", out: Console, options: "GenerateKwargs") -> None:
        self.session = session
        self._out = out
        self._options = options
        self._commands: dict[str, Callable[[str], None]] = {
            "tree": self._tree,
            "show": self._show,
            "edit": self._edit,
            "drop": self._drop,
            "fork": self._fork,
            "switch": self._switch,
            "rewind": self._rewind,
            "undo": self._undo,
            "redo": self._redo,
            "plan": self._plan,
            "go": self._go,
            "help": self._help,
        }

    def run(self, lines: Iterator[str]) -> None:
        """Until the lines end or `/quit`. The project's errors are shown and the loop goes on."""
        path = self.session.path()
        if path:
            self._out.print(path_table(path))
        self._out.print("[dim]/help lists the commands[/]")
        for line in lines:
            if line.strip() == "/quit":
                return
            try:
                self._take(line)
            except FreetokenError as error:
                show_error(error)

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self.session.append("user", line)
            self._reply()
            return
        name, _, rest = line[1:].partition(" ")
        run = self._commands.get(name)
        if run is None:
            raise InvalidEdit(f"there is no command /{name}", remedy="/help lists the commands")
        run(rest.strip())

    def _reply(self) -> None:
        try:
            usage = asyncio.run(self._stream())
        except KeyboardInterrupt:
            self._out.print("\n[dim]stopped; /go continues[/]")
            return
        self._out.print(f"\n[dim]{usage_line(usage)}[/]")

    async def _stream(self) -> "Usage":
        prefilled = False
        with progress("prefill") as bar:
            async with self.session.generate(**self._options) as generation:
                async for event in generation:
                    if isinstance(event, PrefillProgress):
                        bar(event.done_tokens, event.total_tokens)
                    elif isinstance(event, ReplyFinished):
                        return event.reply.usage
                    elif isinstance(event, TextDelta | ThinkingDelta | ToolCallDelta):
                        if not prefilled:
                            prefilled = True
                            bar.close()
                        dim = None if isinstance(event, TextDelta) else "dim"
                        self._out.print(visible(event.text), end="", style=dim, markup=False)
        return generation.reply.usage

    def _tree(self, _: str) -> None:
        self._out.print(tree_view(self.session.tree(), self.session.name))

    def _show(self, _: str) -> None:
        self._out.print(path_table(self.session.path()))

    def _edit(self, rest: str) -> None:
        reference, _, text = rest.partition(" ")
        segment = pick(self.session, reference)
        content = text or edit_text(segment.content)
        if content is None:
            self._out.print("nothing to change")
            return
        self._out.print(edit_lines(self.session.replace(segment, content)))
        self._out.print("[dim]/rewind N drops what follows it, /go answers again[/]")

    def _drop(self, rest: str) -> None:
        if rest == "thinking":
            edit = self.session.drop(kind="thinking")
        else:
            edit = self.session.delete(pick(self.session, rest))
        self._out.print(edit_lines(edit))

    def _fork(self, rest: str) -> None:
        reference, _, name = rest.partition(" ")
        at = pick(self.session, reference) if reference else None
        self.session = self.session.fork(at=at, name=name.strip() or None)
        self._out.print(f"on branch {self.session.branch}", markup=False)

    def _switch(self, rest: str) -> None:
        self.session = self.session.open_branch(rest or "main")
        self._show("")

    def _rewind(self, rest: str) -> None:
        if rest:
            edit = self.session.rewind(to=pick(self.session, rest))
        else:
            edit = self.session.rewind(turns=1)
        self._out.print(edit_lines(edit))

    def _undo(self, rest: str) -> None:
        self._out.print(edit_lines(self.session.undo(_count(rest))))

    def _redo(self, rest: str) -> None:
        self._out.print(edit_lines(self.session.redo(_count(rest))))

    def _plan(self, _: str) -> None:
        self._out.print(plan_line(self.session.plan()))

    def _go(self, _: str) -> None:
        self._reply()

    def _help(self, _: str) -> None:
        self._out.print(HELP, markup=False)


def _count(text: str) -> int:
    if not text:
        return 1
    if not text.isdigit() or int(text) < 1:
        raise InvalidEdit("the number of steps is a positive integer", value=text)
    return int(text)

# SPDX-License-Identifier: Apache-2.0
"""How commands speak: a report as text or as JSON, progress on standard error, errors without
tracebacks.

Standard output carries the report and nothing else, so that `--json` can be piped. A command's
exit status is 0 (done), 1 (a FreetokenError), 2 (wrong usage), 3 (the report itself found a fault:
`doctor`, `verify`, a missed bench target under `--strict`) or 130 (interrupted).
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from freetoken_storage.errors import FreetokenError

EXIT_ERROR = 1
EXIT_FAULT_FOUND = 3
EXIT_INTERRUPTED = 130

_PIPE_COLUMNS = 160
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\ud800-\udfff]")  # what json.dumps leaves as it is

_json: ContextVar[bool] = ContextVar("json", default=False)

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

P = ParamSpec("P")


def command(function: Callable[P, None]) -> Callable[P, None]:
    """A command body whose FreetokenErrors and Ctrl-C become messages and exit codes.

    Any other exception is a fault of ours and keeps its traceback. A parameter called `json` says
    which form reports and errors take.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        token = _json.set(bool(kwargs.get("json")))
        try:
            function(*args, **kwargs)
        except FreetokenError as error:
            show_error(error)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt:
            error_console().print("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            _json.reset(token)

    return run


def console() -> Console:
    """Standard output as it is now (tests and pipes replace it)."""
    return _console(stderr=False)


def error_console() -> Console:
    """Standard error as it is now."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    out = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _PIPE_COLUMNS  # rich assumes 80 and cuts tables
    return out


def emit(report: Any, view: RenderableType | None = None) -> None:
    """Print `report` (dataclasses, pydantic models, plain values) as JSON under `--json`, else
    `view`."""
    if wants_json():
        text = json.dumps(plain(report), indent=2, ensure_ascii=False)
        typer.echo(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
    elif view is not None:
        console().print(view, markup=False)  # names and paths may hold brackets


def wants_json() -> bool:
    return _json.get()


def plain(value: Any) -> Any:
    """`value` as JSON can hold it; a number that is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


@contextmanager
def progress(label: str) -> Iterator["Bar"]:
    """A bar on standard error, drawn only on a terminal and never under `--json`."""
    out = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    quiet = wants_json() or not out.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=out, transient=True, disable=quiet
    ) as shown:
        yield Bar(shown, label)


class Bar:
    """One running task. Callable as `bar(done, total)`, as the SDK's callbacks want it."""

    def __init__(self, shown: Progress, label: str) -> None:
        self._shown = shown
        self._task = shown.add_task(label, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._shown.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take the bar off the terminal before the block ends."""
        self._shown.stop()

    def label(self, text: str) -> None:
        self._shown.update(self._task, description=text)


def show_error(error: FreetokenError) -> None:
    """What, value, limit and remedy on standard error, one line each."""
    fields = {"what": error.what, "value": error.value, "limit": error.limit}
    fields["remedy"] = error.remedy
    if wants_json():
        said = {key: plain_or_text(item) for key, item in fields.items() if item is not None}
        typer.echo(json.dumps({"error": {"code": error.code} | said}), err=True)
        return
    text = Text.assemble(("error", "bold red"), f" [{error.code}] {error.what}")
    for name, style in (("value", ""), ("limit", ""), ("remedy", "green")):
        if (item := fields[name]) is not None:
            text.append(f"\n  {name + ':':<8}{item}", style=style)
    error_console().print(text)


def plain_or_text(value: object) -> object:
    """`value` for JSON, by its text where JSON has no form for it."""
    try:
        return json.loads(json.dumps(plain(value)))
    except TypeError:
        return str(value)

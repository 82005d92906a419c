# SPDX-License-Identifier: Apache-2.0
"""`freetoken-agent`: the commands put together."""

from typing import Annotated

import typer

from . import bench, chat, convert, demo, doctor, models, run, sessions
from .output import command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Agents on a model in your own process, with an editable, durable context.",
)


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"freetoken-agent {version('freetoken-agent')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


app.command("pull")(command(models.pull_command))
app.command("models")(command(models.models_command))
app.command("convert")(command(convert.convert_command))
app.command("chat")(command(chat.chat_command))
app.command("run")(command(run.run_command))
app.add_typer(sessions.app, name="sessions")
app.command("doctor")(command(doctor.doctor_command))
app.add_typer(bench.app, name="bench")
app.command("demo")(command(demo.demo_command))


def main() -> None:
    """The console script."""
    app()

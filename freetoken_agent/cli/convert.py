# SPDX-License-Identifier: Apache-2.0
"""`convert`: a model's weights in the form that the engine uses as it is."""

import json as json_text
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from freetoken_agent.catalog import resolve
from freetoken_agent.errors import TokenizerUnsupported
from freetoken_agent.tokenizers.gguf_tokenizer import from_metadata, read_metadata
from freetoken_agent.tokenizers.hf_tokenizer import TokenizerFiles

from .output import Json, emit, progress


def convert_command(
    source: Annotated[
        str, typer.Argument(help="A pulled name, a Hugging Face folder, or a .gguf file.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write. It appears when whole.")],
    quant: Annotated[
        Literal["none", "int8", "int4"],
        typer.Option("--quant", help="Of linear layers. `none` keeps every bit."),
    ] = "none",
    json: Json = False,
) -> None:
    """Convert a model once, so that it loads without work. Interrupted, it goes on when run
    again."""
    path = resolve(source)
    notes: list[str] = []
    files = None
    if path.is_file():
        try:
            files = folder_files(from_metadata(read_metadata(path)))
        except TokenizerUnsupported as error:
            files = {}
            notes.append(f"the tokenizer was left out: {error.what}")
    from freetoken_runtime.conversion import convert  # torch loads here

    started = time.perf_counter()
    with progress(f"converting {path.name}") as bar:
        made = convert(
            path,
            target.expanduser(),
            quant=None if quant == "none" else quant,
            files=files,
            on_progress=bar,
        )
    seconds = time.perf_counter() - started
    notes += made.notes
    report = {
        "source": path,
        "folder": made.folder,
        "quant": made.quant or "none",
        "digest": made.digest,
        "size_bytes": made.size_bytes,
        "records": made.records,
        "shards": made.shards,
        "resumed_records": made.resumed,
        "seconds": seconds,
        "notes": notes,
    }
    lines = [
        f"{made.folder}: {made.size_bytes / 2**20:,.0f} MiB, {made.quant or 'not quantised'}, "
        f"{made.records:,} records in {made.shards} shards, {seconds:.1f} s",
        *([f"{made.resumed:,} records were there already"] if made.resumed else []),
        *(f"note: {note}" for note in notes),
    ]
    emit(report, "\n".join(lines))


def folder_files(tokenizer: TokenizerFiles) -> dict[str, bytes]:
    """A tokenizer as the files of a Hugging Face folder."""
    config: dict[str, object] = dict(tokenizer.special_tokens)
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    files: dict[str, object] = {
        "tokenizer.json": tokenizer.definition,
        "tokenizer_config.json": config,
    }
    if tokenizer.stop_tokens:
        files["generation_config.json"] = {"eos_token_id": list(tokenizer.stop_tokens)}
    return {
        name: json_text.dumps(content, ensure_ascii=False).encode()
        for name, content in files.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""Opening what a command works on: a store, a model, a session, and the segment that is meant."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freetoken_agent.catalog import home
from freetoken_agent.errors import SegmentNotFound
from freetoken_storage.errors import StoreReadOnly

from .output import progress

if TYPE_CHECKING:
    from freetoken_agent import Segment, Session, Store

StorePath = Annotated[
    Path | None,
    typer.Option("--store", envvar="FREETOKEN_STORE", help="The store's folder."),
]
ModelName = Annotated[
    str,
    typer.Option("--model", help="A pulled name, a Hugging Face folder, or a .gguf file."),
]
Branch = Annotated[str, typer.Option("--branch", help="The branch to work on.")]


def store_path(chosen: Path | None) -> Path:
    """The folder a command works on."""
    return chosen or home() / "store"


@contextmanager
def opened_store(chosen: Path | None) -> Iterator["Store"]:
    """The store, made on first use."""
    from freetoken_agent import Store

    path = store_path(chosen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreReadOnly(
            "the store's folder cannot be made",
            value=str(path),
            limit=error.strerror,
            remedy="set FREETOKEN_HOME, or give --store",
        ) from error
    with Store(path) as store:
        yield store


@contextmanager
def opened_session(
    name: str, chosen: Path | None, branch: str, model: str | None, *, weights: bool = False
) -> Iterator["Session"]:
    """`model` None opens read-only. Without `weights` only the tokenizer and template are loaded,
    which is quick: an edit makes ids, it does not forward them. Prices need the weights."""
    from freetoken_agent import LocalModel

    with opened_store(chosen) as store:
        if model is None:
            yield store.open(name, branch=branch)
            return
        with progress(f"loading {model}"):
            loading = LocalModel.load(model, weights=weights)
        with loading as loaded:
            yield store.open(name, loaded, branch=branch)


def pick(session: "Session", reference: str) -> "Segment":
    """The segment of the path that `reference` means: its number in `show`, or its id or the
    beginning of it. An id that is not on the path is left to the session's own error."""
    path = session.path()
    if reference.isdigit() and 1 <= int(reference) <= len(path):
        return path[int(reference) - 1]
    found = [segment for segment in path if segment.id.startswith(reference)] if reference else []
    if len(found) == 1 or (found and found[0].id == reference):
        return found[0]
    raise SegmentNotFound(
        f"{len(found)} segments of this path begin with it" if found else "no such segment here",
        segment=reference,
        reason="unknown",
        remedy=f"give a number from 1 to {len(path)}, or an id as `sessions show` lists them",
    )

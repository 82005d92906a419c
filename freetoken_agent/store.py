# SPDX-License-Identifier: Apache-2.0
"""Store: creates, opens, lists and deletes sessions in a folder, or in memory."""

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio.to_thread

from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import (
    SessionConflict,
    SessionExists,
    SessionNotFound,
    StoreMismatch,
)

from .branches import codec, edits, freeing
from .branches.binding import bind, layout_of, new_session
from .branches.branch import Branch
from .branches.codec import Initial, SessionBody
from .branches.handle import BusyBranches, Context
from .branches.path import Path
from .chat_templates.items import Options
from .chat_templates.layout import Layout
from .errors import InvalidEdit
from .model import Model
from .model_calls.generate_options import UnknownOption
from .segments import Content, SessionInfo, as_text
from .session import Session
from .tooling.json_values import plain
from .tooling.tool_schemas import ToolLike, tools_text

MEMORY = ":memory:"
MAIN = "main"

SessionInfos = list[SessionInfo]  # inside the class, `list` is a method

_log = logging.getLogger(__name__)


class Store:
    """Sessions and the states of their model, in a folder or in memory. Thread-safe; a context
    manager. Closing it invalidates its sessions.

    The first model that creates or opens a session is attached: its states are kept in the folder
    from then on, until the store is closed. A store in memory attaches none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        disk_budget_bytes: int | None = None,
    ) -> None:
        """Opens or creates the folder; `":memory:"` keeps everything in this object. The errors are
        those of `freetoken_storage.Database`."""
        self._in_memory = str(path) == MEMORY
        self._read_only = read_only
        if self._in_memory:
            self._database: Database | MemoryDatabase = MemoryDatabase()
        else:
            self._database = Database(
                path, read_only=read_only, disk_budget_bytes=disk_budget_bytes
            )
        self._lock = threading.Lock()
        self._busy = BusyBranches()
        self._models: list[Model] = []  # that opened a session here, in order
        self._owner = f"{uuid.uuid4().hex}/" if self._in_memory else ""

    @property
    def notices(self) -> list[str]:
        """What was repaired or given up since the store was opened, as sentences."""
        return list(self._database.notices)

    @property
    def models(self) -> tuple[Model, ...]:
        """The models that opened sessions here; a folder store has at most one."""
        with self._lock:
            return tuple(self._models)

    def create(
        self,
        name: str,
        model: Model,
        *,
        system: Content | None = None,
        tools: Sequence[ToolLike] = (),
        meta: Mapping[str, Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        history_thinking: Literal["keep", "template"] = "keep",
        exist_ok: bool = False,
    ) -> Session:
        """A new session with this preamble. Its clock and `template_options` are fixed now, so that
        reopening it changes no id. With `exist_ok` a session of that name is opened as it is.

        SessionExists, InvalidName, InvalidEdit, StoreMismatch, TemplateUnsupported; UnknownOption
        for a template option that the template does not read.
        """
        if history_thinking not in ("keep", "template"):
            raise InvalidEdit("history_thinking must be keep or template", value=history_thinking)
        if exist_ok:
            with suppress(SessionNotFound):
                return self.open(name, model)
        variables = plain(template_options or {})
        for unknown in variables.keys() - model.format.variables:
            raise UnknownOption(
                f"the chat template does not read {unknown!r}",
                value=variables[unknown],
                remedy=f"use one of {', '.join(sorted(model.format.variables)) or 'none'}",
            )
        initial = Initial(None if system is None else as_text(system), tools_text(tools))
        body = new_session(
            model,
            options=Options(variables=variables, now_s=time.time()),
            history_thinking=history_thinking,
            meta=plain(meta or {}),
            initial=initial,
        )
        path = _preamble(layout_of(body, model), initial)
        try:
            return self.create_with(name, model, body, path)
        except SessionExists:
            if exist_ok:  # another thread or process was faster
                return self.open(name, model)
            raise

    def create_with(self, name: str, model: Model, body: SessionBody, path: Path) -> Session:
        """A new session that holds `path` from the start. No undo step."""
        self._attach(model)
        self._database.sessions.create(name, codec.pack_session(body))
        context = self._context(name, body, model)
        branch = Branch.load(self._database.sessions, name, MAIN, context.bodies)
        _settle(branch, body, path)
        return Session(context, branch)

    def open(self, name: str, model: Model | None = None, *, branch: str = MAIN) -> Session:
        """A handle on a branch of a stored session; without a model it is read-only, also if the
        model's tokenizer or template differ (`Session.binding` says so).

        SessionNotFound, BranchNotFound, StoreMismatch, StoreNewer, StoreDamaged.
        """
        record = self._database.sessions.get(name)
        body = codec.unpack_session(record.body)
        if model is not None:
            self._attach(model)
        context = self._context(name, body, model)
        if context.binding.state == "cold":
            _log.info("session %s: %s", name, context.binding.reason)
        main = Branch.load(self._database.sessions, name, MAIN, context.bodies)
        if body.initial is not None and context.layout is not None and main.version == 0:
            # Its creator was stopped between two commits.
            _settle(main, body, _preamble(context.layout, body.initial))
        if branch == MAIN:
            opened = Session(context, main)
        else:
            found = Branch.load(self._database.sessions, name, branch, context.bodies)
            opened = Session(context, found)
        opened.restore_pins()
        return opened

    def list(self, prefix: str = "") -> SessionInfos:
        """The sessions whose name starts with `prefix`, by name."""
        found = []
        for record in self._database.sessions.list(prefix):
            body = codec.unpack_session(record.body)
            branches = self._database.sessions.branches(record.name)
            found.append(
                SessionInfo(
                    name=record.name,
                    created_s=record.created_s,
                    updated_s=record.updated_s,
                    branches=tuple(branch.name for branch in branches),
                    model=body.model,
                    meta=dict(body.meta),
                )
            )
        return found

    def delete(self, name: str) -> None:
        """Remove a session with all its branches, and free the states that only it could use.
        SessionNotFound, SessionBusy."""
        self._database.sessions.get(name)
        self._busy.check(name)
        exclusive = freeing.exclusive_paths(self._database.sessions, name)
        self._database.sessions.delete(name)
        freeing.forget(self.models, exclusive)

    async def flush(self) -> None:
        """Return when the states of every head are on disk, as far as they were computed."""
        for model in self.models:
            await anyio.to_thread.run_sync(model.flush)

    def close(self) -> None:
        """Let the model finish its writes, and close. Closing twice is allowed."""
        with self._lock:
            if not self._in_memory:
                for model in self._models:
                    model.detach()
            self._models = []
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _attach(self, model: Model) -> None:
        with self._lock:
            if any(known is model for known in self._models):
                return
            if not self._in_memory:
                if self._models:
                    raise StoreMismatch(
                        "the store keeps the states of another model",
                        value=model.name,
                        limit=self._models[0].name,
                        remedy="close the store first, or use another folder",
                    )
                model.attach(self._database.snapshots)
                if not self._read_only:
                    freeing.remember(self._database, model)
            self._models.append(model)

    def _context(self, name: str, body: SessionBody, model: Model | None) -> Context:
        binding = bind(body, model)
        writable = model is not None and binding.state != "read_only"
        return Context(
            store=self,
            backing=self._database,
            name=name,
            body=body,
            binding=binding,
            model=model,
            layout=layout_of(body, model) if model is not None and writable else None,
            busy=self._busy,
            owner=f"{self._owner}{name}",
        )


def _preamble(layout: Layout, initial: Initial) -> Path:
    path = edits.set_preamble(layout, Path(), "system", initial.system)
    return edits.set_preamble(layout, path, "tools", initial.tools)


def _settle(branch: Branch, body: SessionBody, path: Path) -> None:
    """Commit what a session starts with; it is no longer waiting for its preamble. Whoever opens
    it meanwhile does the same, so losing that race is fine."""
    record = codec.pack_session(codec.started(body))
    try:
        if branch.version:
            raise SessionConflict("the session has begun already", value=branch.version)
        branch.commit(path, "create", logged=False, session_body=record)
    except SessionConflict:
        if body.initial is None:  # a copy: nobody else could have written its contents
            raise
        branch.reload()

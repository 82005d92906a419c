# SPDX-License-Identifier: Apache-2.0
"""The context rules of a run: each in turn, on what the ones before it left, as part of the run's
undo step."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import events
from ..agent import Agent
from ..context_rules import ContextRule, Proposal, Written
from ..segments import Edit, Usage
from ..tracing import RunTrace
from .blocking import in_thread
from .hooks import call_hook
from .run_context import RunContext
from .run_writer import RunWriter

if TYPE_CHECKING:
    from ..session import Session

_log = logging.getLogger(__name__)


class RuleStage:
    """`run` before each model call; `on_usage` hears of the model calls that rules made."""

    def __init__(
        self, agent: Agent[Any, Any], trace: RunTrace, on_usage: Callable[[Usage], None]
    ) -> None:
        self._agent = agent
        self._trace = trace
        self._on_usage = on_usage
        self._task: asyncio.Task[Written] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Change nothing more; a model call of a rule ends. Any thread."""
        self._cancelled = True
        task, loop = self._task, self._loop
        if task is not None and loop is not None:
            loop.call_soon_threadsafe(task.cancel)

    async def run(
        self,
        writer: RunWriter,
        context: RunContext[Any],
        place: events.Place,
        thinking: bool | None,
    ) -> AsyncGenerator[events.RunEvent, None]:
        """Make every edit that is due. `thinking`: as the model call will ask."""
        session = context.session
        for rule in self._agent.context_rules:
            proposal = await in_thread(partial(rule.propose, session, thinking=thinking))
            if proposal is None or not proposal.due:
                continue
            if await call_hook(self._agent.hooks.before_edit, context, proposal) is False:
                continue
            with self._trace.edit(rule.name) as made:
                written = await self._written(rule, session, proposal)
                if self._cancelled:
                    return
                if not written.changes:
                    continue
                change = partial(writer.apply_changes, written.changes, thinking=thinking)
                edit = await in_thread(change)
                made(edit)
            _log.info("the context was edited by %s: %s", rule.name, _summary(proposal, edit))
            await call_hook(self._agent.hooks.on_edit, context, edit)
            yield events.ContextEdited(**place, reason=rule.name, edit=edit)

    async def _written(self, rule: ContextRule, session: "Session", proposal: Proposal) -> Written:
        """In a task of its own, which `cancel` ends."""

        async def write() -> Written:
            if proposal.writing is None:
                return await rule.write(session, proposal.changes)
            with self._trace.rule_call() as used:
                written = await rule.write(session, proposal.changes)
                if written.usage is not None:
                    used(written.usage)
            return written

        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(write())
        try:
            written = await self._task
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return Written(())
        finally:
            self._task = None
        if written.usage is not None:
            self._on_usage(written.usage)
        return written


def _summary(proposal: Proposal, edit: Edit) -> str:
    saved = proposal.before.input_tokens - edit.plan.input_tokens
    return f"{saved} tokens shorter, {edit.plan.prefill_tokens} to prefill"

# SPDX-License-Identifier: Apache-2.0
"""One model call on a session: ids in, durable segments and events out.

`ModelStep` is the synchronous core; whoever calls `advance` lends it a thread. `Generation` runs it
off the event loop; `generate_sync` runs it in the caller's thread and needs no loop, so it also
works where one is already running.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import anyio

from freetoken_storage.errors import FreetokenError

from .events import GenerationEvent, PrefillProgress
from .generate_options import GenerateKwargs, GenerateOptions
from .model_step import ModelStep, usage_of
from .segments import Reply, Usage

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Generation", "GenerationUnfinished", "Reply", "generate_sync", "reply", "warm"]

_log = logging.getLogger(__name__)


class GenerationUnfinished(FreetokenError):
    """The reply was asked for before the generation ended."""

    code = "generation_unfinished"


class Generation:
    """The events of one model call. Nothing happens before the first pull; afterwards the model
    runs at most a few tokens ahead of the reader.

    Use it as `async with s.generate() as generation: async for event in generation: …`. Leaving
    early, by `break`, an error or a cancelled task, keeps what was read so far and releases the
    branch; without `async with` that happens when the last reference goes. It belongs to one task;
    only `cancel` may be called from elsewhere.
    """

    def __init__(self, session: "Session", **options: Unpack[GenerateKwargs]) -> None:
        self._step = ModelStep(session, GenerateOptions.parse(options))
        self._mailbox = _Mailbox()
        self._executor: ThreadPoolExecutor | None = None
        self._work: asyncio.Future[list[GenerationEvent]] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        while not self._mailbox.events:
            if self._work is None and self._step.finished:
                self._release_thread()
                raise StopAsyncIteration
            await self._pull()
        return self._mailbox.events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            await self._abandon()

    @property
    def reply(self) -> Reply:
        """What was written. GenerationUnfinished before the end."""
        if self._step.reply is None:
            raise GenerationUnfinished(
                "the generation has not ended", remedy="pull its events to the end, or leave it"
            )
        return self._step.reply

    def cancel(self) -> None:
        """Stop between two tokens; the events of what was written still come. Thread-safe."""
        self._step.cancel()

    async def aclose(self) -> None:
        """Stop, keep what was read, and release the branch. Does nothing the second time."""
        self._step.cancel()
        with anyio.CancelScope(shield=True):
            if self._work is not None:
                await asyncio.wait([self._work])
                if not self._work.cancelled():
                    self._work.exception()  # its pull was given up: nobody else will look
                self._work = None
            if not self._step.finished:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread(), self._step.close)
        self._release_thread()

    async def _pull(self) -> None:
        """Wait for progress, or for the next batch of events."""
        mailbox, loop = self._mailbox, asyncio.get_running_loop()
        if self._work is None:
            self._step.on_progress = mailbox.progress_into(loop)
            self._work = loop.run_in_executor(self._thread(), self._step.advance)
            self._work.add_done_callback(mailbox.wake)
        try:
            await mailbox.changed.wait()
        except asyncio.CancelledError:
            await self._abandon()
            raise
        mailbox.changed.clear()
        if self._work.done():
            work, self._work = self._work, None
            mailbox.events.extend(work.result())

    async def _abandon(self) -> None:
        """Close behind an error that matters more than what closing may raise."""
        try:
            await self.aclose()
        except FreetokenError as fault:
            _log.warning("a generation that was left could not be closed: %s", fault)

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="generation")
        return self._executor

    def _release_thread(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def __del__(self) -> None:
        step = getattr(self, "_step", None)
        if step is None or step.finished or not step.started:
            return
        step.cancel()
        try:
            if self._work is None or self._executor is None or not _submit(self._executor, step):
                step.close()
        except FreetokenError as error:
            _log.warning("a generation that was left could not be closed: %s", error)
        self._release_thread()


def _submit(executor: ThreadPoolExecutor, step: ModelStep) -> bool:
    """Close the step behind what its thread is doing; False when the interpreter is ending."""
    try:
        executor.submit(step.close)
    except RuntimeError:
        return False
    return True


class _Mailbox:
    """Where pulls and the engine's progress meet. Touched in the loop's thread only; it holds no
    reference to the generation, so that a generation that was left is closed at once."""

    def __init__(self) -> None:
        self.events: deque[GenerationEvent] = deque()
        self.changed = asyncio.Event()

    def wake(self, _: object) -> None:
        self.changed.set()

    def put(self, event: GenerationEvent) -> None:
        self.events.append(event)
        self.changed.set()

    def progress_into(self, loop: asyncio.AbstractEventLoop) -> Callable[[PrefillProgress], None]:
        """A callback for the engine's thread."""

        def report(event: PrefillProgress) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody is reading any more
                loop.call_soon_threadsafe(self.put, event)

        return report


async def reply(session: "Session", **options: Unpack[GenerateKwargs]) -> Reply:
    """Generate to the end."""
    async with Generation(session, **options) as generation:
        async for _ in generation:
            pass
        return generation.reply


def generate_sync(session: "Session", **options: Unpack[GenerateKwargs]) -> Reply:
    """Generate to the end in this thread. It needs no event loop and may run inside one, which it
    blocks."""
    step = ModelStep(session, GenerateOptions.parse(options))
    try:
        while not step.finished:
            step.advance()
    finally:
        step.close()
    assert step.reply is not None, "a finished step has a reply or has raised"
    return step.reply


async def warm(session: "Session") -> Usage:
    """Forward the head's path where its state is missing, the last row included. It prices what a
    plan at a closed head says, and costs nothing the second time."""
    model = session.model
    ids = session.ids()
    ends = list(accumulate(s.frame_tokens + s.num_tokens for s in session.path()))
    usage = await anyio.to_thread.run_sync(lambda: model.warm(ids, anchors=ends))
    return usage_of(usage)

# SPDX-License-Identifier: Apache-2.0
"""One model call on a session: ids in, durable segments and events out.

`ModelStep` is the synchronous core; whoever calls `advance` lends it a thread. `Generation` runs it
off the event loop; `generate_sync` runs it in the caller's thread and needs no loop, so it also
works where one is already running.
"""

import asyncio
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import anyio

from freetoken_storage.errors import FreetokenError

from .events import GenerationEvent
from .model_calls.generate_options import GenerateKwargs, GenerateOptions
from .model_calls.model_step import ModelStep
from .segments import Reply

if TYPE_CHECKING:
    from .session import Session

__all__ = [
    "Generation",
    "GenerationInUse",
    "GenerationUnfinished",
    "Reply",
    "generate_sync",
    "reply",
]

_log = logging.getLogger(__name__)
_FIRST_LOOK_S = 0.005  # how soon a reader looks at the prompt's progress; then twice as long, up to
_LOOK_EVERY_S = 0.1


class GenerationUnfinished(FreetokenError):
    """The reply was asked for before the generation ended."""

    code = "generation_unfinished"


class GenerationInUse(FreetokenError):
    """A generation was pulled by two tasks at once, or from two event loops."""

    code = "generation_in_use"


class Generation:
    """The events of one model call. Nothing happens before the first pull; afterwards the model
    runs at most a few tokens ahead of the reader.

    Use it as `async with s.generate() as generation: async for event in generation: …`. Leaving
    early, by `break`, an error or a cancelled task, keeps what was read so far and releases the
    branch; without `async with` that happens when the last reference goes. One task pulls it
    (GenerationInUse), in one event loop; `cancel` may be called from any thread, `aclose` in any
    loop. Closed before the first pull it never begins.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._events: deque[GenerationEvent] = deque()
        self._bell: _Bell | None = None  # since the first pull
        self._executor: ThreadPoolExecutor | None = None
        self._work: Future[list[GenerationEvent]] | None = None
        self._closing: Future[None] | None = None
        self._pulled = False  # a task waits for events
        self._patience_s = _FIRST_LOOK_S

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        while not self._events:
            if self._work is None and self._step.finished:
                self._release_thread()
                raise StopAsyncIteration
            await self._pull(await self._enter())
        return self._events.popleft()

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
            if self._step.finished:
                raise GenerationUnfinished(
                    "the generation ended without a reply", remedy="generate again"
                )
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
        if self._closing is None:
            if self._work is None and not self._step.started:
                self._step.close()
            if self._work is None and self._step.finished:
                self._release_thread()
                return
            self._closing = self._thread().submit(self._step.close)  # behind what it is doing
            self._release_thread()
        elif self._closing.done():
            return
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.shield(asyncio.wrap_future(self._closing))
        finally:
            self._work = None  # its pull was given up: nobody will look

    async def _enter(self) -> "_Bell":
        """Begin a pull. GenerationInUse unless it is the only one, in the loop of the first."""
        loop, bell = asyncio.get_running_loop(), self._bell
        if bell is None:
            bell = self._bell = _Bell(loop)
        if bell.loop is loop and not self._pulled:
            return bell
        if bell.loop is loop:
            raise GenerationInUse(
                "two tasks pull one generation", remedy="pull it in one task and share its events"
            )
        if not bell.loop.is_closed():
            raise GenerationInUse(
                "the generation was begun in another event loop",
                remedy="pull it there, or aclose() it here and generate again",
            )
        await self._abandon()  # nobody can pull it any more
        raise GenerationInUse(
            "the generation was begun in an event loop that has been closed; it was ended, "
            "and what had been read is kept",
            remedy="generate again, and pull within one asyncio.run()",
        )

    async def _pull(self, bell: "_Bell") -> None:
        """Wait for progress, or for the next batch of events."""
        if self._work is None:
            self._patience_s = _FIRST_LOOK_S
            self._work = self._thread().submit(self._step.advance)
            self._work.add_done_callback(bell.ring)
        look = None
        if not self._step.prompt_done:
            look = bell.loop.call_later(self._patience_s, bell.rung.set)
            self._patience_s = min(2 * self._patience_s, _LOOK_EVERY_S)
        self._pulled = True
        try:
            await bell.rung.wait()
        except asyncio.CancelledError:
            await self._abandon()
            raise
        finally:
            self._pulled = False
            if look is not None:
                look.cancel()
        bell.rung.clear()
        work = self._work
        done = work is not None and work.done()  # before the progress that precedes its events
        progress = self._step.prefilled()
        if progress is not None:
            self._events.append(progress)
        if work is not None and done:
            self._work = None
            self._events.extend(work.result())

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
        if step is None or step.finished or self._closing is not None:
            return
        if self._work is None and not step.started:
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


class _Bell:
    """Wakes the pulling task, from any thread. It holds no reference to the generation, so that a
    generation that was left is closed at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.rung = asyncio.Event()

    def ring(self, _: object = None) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody is reading any more
            self.loop.call_soon_threadsafe(self.rung.set)


async def reply(session: "Session", **options: Unpack[GenerateKwargs]) -> Reply:
    """Generate to the end."""
    async with session.generate(**options) as generation:
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

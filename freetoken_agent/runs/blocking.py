# SPDX-License-Identifier: Apache-2.0
"""Between event loops and code that blocks: how each waits for the other."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What blocking work returns; the event loop goes on meanwhile. It is waited for even when the
    task is cancelled."""
    running = asyncio.ensure_future(anyio.to_thread.run_sync(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # A shielded scope of anyio does not hold back `Task.cancel`, which may come again.
        with anyio.CancelScope(shield=True):
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # the cancel matters more; this keeps asyncio from reporting it
        raise


def wait_for(make: Callable[[], Awaitable[T]]) -> T:
    """The result of a coroutine, for plain code: in an event loop of its own, which gets a thread
    where this one runs a loop already. A KeyboardInterrupt cancels it."""

    async def main() -> T:
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with anyio.from_thread.start_blocking_portal() as portal:
        return portal.call(main)

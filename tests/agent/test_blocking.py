# SPDX-License-Identifier: Apache-2.0
"""Waiting between event loops and blocking work."""

import asyncio
import threading

import anyio
import pytest

from freetoken_agent.runs.blocking import in_thread, wait_for


async def test_a_cancelled_task_waits_for_work_that_has_begun() -> None:
    """Oracle: the work's own flag, when the task has ended; the cancel comes twice."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[bool] = []

    def work() -> None:
        begun.set()
        go_on.wait(30)
        done.append(True)

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_a_scope_of_anyio_that_is_cancelled_waits_too() -> None:
    """Oracle: the same flag, behind the scope."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[bool] = []

    def work() -> None:
        begun.set()
        go_on.wait(30)
        done.append(True)

    async def cancel(scope: anyio.CancelScope) -> None:
        await asyncio.to_thread(begun.wait)
        scope.cancel()
        asyncio.get_running_loop().call_later(0.01, go_on.set)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(cancel, scope)
            await in_thread(work)
    assert scope.cancelled_caught and done == [True]


async def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    """Oracle: the error itself."""
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


def test_plain_code_waits_for_a_coroutine_in_and_outside_of_a_loop() -> None:
    """Oracle: its value."""

    async def value() -> int:
        await asyncio.sleep(0)
        return 5

    async def inside() -> int:
        return wait_for(value)

    assert wait_for(value) == 5
    assert asyncio.run(inside()) == 5

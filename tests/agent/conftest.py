# SPDX-License-Identifier: Apache-2.0
"""Sessions on scripted models, in memory."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from freetoken_agent import Agent, Result, Session, Store
from freetoken_agent.testing import ScriptedModel

WAYS = ("run", "run_sync", "run_stream")


@pytest.fixture
def memory_store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def begin(memory_store: Store) -> Callable[..., Session]:
    """`begin(*script, **model options)`: a session that waits for its first reply."""

    def begin(*script: object, **options: object) -> Session:
        model = ScriptedModel(script, **options)  # type: ignore[arg-type]
        session = memory_store.create("s", model, system="You are helpful.")
        session.append("user", "Hi")
        return session

    return begin


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each way to run an agent."""
    return str(request.param)


@pytest.fixture
def play(way: str) -> Callable[..., Result[Any]]:
    """`play(agent, content, **options)`: its result, the way of this test."""

    async def streamed(agent: Agent[Any, Any], *content: Any, **options: Any) -> Result[Any]:
        async with agent.run_stream(*content, **options) as run:
            async for _ in run:
                pass
            return run.result

    def play(agent: Agent[Any, Any], *content: Any, **options: Any) -> Result[Any]:
        if way == "run_sync":
            return agent.run_sync(*content, **options)
        if way == "run":
            return asyncio.run(agent.run(*content, **options))
        return asyncio.run(streamed(agent, *content, **options))

    return play


@pytest.fixture(scope="session")
def check_pairs() -> Callable[[Session], None]:
    """`check_pairs(session)`: each result answers one call before it, in the order of the calls,
    and nothing follows a call that has none."""
    return _check_pairs


def _check_pairs(session: Session) -> None:
    opened: list[str | None] = []
    before = ""
    complete = True  # an undo may take an earlier call's result back while a later one comes
    for segment in session.path():
        if segment.kind == "tool_result":
            assert segment.call_id in opened
            skipped = opened.index(segment.call_id)
            complete = complete and skipped == 0
            del opened[: skipped + 1]
        else:
            assert complete, f"{segment.kind} follows an open call"
            parallel = segment.kind == "tool_call" and before == "tool_call"
            assert parallel or not opened, f"{segment.kind} follows an open call"
            if segment.kind == "tool_call":
                opened.append(segment.call_id)
        before = segment.kind

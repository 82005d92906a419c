# SPDX-License-Identifier: Apache-2.0
"""Event classes: what the API promises of each."""

from collections.abc import Callable

import pytest
from pydantic import TypeAdapter, ValidationError

from freetoken_agent import Session, events
from freetoken_agent.events import GenerationEvent
from freetoken_agent.testing import Call, Think

EVENT: TypeAdapter[GenerationEvent] = TypeAdapter(GenerationEvent)


async def test_events_survive_json(begin: Callable[..., Session]) -> None:
    """Oracle: the events themselves, after a round trip through JSON by their `type`."""
    session = begin([Think("hm"), "so", Call("ls", {"p": [1, None, "é"]})])
    made = [event async for event in session.generate()]
    kinds = {type(event) for event in made}
    assert kinds == {
        events.PlanReady,
        events.PrefillProgress,
        events.ThinkingDelta,
        events.TextDelta,
        events.ToolCallStarted,
        events.ToolCallDelta,
        events.ToolCallReady,
        events.SegmentFinished,
        events.ReplyFinished,
    }
    for event in made:
        assert EVENT.validate_json(event.model_dump_json()) == event


async def test_events_are_frozen_and_say_where(begin: Callable[..., Session]) -> None:
    """Oracle: API.md: each event has type, session, branch and step."""
    session = begin("a").fork(name="other")
    async for event in session.generate():
        assert (event.session, event.branch, event.step) == ("s", "other", 0)
        assert event.type == EVENT.dump_python(event)["type"]
        with pytest.raises(ValidationError):
            event.branch = "main"

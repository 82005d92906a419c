# SPDX-License-Identifier: Apache-2.0
"""Options of `generate`: unknown, unsupported and out-of-range values are errors that name them."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from freetoken_agent import Session
from freetoken_agent.model import InvalidSampling, SamplingOptions
from freetoken_agent.model_calls.generate_options import (
    GenerateKwargs,
    UnknownOption,
)


@pytest.mark.parametrize("method", ["generate", "generate_sync", "plan"])
def test_an_unknown_option_is_named(begin: Callable[..., Session], method: str) -> None:
    """Oracle: the documented error; nothing was asked of the model and the session goes on."""
    session = begin("ok")
    with pytest.raises(UnknownOption, match="no option 'max_token'") as caught:
        getattr(session, method)(max_token=3)
    assert caught.value.code == "unknown_option"
    assert "max_tokens" in str(caught.value)
    assert session.generate_sync().text == "ok"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", "x"),
        ("frequency_penalty", 2.1),
        ("seed", -(1 << 63) - 1),
        ("seed", 0.5),
        ("seed", 1 << 63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("force", "abc"),
        ("force", [-1]),
        ("force", [1.0]),
        ("thinking", "yes"),
        ("tool_choice", ""),
        ("tool_choice", None),
        ("allowed_tools", "ls"),
        ("allowed_tools", [1]),
        ("parallel_tool_calls", 1),
        ("output_schema", "object"),
    ],
)
def test_a_value_out_of_range_is_named(
    begin: Callable[..., Session], name: str, value: object
) -> None:
    """Oracle: the documented error with name and value; the session goes on."""
    session = begin("ok")
    options: Any = {name: value}
    with pytest.raises(InvalidSampling, match=name) as caught:
        session.generate_sync(**options)
    assert caught.value.code == "invalid_sampling"
    assert value is None or repr(value) in str(caught.value)
    assert session.generate_sync().text == "ok"


def test_valid_values_reach_the_model(begin: Callable[..., Session]) -> None:
    """Oracle: the values given, in the request that the model recorded."""
    session = begin("ok")
    session.generate_sync(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, force=[1, 2],
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.2, stop="x",
    )  # fmt: skip
    [request] = session.model.requests  # type: ignore[attr-defined]
    assert request.sampling == SamplingOptions(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, force=(1, 2),
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.2,
        stop_ids=frozenset({256, 258}),
    )  # fmt: skip


def test_every_sampling_option_is_checked_or_inner() -> None:
    """Oracle: the fields of SamplingOptions: a new one must become an option or be listed here."""
    inner = {"stop_ids", "logprobs", "constraint"}
    assert {f.name for f in fields(SamplingOptions)} - inner <= set(GenerateKwargs.__annotations__)


def test_the_entry_points_take_the_same_options() -> None:
    """Oracle: their signatures."""
    for name in ("generate", "reply", "generate_sync", "plan"):
        [_, options] = inspect.signature(getattr(Session, name)).parameters.values()
        assert options.kind is inspect.Parameter.VAR_KEYWORD

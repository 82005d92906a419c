# SPDX-License-Identifier: Apache-2.0
"""The options of `generate`: names, ranges, and which of them can be honoured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from freetoken_storage.errors import FreetokenError

from ..model import InvalidSampling, SamplingOptions


class UnknownOption(FreetokenError):
    """An option that no generation has; the message names it."""

    code = "unknown_option"


class OptionUnsupported(FreetokenError):
    """An option that exists but cannot be honoured here. It is refused, never ignored."""

    code = "option_unsupported"


class GenerateKwargs(TypedDict, total=False):
    """Keyword arguments of `generate`, `reply`, `generate_sync` and `plan`.

    `thinking`: True or False asks the template for it, None leaves it to the template. `stop`:
    texts that end the answer once it contains one; they stay in the stored text, since sampled ids
    are kept as sampled. `force`: ids fed as if they had been sampled, then sampling goes on.

    `tool_choice`: "auto", "none", "required", or the name of the tool that must be called.
    `allowed_tools`: names of those that may be; None allows all of the path's.
    `parallel_tool_calls`: False holds the model to one call; so does a chat template that has no
    place for a second one, and then `Reply.parallel_tool_calls` is False. `output_schema`: a
    JSON schema; the answer, if the model calls no tool, is one value that fits it. These bind what
    comes after a thought, never the thought.
    """

    thinking: bool | None
    tool_choice: str
    allowed_tools: Sequence[str] | None
    parallel_tool_calls: bool  # whether one reply may hold several calls
    output_schema: Mapping[str, Any] | None
    max_tokens: int  # of the whole reply, thoughts included
    temperature: float  # 0 takes the most likely id
    top_k: int  # 0: no limit
    top_p: float  # above 0, up to 1
    min_p: float  # of the most likely one's probability
    repetition_penalty: float  # 1: none; looks at the whole path
    presence_penalty: float  # -2 to 2; looks at the reply
    frequency_penalty: float  # -2 to 2; looks at the reply
    seed: int | None  # None draws one
    stop: str | Sequence[str]
    force: Sequence[int]


_INTEGERS = {"max_tokens": (1, 1 << 31), "top_k": (0, 1 << 31), "seed": (-(1 << 63), (1 << 63) - 1)}
_NUMBERS = {
    "temperature": (0.0, 1000.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1000.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_POSITIVE = frozenset(("top_p", "repetition_penalty"))


@dataclass(frozen=True)
class GenerateOptions:
    """Options after checking. `checked_after`: tools whose arguments somebody checks when their
    calls are there: of their schemas only that has to bind the model which can."""

    thinking: bool | None = None
    sampling: SamplingOptions = SamplingOptions()
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"
    allowed_tools: tuple[str, ...] | None = None
    parallel_tool_calls: bool = True
    output_schema: Mapping[str, Any] | None = None
    checked_after: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "GenerateOptions":
        """UnknownOption or InvalidSampling, naming the option."""
        for name in options:
            if name not in GenerateKwargs.__annotations__:
                raise UnknownOption(
                    f"generate has no option {name!r}",
                    value=options[name],
                    remedy=f"use one of {', '.join(sorted(GenerateKwargs.__annotations__))}",
                )
        thinking = options.get("thinking")
        if thinking is not None and not isinstance(thinking, bool):
            raise InvalidSampling("thinking must be True, False or None", value=thinking)
        sampling: dict[str, object] = {}
        for name, value in options.items():
            if name in _INTEGERS and not (name == "seed" and value is None):
                sampling[name] = _integer(name, value)
            elif name in _NUMBERS:
                sampling[name] = _number(name, value)
        sampling["force"] = _forced(options.get("force", ()))
        return cls(
            thinking,
            SamplingOptions(**sampling),  # type: ignore[arg-type]
            _stops(options.get("stop", ())),
            _choice(options.get("tool_choice", "auto")),
            _names(options.get("allowed_tools")),
            _flag("parallel_tool_calls", options.get("parallel_tool_calls", True)),
            _schema(options.get("output_schema")),
        )


def _integer(name: str, value: object) -> int:
    low, high = _INTEGERS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSampling(f"{name} must be an integer", value=value, limit=f"{low} to {high}")
    return value


def _number(name: str, value: object) -> float:
    low, high = _NUMBERS[name]
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or (name in _POSITIVE and value == 0):
        above = "above " if name in _POSITIVE else ""
        raise InvalidSampling(
            f"{name} must be a number", value=value, limit=f"{above}{low} to {high}"
        )
    return float(value)  # type: ignore[arg-type]


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidSampling("stop must be a text or a list of texts, none empty", value=value)
    return tuple(stops)


def _choice(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSampling(
            "tool_choice is a word or a tool's name",
            value=value,
            limit="auto, none, required, NAME",
        )
    return value


def _names(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidSampling("allowed_tools must be a list of tool names", value=value)
    if not all(isinstance(name, str) for name in value):
        raise InvalidSampling("allowed_tools must hold tool names", value=value)
    return tuple(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} must be True or False", value=value)
    return value


def _schema(value: object) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidSampling("output_schema must be a JSON schema", value=value)
    return value


def _forced(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidSampling("force must be a list of token ids", value=value)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
        raise InvalidSampling("force must hold token ids", value=value)
    return tuple(value)

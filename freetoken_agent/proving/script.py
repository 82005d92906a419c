# SPDX-License-Identifier: Apache-2.0
"""What a `ScriptedModel` plays: texts, thoughts, calls, raw ids, exceptions, or functions that give
one of these. What is none of them is refused where the script is written."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from freetoken_storage.errors import FreetokenError

from ..model import SamplingOptions


class InvalidScript(FreetokenError):
    """A step of a script that is none."""

    code = "invalid_script"


class ScriptExhausted(FreetokenError):
    """The model was asked for one more reply than its script holds."""

    code = "script_exhausted"


@dataclass(frozen=True)
class Call:
    """A tool call, emitted in the format's own call syntax."""

    name: str  # of the tool; there need be no such tool
    arguments: Mapping[str, object]  # of any shape


@dataclass(frozen=True)
class Think:
    """A thought, emitted with the format's own frames around it."""

    text: str  # without tags


@dataclass(frozen=True)
class Raw:
    """Exactly these ids, or this text with its control tokens; nothing is added, no closer either.
    A stream that ends without a stop id finishes with `length`."""

    content: str | Sequence[int]  # ids, or text


@dataclass(frozen=True)
class Request:
    """What `generate` was given. `anchor_before`: by how many ids before which a state is kept."""

    ids: tuple[int, ...]  # the path, with the generation opener
    sampling: SamplingOptions  # the options, checked
    anchors: tuple[int, ...]  # positions to keep states at
    anchor_after: frozenset[int]  # ids behind which states are kept
    lasting: tuple[int, ...] = ()  # of the anchors, those kept longest
    anchor_before: Mapping[int, int] = field(default_factory=dict)


Part = str | Think | Call | Raw | Exception
Answer = Part | Sequence[Part]
"""What a function of a script returns: a part, or several that make one reply."""
Step = Answer | Callable[[Request], Answer]
"""One reply: a part, several parts, or a function that is asked for them."""
Emitted = int | Exception


def checked_script(steps: Sequence[Step]) -> list[Step]:
    """A copy. InvalidScript names the step that is none."""
    if isinstance(steps, str | bytes) or not isinstance(steps, Sequence):
        raise InvalidScript("a script is a list of steps", value=steps, remedy=f"write [{steps!r}]")
    for number, step in enumerate(steps):
        is_function = callable(step) and not isinstance(step, type)
        if is_function and not inspect.iscoroutinefunction(step):
            continue
        _check(step, f"step {number} of the script")
    return list(steps)


def checked_answer(answer: Answer) -> Answer:
    """What a function of a script returned."""
    if inspect.iscoroutine(answer):
        answer.close()
    _check(answer, "what a function of the script returned")
    return answer


def _check(answer: object, what: str) -> None:
    is_list = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
    for part in answer if isinstance(answer, Sequence) and is_list else [answer]:
        if not isinstance(part, str | Think | Call | Raw | Exception):
            raise InvalidScript(
                f"{what} is none",
                value=part,
                limit="a text, Think, Call, Raw, an exception, a list of these, or a plain "
                "function of the Request that returns one",
            )

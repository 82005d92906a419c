# SPDX-License-Identifier: Apache-2.0
"""gpt-oss writes the headers of its channels in more ways than its chat template shows:

    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}     the template
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}          the model, mostly
    <|channel|>commentary<|message|>I will look.                                 words before calls

The unit of a call begins with its recipient in all of them; what precedes that is frame.
https://cookbook.openai.com/articles/openai-harmony
"""

import re
from dataclasses import replace

from ..chat_templates.markup import Gaps, Marker, Markup
from .call_format import NamedJsonCalls
from .call_spelling import Literally, Part
from .call_writing import CallWriting

_RECIPIENT = "to=functions."
_CALL = re.compile(
    r"to=functions\.(?P<name>[^\s<>{}\[\]\":]+?)(?P<id>(?!))?\s*(?:<\|channel\|>commentary)?\s*"
    r"(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
)
_COMMENTARY = "<|channel|>commentary"
_NEXT = "<|end|><|start|>assistant"

WORDS = f"{_COMMENTARY}<|message|>", f"{_NEXT}{_COMMENTARY}<|message|>"
"""What begins words before calls, at the start of a turn and behind a thought."""


def is_harmony(gaps: Gaps) -> bool:
    """Whether a template writes channels, and calls to recipients."""
    return gaps.head.startswith(_RECIPIENT) and "<|channel|>" in (gaps.to_thinking or "")


def as_models_write(markup: Markup) -> Markup:
    """The markup of such a template with the headers that it does not show."""
    call = Marker(f"{_COMMENTARY} to=", "call", unit=_RECIPIENT)
    words = Marker(f"{_COMMENTARY}<|message|>", "text")
    later = [replace(marker, core=_NEXT + marker.core) for marker in (call, words)]
    return replace(
        markup,
        start=_longest_first(*markup.start, call, words),
        text=_longest_first(*markup.text, later[0]),
        thinking=_longest_first(*markup.thinking, *later),
        calls=NamedJsonCalls(_CALL),
    )


def writings(writing: CallWriting) -> tuple[CallWriting, ...]:
    """How calls are written: as the template shows them, and as the model mostly writes them."""
    tail = Literally(" <|constrain|>json<|message|>")
    unit: tuple[Part, ...] = (
        Literally(_RECIPIENT),
        "name",
        tail,
        "arguments",
        Literally("<|call|>"),
    )
    later = f"{_NEXT}{_COMMENTARY} "
    own = replace(
        writing,
        unit=unit,
        bare=unit,
        at_start=f"{_COMMENTARY} ",
        after_text=later,
        after_thought=later,
    )
    return writing, own


def _longest_first(*markers: Marker) -> tuple[Marker, ...]:
    return tuple(sorted(markers, key=lambda marker: -len(marker.core)))

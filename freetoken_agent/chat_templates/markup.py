# SPDX-License-Identifier: Apache-2.0
"""What a model writes between its contents: the markers a parser looks for.

Everything is learned from gaps. Where the generation opener ends, the rest of a gap is what the
model itself must write: `<think>`, `</think>`, the head of a call.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..call_formats.call_format import CallFormat

Target = Literal["thinking", "text", "call"]

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


@dataclass(frozen=True)
class Marker:
    """`core` is looked for; blanks of `lead` before it and of `trail` after it belong to it.

    `unit`: where the core of a call is (partly) frame, the literal with which the unit itself
    begins; '' where the unit begins with the core, or, if `behind`, with what follows it.
    """

    core: str
    target: Target
    lead: str = ""
    trail: str = ""
    unit: str = ""
    behind: bool = False

    @classmethod
    def of(cls, literal: str, target: Target) -> "Marker | None":
        core = literal.strip()
        if not core:
            return None
        at = literal.index(core)
        return cls(core, target, literal[:at], literal[at + len(core) :])

    @classmethod
    def of_call(cls, gap: str, head: str, others: Sequence[str] = ()) -> "Marker | None":
        """The first tags of what precedes a call, as many as `others`, which may stand in the same
        place, do not begin with; the whole head where there is no tag. Short, because models vary
        what follows."""
        literal = gap + head
        core = literal.lstrip()
        if not core:
            return None
        if not head.strip():  # a call that begins with its name
            return replace(cls._of_core(core.rstrip(), gap), behind=True)
        end = 0
        while match := _TAG.match(core, end):
            end = match.end()
            if not any(other.lstrip().startswith(core[:end]) for other in others):
                break
        else:
            end = len(core.rstrip())
        return replace(
            cls._of_core(core[:end], literal), unit=_unit(head, gap) if gap.strip() else ""
        )

    @classmethod
    def _of_core(cls, core: str, literal: str) -> "Marker":
        return cls(core, "call", lead=literal[: len(literal) - len(literal.lstrip())])


def _unit(head: str, gap: str) -> str:
    """The literal by which a unit is found behind its gap: as long as it takes."""
    literal = head.strip()
    start = len(_first_tag(literal))
    return next(
        (literal[:end] for end in range(start, len(literal)) if literal[:end] not in gap), literal
    )


def _first_tag(text: str) -> str:
    text = text.strip()
    match = _TAG.match(text)
    return match[0] if match else text[:1] if text[:1] in "{[" else text


@dataclass(frozen=True)
class Markup:
    """Markers by what the model is writing when they may come, and how calls are read.

    `call_end`: the literal that ends a unit, '' where only its JSON does. `skip_after_call`:
    literals that close a section of calls; `blanks`: what the model writes before a text that
    begins the turn. Both stay in gaps.
    """

    start: tuple[Marker, ...]
    text: tuple[Marker, ...]
    thinking: tuple[Marker, ...]
    after_call: tuple[Marker, ...]
    calls: CallFormat | None
    call_end: str
    skip_after_call: tuple[str, ...] = ()
    blanks: str = ""


@dataclass(frozen=True)
class Gaps:
    """Texts of gaps in short skeletons; None where the template refuses. `opener` is the
    generation opener after a user's message, `closing` what ends the turn after a text."""

    opener: str
    to_text: str | None
    to_thinking: str | None
    to_call: str | None
    thinking_to_text: str | None
    thinking_to_call: str | None
    text_to_call: str | None
    call_to_call: str | None
    call_to_result: str | None
    closing: str
    head: str
    tail: str


def learn_markup(gaps: Gaps, calls: CallFormat | None) -> Markup:
    """The markers that follow from the gaps."""
    think_open = _written(gaps.opener, gaps.to_thinking)
    text_open = _written(gaps.opener, gaps.to_text)
    if think_open and text_open.strip().startswith(think_open.strip()):
        text_open = ""  # an empty thought before the answer: read as a thought
    start = [Marker.of(think_open, "thinking"), Marker.of(text_open, "text")]
    text: list[Marker | None] = []
    thinking: list[Marker | None] = []
    after_call: list[Marker | None] = []
    closer = gaps.thinking_to_text or gaps.thinking_to_call
    if closer is not None:
        thinking.append(Marker.of(closer, "text"))
    if calls is not None:
        if gaps.text_to_call is not None:
            text.append(Marker.of_call(gaps.text_to_call, gaps.head, [gaps.closing]))
        start.append(_call_at_start(gaps, [think_open, text_open], text))
        start.append(_section_at_start(gaps))
        if gaps.thinking_to_call is not None:
            thinking.append(_call_after_thought(gaps))
        if gaps.call_to_call is not None:
            after_call.append(Marker.of_call(gaps.call_to_call, gaps.head))
    return Markup(
        start=_known([*start, *text]),
        text=_known(text),
        thinking=_known(thinking),
        after_call=_known(after_call),
        calls=calls,
        call_end=_call_end(gaps.tail),
        skip_after_call=_section_closers(gaps),
        blanks="" if text_open.strip() else text_open,
    )


def _known(markers: Sequence[Marker | None]) -> tuple[Marker, ...]:
    """Each marker once, longer ones first, so that one which begins like another wins."""
    found = dict.fromkeys(marker for marker in markers if marker is not None)
    if any(marker.target == "call" and marker.core.startswith("{") for marker in found):
        found |= dict.fromkeys(_UNTAGGED)
    return tuple(sorted(found, key=lambda marker: -len(marker.core)))


# Where calls are JSON without a tag, models of the Llama family also write these first.
_UNTAGGED = (
    Marker('{"type": "function", ', "call"),
    Marker("<|python_tag|>", "call", unit="{"),
)


def _written(opener: str, gap: str | None) -> str:
    """What of a gap the model writes itself: what goes beyond the generation opener."""
    if gap is None or not gap.startswith(opener):
        return ""
    return gap[len(opener) :]


def beyond(opener: str, gap: str) -> str:
    """What the model writes of the gap before a call: what is behind the part it shares with the
    generation opener, which may begin a thought that the gap does not have."""
    shared = os.path.commonprefix([opener, gap])
    if "<" in shared and ">" not in shared[shared.rindex("<") :]:
        shared = shared[: shared.rindex("<")]  # a tag that goes on differently
    return gap[len(shared) :]


def _call_at_start(
    gaps: Gaps, others: Sequence[str], in_text: Sequence[Marker | None]
) -> Marker | None:
    """A call that begins the turn, where its marker is not the one that follows a text: what
    stands before that one may be an empty thought, which is read as a thought."""
    if gaps.to_call is None:
        return None
    written = _written(gaps.opener, gaps.to_call)
    if any(marker is not None and marker.core in written + gaps.head for marker in in_text):
        return None
    return Marker.of_call(written, gaps.head, others)


def _section_at_start(gaps: Gaps) -> Marker | None:
    """What opens a section of calls at the start of the turn, where the generation opener begins a
    thought that the gap before a call does not have."""
    if gaps.to_call is None or gaps.to_call.startswith(gaps.opener):
        return None
    return Marker.of_call(beyond(gaps.opener, gaps.to_call), gaps.head)


def _call_after_thought(gaps: Gaps) -> Marker | None:
    """A call directly after a thought, where the closer differs from the one before an answer."""
    assert gaps.thinking_to_call is not None
    closer = (gaps.thinking_to_text or gaps.thinking_to_call).strip()
    if gaps.thinking_to_call.strip().startswith(closer):
        return None  # the thought closes in the same way; the call follows as after a text
    marker = Marker.of(gaps.thinking_to_call + gaps.head, "call")
    return marker and replace(marker, trail="", unit=_unit(gaps.head, gaps.thinking_to_call))


def _call_end(tail: str) -> str:
    """The shortest run of tags at the end of a unit that it holds only once; '' without tags."""
    for match in reversed(list(_TAG.finditer(tail))):
        if tail.count(tail[match.start() :]) == 1:
            return tail[match.start() :]
    return ""


def _section_closers(gaps: Gaps) -> tuple[str, ...]:
    """Literals that a format writes once after its last call, before the turn's closer."""
    if gaps.call_to_result is None:
        return ()
    literal = gaps.call_to_result.strip()
    if (end := _turn_end(gaps.closing.strip(), literal)) is not None:
        return tuple(re.findall(r"\]|[^\s\]]+", literal[:end]))
    closers = []
    if literal.startswith("]"):
        closers.append("]")
        literal = literal[1:].lstrip()
    match = _TAG.match(literal)
    if match and ("calls" in match[0] or match[0].startswith("[/")):
        closers.append(match[0])
    return tuple(closers)


def _turn_end(closing: str, literal: str) -> int | None:
    """Where the turn's closer begins in what follows a call; None if that is not in it. The calls
    may have a shorter one than a text."""
    for match in re.finditer(r"(?<!\S)\S|<|\[", closing):
        at = literal.find(closing[match.start() :])
        if at == 0 or (at > 0 and not literal[at - 1].isalnum()):
            return at
    return None


def longest(markers: Sequence[Marker]) -> int:
    """The length of the longest core, 1 without markers."""
    return max((len(marker.core) for marker in markers), default=1)


def held_back(text: str, markers: Sequence[Marker]) -> int:
    """How many characters at the end may turn out to belong to a marker: blanks, and blanks with
    the beginning of one."""
    held = 0
    for marker in markers:
        for size in range(min(len(marker.core) - 1, len(text)), 0, -1):
            if text.endswith(marker.core[:size]):
                held = max(held, size)
                break
    kept = text[: len(text) - held]
    return held + len(kept) - len(kept.rstrip())

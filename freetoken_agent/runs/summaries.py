# SPDX-License-Identifier: Apache-2.0
"""The rule that lets the model replace old turns by its own summary of them.

    main    preamble  turn₀ turn₁ turn₂  turn₃              keep_turns=1
    fork    preamble  turn₀ turn₁ turn₂  prompt ─▶ summary
    main    preamble  question summary   turn₃

The fork goes on from states that are known, and is deleted once the summary is there; the segments
it wrote stay in the store until they are purged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from ..context_rules import ContextRule, Written, first_turn_kept, whole
from ..errors import InvalidRule
from ..segments import ReusePlan, Segment
from ..tokenizers.tokenizer import Tokenizer
from .blocking import in_thread
from .changes import Change, InsertBefore, Remove

if TYPE_CHECKING:
    from ..session import Session

PROMPT = (
    "Summarise this conversation for yourself: what was asked, what was found out (names, numbers, "
    "places), what was decided, and what is still to do. Be brief. Write nothing else."
)
QUESTION = "What has happened so far?"


@dataclass(frozen=True, kw_only=True)
class Summarise(ContextRule):
    """Replace all turns but the last `keep_turns` by a summary of at most `max_tokens`, which the
    model writes on a fork when it is asked `prompt`. It becomes the answer to `question`.

    A proposal assumes the longest summary. Nothing is done unless even that makes the path shorter;
    so a summary that stands alone before the kept turns is not summarised again.
    """

    trigger: int = 60_000  # tokens of the path
    keep_turns: int = 1
    max_tokens: int = 512
    prompt: str = PROMPT
    question: str = QUESTION

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("keep_turns", self.keep_turns, least=1)
        whole("max_tokens", self.max_tokens, least=1)
        for name in ("prompt", "question"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise InvalidRule(f"the {name} of a summary must say something", value=text)

    def changes(self, session: "Session") -> Sequence[Change]:
        old, kept = self._parts(session)
        if not old or not kept:
            return ()
        summary = filler(session.model.tokenizer, self.max_tokens)
        changes: list[Change] = [
            *(Remove(segment) for segment in old),
            InsertBefore(kept[0], "user", self.question),
            InsertBefore(kept[0], "assistant", summary),
        ]
        longest = session.apply_changes(changes, dry_run=True).plan
        return changes if longest.input_tokens < session.plan().input_tokens else ()

    def priced_writing(self, session: "Session") -> ReusePlan | None:
        return session.apply_changes(self._asking(session), thinking=False, dry_run=True).plan

    async def write(self, session: "Session", changes: Sequence[Change]) -> Written:
        fork = await in_thread(session.fork)
        try:
            await in_thread(partial(fork.apply_changes, self._asking(session)))
            reply = await fork.reply(thinking=False, tool_choice="none", max_tokens=self.max_tokens)
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread(partial(session.delete_branch, fork.branch))
        text = fitting(session.model.tokenizer, reply.text.strip(), self.max_tokens)
        if not text:
            return Written((), reply.usage)
        return Written(tuple(_with_summary(change, text) for change in changes), reply.usage)

    def _asking(self, session: "Session") -> Sequence[Change]:
        """The prompt in the place of the turns that stay."""
        _, kept = self._parts(session)
        return [InsertBefore(kept[0], "user", self.prompt), *(Remove(one) for one in kept)]

    def _parts(self, session: "Session") -> tuple[list[Segment], list[Segment]]:
        """The segments of the old turns, and of those that stay."""
        path = session.path()
        first = first_turn_kept(path, self.keep_turns)
        turned = [(segment, segment.turn) for segment in path if segment.turn is not None]
        old = [segment for segment, turn in turned if turn < first]
        return old, [segment for segment, turn in turned if turn >= first]


def filler(tokenizer: Tokenizer, num_tokens: int) -> str:
    """A text of at least that many tokens, and hardly more."""
    count = num_tokens
    while len(tokenizer.encode_content("a" + " a" * (count - 1))) < num_tokens:
        count *= 2
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        enough = len(tokenizer.encode_content("a" + " a" * (middle - 1))) >= num_tokens
        low, high = (low, middle) if enough else (middle, high)
    return "a" + " a" * (high - 1)


def fitting(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """The beginning of the text that has no more tokens: what was sampled may be spelled in more
    of them when it is encoded again."""
    while (count := len(tokenizer.encode_content(text))) > num_tokens:
        text = text[: min(len(text) - 1, len(text) * num_tokens // count)].rstrip()
    return text


def _with_summary(change: Change, text: str) -> Change:
    if isinstance(change, InsertBefore) and change.kind == "assistant":
        return replace(change, content=text)
    return change

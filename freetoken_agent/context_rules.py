# SPDX-License-Identifier: Apache-2.0
"""Rules that keep a context small: what to change, what that saves, what it costs.

    changes(session)     what the rule would change            reads only
        │
    propose(session)     the same, priced                      a Proposal, or None
        │   a run goes on here only when the proposal is due
    write(session)       texts that a model writes first       Summarise only
        │
    one edit             undone as one, or with its run

A rule is data and remembers nothing: what it has done is seen on the path, so that a second
application to an unchanged history finds nothing to do.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .errors import InvalidRule
from .runs.blocking import in_thread, wait_for
from .runs.changes import Change, Remove, Replace
from .segments import Edit, ReusePlan, Segment, Usage

if TYPE_CHECKING:
    from .session import Session

CLEARED = "[Result cleared. Call the tool again if you need it.]"
"""What stands in the place of a result that was cleared."""


@dataclass(frozen=True)
class Proposal:
    """What a rule would do now, and what it costs. `edit` is a dry run; its plan prices the path
    afterwards, `before` the path as it is. `writing` prices the model call that must come first,
    if there is one: then `edit.plan` is an upper bound, and a filler stands for the text to come.
    """

    rule: str  # its `name`
    changes: tuple[Change, ...]  # what it would change
    edit: Edit
    before: ReusePlan
    waits: bool
    """The rule is deferred, and its limit is not reached."""
    writing: ReusePlan | None = None

    @property
    def saved_tokens(self) -> int:
        """By how many tokens the path gets shorter."""
        return self.before.input_tokens - self.edit.plan.input_tokens

    @property
    def extra_prefill_tokens(self) -> int:
        """How many more tokens the next model call forwards than without the edit. Negative: that
        many fewer. What `writing` forwards comes on top."""
        return self.edit.plan.prefill_tokens - self.before.prefill_tokens

    @property
    def pays(self) -> bool:
        """Whether the next model call forwards no more than without the edit."""
        return self.extra_prefill_tokens <= 0

    @property
    def due(self) -> bool:
        """Whether a run does it now."""
        return self.pays or not self.waits


@dataclass(frozen=True)
class Written:
    """The changes to make, and what it took to write their texts."""

    changes: tuple[Change, ...]
    usage: Usage | None = None


@dataclass(frozen=True, kw_only=True)
class ContextRule(ABC):
    """A rule of one's own derives from this and says its `changes`. `trigger`: it does nothing
    while the path has fewer tokens, which are those of `session.ids()`: contents and frames,
    without the generation opener. `deferred`: a run waits until the edit makes its next model call
    forward no more than it would without it, or until the path has `limit` tokens.
    InvalidRule for fields that cannot be."""

    trigger: int = 0
    deferred: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        whole("trigger", self.trigger, least=0)
        if self.limit is None:
            return
        whole("limit", self.limit, least=max(1, self.trigger))
        if not self.deferred:
            raise InvalidRule(
                "only a deferred rule has a limit",
                value=self.limit,
                remedy="deferred=True, or leave the limit out",
            )

    @property
    def name(self) -> str:
        """What events and undo steps call it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def changes(self, session: "Session") -> Sequence[Change]:
        """What to change; nothing on a path that the rule has dealt with already. Called in a
        thread, whether or not the edit will be made: it must only read."""

    def priced_writing(self, session: "Session") -> ReusePlan | None:
        """The price of the model call in `write`; None if there is none."""
        return None

    async def write(self, session: "Session", changes: Sequence[Change]) -> Written:
        """The changes with their final texts."""
        return Written(tuple(changes))

    def propose(self, session: "Session", *, thinking: bool | None = None) -> Proposal | None:
        """What the rule would do to the session now, priced; None if that is nothing. It changes
        nothing. `thinking`: as the next generation will ask."""
        num_tokens = len(session.ids())
        if num_tokens < self.trigger:
            return None
        changes = tuple(self.changes(session))
        if not changes:
            return None
        edit = session.apply_changes(changes, thinking=thinking, dry_run=True)
        if not edit:
            return None
        return Proposal(
            rule=self.name,
            changes=changes,
            edit=edit,
            before=session.plan(thinking=thinking),
            waits=self.deferred and (self.limit is None or num_tokens < self.limit),
            writing=self.priced_writing(session),
        )

    async def apply(self, session: "Session") -> Edit | None:
        """Do it now, as one undo step, if the trigger is reached; also where it does not pay. None
        if there is nothing to do."""
        proposal = await in_thread(partial(self.propose, session))
        if proposal is None:
            return None
        written = await self.write(session, proposal.changes)
        if not written.changes:
            return None
        return await in_thread(partial(session.apply_changes, written.changes, label=self.name))

    def apply_sync(self, session: "Session") -> Edit | None:
        """The same, from plain code, also inside a running event loop."""
        return wait_for(lambda: self.apply(session))


@dataclass(frozen=True, kw_only=True)
class ClearToolResults(ContextRule):
    """Put `placeholder` in the place of old tool results; their calls stay.

    The last `keep` results stay, whatever they are; and so do those of the tools in `exclude`,
    errors (unless `errors`), and those that are no longer than the placeholder. Nothing is done
    unless that saves `clear_at_least` tokens.
    """

    trigger: int = 30_000  # tokens of the path
    keep: int = 3
    clear_at_least: int = 0
    exclude: Sequence[str] = ()
    errors: bool = False
    placeholder: str = CLEARED

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("keep", self.keep, least=0)
        whole("clear_at_least", self.clear_at_least, least=0)
        if isinstance(self.exclude, str) or not all(isinstance(n, str) for n in self.exclude):
            raise InvalidRule("exclude holds names of tools", value=self.exclude)
        if not isinstance(self.placeholder, str) or not self.placeholder.strip():
            raise InvalidRule("the placeholder must be visible", value=self.placeholder)
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def changes(self, session: "Session") -> Sequence[Change]:
        least = len(session.model.tokenizer.encode_content(self.placeholder))
        results = session.find(kind="tool_result")
        old = [r for r in results[: max(0, len(results) - self.keep)] if self._may_go(r, least)]
        if not old or sum(r.num_tokens - least for r in old) < self.clear_at_least:
            return ()
        return [Replace(result, self.placeholder) for result in old]

    def _may_go(self, result: Segment, least: int) -> bool:
        is_kept = result.tool in self.exclude or (result.error and not self.errors)
        return not is_kept and result.num_tokens > least and result.content != self.placeholder


@dataclass(frozen=True, kw_only=True)
class ClearThinking(ContextRule):
    """Remove thoughts, except those of the last `keep_turns` turns. A thought that the model is to
    go on from stays."""

    keep_turns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("keep_turns", self.keep_turns, least=0)

    def changes(self, session: "Session") -> Sequence[Change]:
        path = session.path()
        first_kept = first_turn_kept(path, self.keep_turns)
        return [
            Remove(segment)
            for segment in path[:-1]
            if segment.kind == "thinking" and (segment.turn is None or segment.turn < first_kept)
        ]


def first_turn_kept(path: Sequence[Segment], keep_turns: int) -> int:
    """The number of the first of the last `keep_turns` turns."""
    last = max((s.turn for s in path if s.turn is not None), default=-1)
    return last + 1 - keep_turns


def whole(name: str, value: object, *, least: int) -> None:
    """InvalidRule unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRule(
            f"{name} of a context rule must be a whole number",
            value=value,
            limit=f"at least {least}",
        )

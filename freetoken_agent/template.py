# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: frames learned from the model's own chat template; contents -> token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["system", "tools", "user", "thinking", "text", "tool_call", "tool_result"]


@dataclass(frozen=True)
class Item:
    """A content as the template sees it, in path order.

    `text`: the content (tools: the JSON list of schemas; a call: unused). `name arguments call_id`:
    a call, and of a result the call it answers. `open`: the assistant turn goes on after this item
    (as between a thought and its answer, or after a cut). `ids`: the stored ids of a content that
    exists already; None asks the format to make them.
    """

    kind: Kind
    text: str = ""
    name: str | None = None
    arguments: Mapping[str, object] | None = None
    call_id: str | None = None
    open: bool = False
    error: bool = False
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """One item laid out: the gap before it (hidden frame) and its own content, as text and ids."""

    gap_text: str
    gap_ids: tuple[int, ...]
    text: str  # the content as stored: transformed where the template trims or escapes
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TemplateReport:
    """What the template does beyond frames, found by probes at load. `notes` are sentences for
    people; the flags are what the session's policies look at."""

    digest: str
    fallback_thinking: bool = False  # rule 15: inlined as <think>…</think>
    fallback_tools: bool = False  # rule 15: inlined as <tool_call>…</tool_call>
    drops_thinking: bool = False  # earlier thinking disappears when a user message follows
    system_supported: bool = True
    tools_before_system: bool = False
    parallel_calls: bool = True
    moves_system: bool = False
    dated: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What a session fixes at creation: extra template variables and the frozen clock."""

    variables: Mapping[str, object] = field(default_factory=dict)
    now_s: float = 0.0


class ChatFormat(Protocol):
    """Draft of the interface; `learn` builds the real one."""

    @property
    def report(self) -> TemplateReport: ...

    def layout(
        self, items: Sequence[Item], *, start: int = 0, options: Options = Options()
    ) -> list[Piece]:
        """Lay out items[start:] of a path in one run; gaps look at nothing after the run. The first
        gap of a path holds the template's beginning (BOS and so on). Items with `ids` keep them.
        TemplateUnsupported if the template refuses, moves or drops one of them."""

    def opener(
        self, items: Sequence[Item], *, thinking: bool | None = None, options: Options = Options()
    ) -> tuple[int, ...]:
        """The ids between the last item and what the model writes next (the generation opener;
        the closer of an open thought). Empty when the turn is open at a text."""

    @property
    def closers(self) -> frozenset[int]:
        """Ids that end an assistant turn."""

# SPDX-License-Identifier: Apache-2.0
"""The records that go into and come out of a chat format. Plain data, no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["system", "tools", "user", "thinking", "text", "tool_call", "tool_result"]

ASSISTANT_KINDS = frozenset(("thinking", "text", "tool_call"))


@dataclass(frozen=True)
class Item:
    """A content as the template sees it, in path order.

    `text`: the content (tools: the JSON list of schemas; a call: unused). `name arguments call_id`:
    a call, and of a result the call it answers. `open`: the assistant turn goes on after this item
    (as between a thought and its answer, or after a cut). `partial`: the content itself was cut
    short, so the next content of the same kind continues it without a gap. `ids`: the stored ids
    of a content that exists already; None asks the format to make them.
    """

    kind: Kind
    text: str = ""
    name: str | None = None
    arguments: Mapping[str, object] | None = None
    call_id: str | None = None
    open: bool = False
    partial: bool = False
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
class Opener:
    """What stands between the last content and what the model writes next.

    `kind`: what the model writes first, as far as the opener decides it: "thinking" when the opener
    itself begins a thought, or a cut thought is continued; else "text".
    """

    text: str
    ids: tuple[int, ...]
    kind: Literal["thinking", "text"]


@dataclass(frozen=True)
class Options:
    """What a session fixes at creation: extra template variables and the frozen clock (seconds
    since the epoch, shown to templates in UTC)."""

    variables: Mapping[str, object] = field(default_factory=dict)
    now_s: float = 0.0


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True)
class TemplateReport:
    """What the template does beyond frames, found by probes at load. `notes` are sentences for
    people; the flags are what the session's policies look at."""

    digest: str
    fallback_thinking: bool = False  # rule 15: inlined as <think>…</think>
    fallback_tools: bool = False  # rule 15: calls or tools are inlined
    call_format: str | None = None  # the named format in which calls are inlined
    drops_thinking: bool = False  # earlier thinking disappears when a user message follows
    system_supported: bool = True  # False: folded into the first user turn
    tools_before_system: bool = False
    parallel_calls: bool = True
    moves_system: bool = False  # a later system message does not stay in its place
    dated: bool = False
    thinking_switch: bool = False  # `thinking=` changes the generation opener
    notes: tuple[str, ...] = ()


def same_message(left: Item, right: Item) -> bool:
    """Whether two neighbours belong to one message of the assistant's: a thought, its text and
    calls, in that order, each of which may come in several cut pieces."""
    if left.kind not in ASSISTANT_KINDS or right.kind not in ASSISTANT_KINDS:
        return False
    if right.kind == "tool_call":
        return True
    if left.kind == right.kind:
        return left.open or left.partial
    return left.kind == "thinking"

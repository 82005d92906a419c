# SPDX-License-Identifier: Apache-2.0
"""A model that plays a script, for testing what is built on sessions. It needs no torch.

`ScriptedModel` speaks a real chat format over a byte tokenizer and counts reuse the way an engine
does, by an independent and much simpler account: a list of the paths it has forwarded. It has no
logits and ignores constraints, so that malformed output can be scripted too.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from freetoken_storage.errors import StoreMismatch
from freetoken_storage.records import Snapshots

from .model import (
    NO_IDS,
    ContextOverflow,
    Fingerprint,
    ModelClosed,
    PathPlan,
    PathUsage,
    SamplingOptions,
)
from .proving.reuse_ledger import Ledger, chain_digest
from .proving.script import (
    Answer,
    Call,
    Emitted,
    InvalidScript,
    Raw,
    Request,
    ScriptExhausted,
    Step,
    Think,
    checked_answer,
    checked_script,
)
from .template import ChatFormat, Item
from .tokenizers.byte_tokenizer import ByteTokenizer
from .tokenizers.tokenizer import Tokenizer

__all__ = [
    "CHATML",
    "Answer",
    "Call",
    "InvalidScript",
    "Raw",
    "Request",
    "ScriptExhausted",
    "ScriptedModel",
    "Step",
    "Think",
]

CHATML = """\
{%- macro close() %}{{ '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' + close() }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + close() }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + close() }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- close() }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ close() }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""A ChatML template with thinking, tools and results; every history it renders is prefix-stable."""


@dataclass(frozen=True)
class ScriptedToken:
    """An id of the script; certain, so its logprob is 0."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class ScriptedStream:
    """A `TokenStream` over ids that are known beforehand. It forwards when it is first pulled."""

    finish_reason: Literal["stop", "length", "cancelled"] | None

    def __init__(
        self,
        model: "ScriptedModel",
        request: Request,
        output: Sequence[Emitted],
        on_progress: Callable[[int, int], None] | None,
        announced: PathPlan | None,
    ) -> None:
        self._model = model
        self._request = request
        self._on_progress = on_progress
        self._announced = announced
        self._output = list(output)
        self._sampled: list[int] = []
        self._done = False
        self.finish_reason = None
        self.usage = PathUsage(len(request.ids), 0, 0)
        self._started = False

    def __iter__(self) -> Iterator[ScriptedToken]:
        return self

    def __next__(self) -> ScriptedToken:
        if not self._started:
            self._started = True
            usage = self._model._prefill(self._request, self._on_progress)
            self.usage = replace(usage, changed=_difference(self._announced, usage))
        if self._done:
            raise StopIteration
        if not self._output:
            self._finish("length")
            raise StopIteration
        item = self._output.pop(0)
        if isinstance(item, Exception):
            self._finish("cancelled")
            raise item
        self._sampled.append(item)
        self.usage = replace(self.usage, output_tokens=len(self._sampled))
        if item in self._request.sampling.stop_ids:
            self._finish("stop")
        elif len(self._sampled) >= self._model._room(self._request):
            self._finish("length")
        return ScriptedToken(item)

    def cancel(self) -> None:
        if not self._done:
            self._finish("cancelled")

    def close(self) -> None:
        self.cancel()

    def _finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self._done = True
        self.finish_reason = reason
        if self._started:
            self._model._grow(self._request, self._sampled)


@lru_cache(maxsize=8)  # learning takes longer than most tests
def _learned(template: str, call_format: str | None) -> tuple[Tokenizer, ChatFormat]:
    tokenizer = ByteTokenizer()
    return tokenizer, ChatFormat.learn(template, tokenizer, call_format=call_format)


class ScriptedModel:
    """Plays `script`: one step per reply, in order; then it raises ScriptExhausted.

    A step is a text, `Think`, `Call`, `Raw`, an exception (raised from the stream), a sequence of
    these (one reply: a thought, a text, two calls …), or a callable that gets the `Request` and
    returns one of them. Texts and calls are followed by the id that closes the turn. `requests`:
    what it was asked. `ledger`: what it forwarded. `parts`: what its states depend on, too."""

    def __init__(
        self,
        script: Sequence[Step] = (),
        *,
        name: str = "scripted",
        template: str = CHATML,
        call_format: str | None = None,
        context_limit: int = 1 << 17,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.tokenizer: Tokenizer
        self.format: ChatFormat
        self.tokenizer, self.format = _learned(template, call_format)
        self.context_limit = context_limit
        named = {"weights": name, **(parts or {})}
        self.fingerprint = Fingerprint(
            chain_digest(repr(sorted(named.items())).encode(), ()), named
        )
        self.requests: list[Request] = []
        self.ledger: Ledger = Ledger(self.fingerprint.digest)
        self._script = checked_script(script)
        self._lock = threading.RLock()
        self._closed = False

    def extend(self, *steps: Step) -> None:
        """Add to the script."""
        with self._lock:
            self._script.extend(checked_script(steps))

    def attach(self, snapshots: Snapshots) -> None:
        with self._lock:
            if self.ledger.snapshots not in (None, snapshots):
                raise StoreMismatch(
                    "the model is attached to another store",
                    remedy="close that store, or load the model a second time",
                )
            self.ledger.snapshots = snapshots

    def detach(self) -> None:
        with self._lock:
            self.ledger.snapshots = None

    def plan(self, ids: Sequence[int]) -> PathPlan:
        with self._lock:
            self._check(ids)
            return self.ledger.plan(ids)

    def anchors(self, ids: Sequence[int]) -> Sequence[int]:
        with self._lock:
            return self.ledger.anchors(ids)

    def generate(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
        anchor_after: frozenset[int] = frozenset(),
        anchor_before: Mapping[int, int] = NO_IDS,
        on_progress: Callable[[int, int], None] | None = None,
        announced: PathPlan | None = None,
    ) -> ScriptedStream:
        with self._lock:
            self._check(ids)
            if not self._script:
                raise ScriptExhausted(
                    "the script has no reply left",
                    value=len(self.requests),
                    remedy="script one more step",
                )
            after, before = frozenset(anchor_after), dict(anchor_before)
            request = Request(tuple(ids), sampling, tuple(anchors), after, tuple(lasting), before)
            self.requests.append(request)
            step = self._script.pop(0)
        if callable(step):
            step = checked_answer(step(request))
        output = [*sampling.force, *self.emit(step)]
        return ScriptedStream(self, request, output, on_progress, announced)

    def warm(
        self,
        ids: Sequence[int],
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
    ) -> PathUsage:
        with self._lock:
            self._check(ids)
            plan = self.ledger.plan(ids)
            ends = sorted({*anchors, *lasting})
            forwarded = [end for end in ends if plan.reused_tokens < end < len(ids)]
            self.ledger.record(ids, [*forwarded, len(ids)])
            return PathUsage(
                plan.input_tokens, plan.reused_tokens, plan.prefill_tokens, miss=plan.miss
            )

    def forget(self, ids: Sequence[int], start: int) -> int:
        with self._lock:
            return self.ledger.forget(ids, start)

    def pin(self, owner: str, paths: Sequence[Sequence[int]]) -> None:
        with self._lock:
            if self.ledger.snapshots is not None:
                digests = [d for path in paths for d in self.ledger.digests(path)]
                self.ledger.snapshots.pin(owner, digests)

    def flush(self) -> None:
        with self._lock:
            if self.ledger.snapshots is not None:
                self.ledger.snapshots.flush()

    def close(self) -> None:
        self._closed = True

    def _check(self, ids: Sequence[int]) -> None:
        if self._closed:
            raise ModelClosed("the model is closed", value=self.name, remedy="load it again")
        if len(ids) > self.context_limit:
            raise ContextOverflow(
                "the path is longer than the model's context",
                value=len(ids),
                limit=f"{self.context_limit} tokens",
                remedy="rewind, drop or delete segments",
            )

    def _prefill(
        self, request: Request, on_progress: Callable[[int, int], None] | None
    ) -> PathUsage:
        with self._lock:
            usage = self.warm(request.ids, anchors=request.anchors, lasting=request.lasting)
        if on_progress is not None and usage.prefill_tokens:
            on_progress(usage.prefill_tokens, usage.prefill_tokens)
        return usage

    def _room(self, request: Request) -> int:
        return min(request.sampling.max_tokens, self.context_limit - len(request.ids))

    def _grow(self, request: Request, sampled: Sequence[int]) -> None:
        """Generation ended: all but the last sampled id have been forwarded."""
        start, forwarded = len(request.ids), sampled[:-1]
        path = [*request.ids, *forwarded]
        ends = [start + i + 1 for i, t in enumerate(forwarded) if t in request.anchor_after]
        backs = request.anchor_before
        ends += [start + i - backs[t] for i, t in enumerate(sampled) if i > backs.get(t, i)]
        with self._lock:
            self.ledger.record(path, [*ends, len(path)])

    def emit(self, step: Answer) -> list[Emitted]:
        """The ids that a step of the script stands for, its closer included, up to an exception.
        It plays nothing."""
        parts = [step] if isinstance(step, str | Think | Call | Raw | Exception) else list(step)
        output: list[Emitted] = []
        items = [Item("user", text="?")]
        opener = self.format.opener(items).ids
        for part in parts:
            if isinstance(part, Exception):
                return [*output, part]
            if isinstance(part, Raw):
                raw = part.content
                output += self.tokenizer.encode_frame(raw) if isinstance(raw, str) else raw
                continue
            if len(items) > 1:
                items[-1] = replace(items[-1], open=True)
            items.append(self._item(part))
            piece = self.format.layout(items, start=len(items) - 1)[0]
            output += [*piece.gap_ids[len(opener) :], *piece.ids]
            opener = ()
        if len(items) > 1:
            output += self._closer(items)
        return output

    def _item(self, part: str | Think | Call) -> Item:
        if isinstance(part, Call):
            return Item("tool_call", name=part.name, arguments=part.arguments, call_id="call00000")
        if isinstance(part, Think):
            return Item("thinking", text=part.text, open=True)
        return Item("text", text=part, ids=tuple(self.tokenizer.encode_content(part)))

    def _closer(self, items: Sequence[Item]) -> list[int]:
        """What the model writes to end its turn: the next gap, up to its stop id."""
        last = items[-1]
        if last.kind == "tool_call":
            follow = Item("tool_result", text="?", name=last.name, call_id=last.call_id)
        else:
            follow = Item("user", text="?")
        gap = self.format.layout([*items, follow], start=len(items))[0].gap_ids
        ends = [i for i, token in enumerate(gap) if token in self.format.closers]
        return list(gap[: ends[0] + 1]) if ends else []


def _difference(announced: PathPlan | None, usage: PathUsage) -> str | None:
    """Why an announced plan did not come true, in the engine's words."""
    gained = 0 if announced is None else usage.reused_tokens - announced.reused_tokens
    if gained > 0:
        return f"another request computed {gained} tokens of the path"
    return f"{-gained} tokens were lost: evicted" if gained else None

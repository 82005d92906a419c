# SPDX-License-Identifier: Apache-2.0
"""What a model may write next, as a grammar: a thought, a text, calls of known tools, a value.

    thinking     anything, until its closer; nothing binds before it
    none         a text
    auto         a text, then perhaps calls
    required     calls; of one tool where it is named
    a schema     one JSON value instead of the text

Calls are written as the template writes them (`call_writing`), with the name of a known tool and
arguments that fit its schema, and blanks only where the template has them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .call_formats.call_spelling import Literally
from .call_formats.call_writing import CallWriting
from .chat_templates.markup import Gaps, Markup
from .grammars.lark import BLANKS, Rules, quoted
from .grammars.spelled_arguments import SPELLING, spell
from .tokenizers.tokenizer import Tokenizer

Choice = Literal["none", "auto", "required"]
Place = Literal["start", "thinking", "text"]

_ID = "/[a-zA-Z0-9]{9}/"
_INDEX = "/[0-9]{1,3}/"
_KEPT = 32


@dataclass(frozen=True)
class ToolShape:
    """A tool as a grammar sees it. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Demand:
    """What a step asks of the model. `place`: where it begins to write: at the start of its turn,
    inside a thought, or in a text that goes on. `schema`: of the answer, which then is one value.
    `thinks`: whether it may begin a thought of its own."""

    place: Place
    choice: Choice = "auto"
    tools: tuple[ToolShape, ...] = ()
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    thinks: bool = True


class GrammarWriter:
    """Writes grammars for one template. Any thread may ask; what was written lately is kept, since
    every step of a run demands the same: twenty tools take 5 to 40 ms."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        gaps: Gaps,
        markup: Markup,
        writings: Sequence[CallWriting],
        words: tuple[str, str] | None = None,
    ) -> None:
        """`writings`: the ways to write calls, none where none is known. `words`: what else may
        begin a text, at the start of a turn and behind a thought, where no value is wanted."""
        self._closer = gaps.thinking_to_text or gaps.thinking_to_call or ""
        self._core = self._closer.strip()  # what ends a thought; '' where there are none
        self._tokenizer = tokenizer
        self._gaps = gaps
        self._writings = tuple(writings)
        self._kept: dict[str, str] = {}  # demand -> grammar
        self._words = words
        calls = [marker.core for marker in markup.text if marker.target == "call"]
        others = [marker.core for marker in markup.start if marker.target != "text"]
        self._never = self._plain(calls)
        thoughts = [marker.core for marker in markup.thinking if marker.core != self._core]
        self._never_thought = self._plain(thoughts)
        self._never_first = self._plain(core for core in others if core not in calls)

    @property
    def writes_calls(self) -> bool:
        """Whether it is known how the template writes calls."""
        return bool(self._writings)

    @property
    def calls_after_text(self) -> bool:
        """Whether the template has a place for calls behind a text."""
        return any(writing.after_text is not None for writing in self._writings)

    def lark(self, demand: Demand) -> str:
        """The grammar, in llguidance's Lark."""
        key = json.dumps(vars(demand), default=vars)
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = self._lark(demand)
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = grammar
        return grammar

    def _lark(self, demand: Demand) -> str:
        rules = Rules(self._tokenizer)
        if demand.place == "text":
            return rules.text(self._text_goes_on(rules, demand))
        behind = self._thought(rules, demand)
        if demand.place == "thinking" and behind is not None:
            return rules.text(behind)
        at_start = self._at_start(rules, demand)
        opener = self._written(self._gaps.to_thinking)
        if not (demand.thinks and opener and behind):
            return rules.text(at_start)
        return rules.text(f"{at_start} | {rules.begin(opener)} {rules.rule(behind)}")

    def _plain(self, cores: Iterable[str]) -> tuple[str, ...]:
        """Those that a text could hold: control tokens cannot stand in one anyway."""
        return tuple(core for core in cores if self._tokenizer.split_frame(core) == [core])

    def _written(self, gap: str | None) -> str:
        """What of a gap behind the generation opener the model writes itself."""
        opener = self._gaps.opener
        return gap[len(opener) :] if gap is not None and gap.startswith(opener) else ""

    def _thought(self, rules: Rules, demand: Demand) -> str | None:
        """The rest of a thought, and what follows it; None where the template knows no thoughts."""
        if not self._core:
            return None
        alternatives = []
        thought = rules.content(self._never_thought, ())
        if demand.choice != "required":
            answer = rules.rule(self._answer(rules, demand))
            closed = f"{rules.until(self._core, thought)} {_blanks(self._closer)}"
            alternatives.append(f"{closed} {answer}")
            if self._words is not None and demand.schema is None:
                alternatives.append(f"{rules.until(self._words[1], thought)} {answer}")
        for writing in self._writings if _calls(demand) else ():
            alternatives.append(self._calls_after_thought(rules, demand, writing))
        return " | ".join(alternatives) or None

    def _calls_after_thought(self, rules: Rules, demand: Demand, writing: CallWriting) -> str:
        """The rest of a thought, its end, and calls."""
        core, thought = self._core, rules.content(self._never_thought, ())
        gap = (writing.after_thought or self._closer + writing.at_start).lstrip()
        if not gap.startswith(core):
            head = rules.until(self._first(gap, writing), thought)
            return f"{head} {self._calls(rules, demand, writing, gap)}"
        behind = gap[len(core) :]
        gap = behind.lstrip()
        begin = rules.begin(self._first(gap, writing), blanks=behind != gap)
        calls = self._calls(rules, demand, writing, gap)
        return f"{rules.until(core, thought)} {begin} {calls}"

    def _at_start(self, rules: Rules, demand: Demand) -> str:
        alternatives = []
        if demand.choice != "required":
            alternatives.append(self._answer_at_start(rules, demand))
        for writing in self._writings if _calls(demand) else ():
            begin = rules.begin(self._first(writing.at_start, writing))
            calls = self._calls(rules, demand, writing, writing.at_start)
            alternatives.append(f"{begin} {calls}")
        return " | ".join(alternatives)

    def _answer_at_start(self, rules: Rules, demand: Demand) -> str:
        """With what the model writes before an answer, unless that ends a thought: whether there
        is one says the opener of this generation."""
        answer, opener = self._answer(rules, demand), self._written(self._gaps.to_text)
        thought = self._written(self._gaps.to_thinking).strip()
        if not opener.strip() or (self._core and self._core in opener):
            return answer
        if thought and opener.strip().startswith(thought):
            return answer
        openers = [opener]
        if self._words is not None and demand.schema is None:
            openers.append(self._words[0])
        return " | ".join(f"{rules.begin(one)} {rules.rule(answer)}" for one in openers)

    def _text_goes_on(self, rules: Rules, demand: Demand) -> str:
        if demand.choice == "required" and self.calls_after_text:
            return self._text_then_calls(rules, demand)
        return self._answer(rules, demand)

    def _answer(self, rules: Rules, demand: Demand) -> str:
        """A text, then perhaps calls; or a value."""
        if demand.schema is not None:
            return rules.value(demand.schema, SPELLING)
        text = rules.rule(rules.content(self._never, self._never_first))
        if not _calls(demand) or not self.calls_after_text:
            return text
        return f"{text} | {self._text_then_calls(rules, demand)}"

    def _text_then_calls(self, rules: Rules, demand: Demand) -> str:
        """A text and calls behind it: the text ends where the first call's marker begins."""
        content = rules.content(self._never, self._never_first)
        alternatives = []
        for writing in self._writings:
            if writing.after_text is not None:
                gap = writing.after_text.lstrip()
                text = rules.until(self._first(gap, writing), content)
                alternatives.append(f"{text} {self._calls(rules, demand, writing, gap)}")
        return " | ".join(alternatives)

    def _first(self, gap: str, writing: CallWriting) -> str:
        """With what a call behind this gap begins: its first control token, or its text up to the
        first control token or slot. One lexeme, so that it can be told from a text."""
        head = writing.unit[0]
        literal = gap + (head.text if isinstance(head, Literally) else "")
        first = self._tokenizer.split_frame(literal)[:1]
        return "".join(self._tokenizer.decode([p]) if isinstance(p, int) else p for p in first)

    def _calls(self, rules: Rules, demand: Demand, writing: CallWriting, gap: str) -> str:
        """One call or several, and the end of their section; `_first(gap)` is written already."""
        opened = self._first(gap, writing)
        calls = [_call(rules, writing, tool, gap, opened) for tool in demand.tools]
        more = ""
        if demand.parallel and writing.between is not None:
            others = [_call(rules, writing, tool, writing.between, "") for tool in demand.tools]
            more = f"{rules.rule(' | '.join(others))}*"
        return f"{rules.rule(' | '.join(calls))} {more} {rules.literal(writing.end)}".strip()


def _call(rules: Rules, writing: CallWriting, tool: ToolShape, gap: str, opened: str) -> str:
    """A call of one tool behind a gap, without what was `opened` of both."""
    options = [_unit(rules, writing, tool, gap, opened)]
    if writing.bare != writing.unit and not tool.parameters.get("required"):
        bare = _unit(rules, replace(writing, unit=writing.bare), tool, gap, opened)
        if not tool.parameters.get("properties"):
            return bare
        options.append(bare)
    return " | ".join(options)


def _unit(rules: Rules, writing: CallWriting, tool: ToolShape, gap: str, opened: str) -> str:
    parts, written = writing.unit, list[str]()
    before = gap + (parts[0].text if isinstance(parts[0], Literally) else "")
    before = before.removeprefix(opened)
    for part in parts[1:] if isinstance(parts[0], Literally) else parts:
        if isinstance(part, Literally):
            before += part.text
            continue
        if part == "arguments":
            written.append(spell(rules, writing.arguments, tool.parameters, before=before))
        else:
            slot = quoted(tool.name) if part == "name" else _ID if part == "id" else _INDEX
            written.append(f"{rules.literal(before)} {slot}")
        before = ""
    return " ".join([*written, rules.literal(before)]).strip()


def _calls(demand: Demand) -> bool:
    return demand.choice != "none" and bool(demand.tools)


def _blanks(closer: str) -> str:
    """Blanks that may follow a marker."""
    return BLANKS if closer != closer.rstrip() else ""

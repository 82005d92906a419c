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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .call_spelling import Literally, Part
from .call_writing import CallWriting
from .lark import Rules, quoted
from .markup import Gaps
from .spelled_arguments import SPELLING, spell
from .tokenizer import Tokenizer

Choice = Literal["none", "auto", "required"]
Place = Literal["start", "thinking", "text"]

_ID = "/[a-zA-Z0-9]{9}/"
_INDEX = "/[0-9]{1,3}/"


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
    """Writes grammars for one template. Immutable."""

    def __init__(self, tokenizer: Tokenizer, gaps: Gaps, writing: CallWriting | None) -> None:
        self._tokenizer = tokenizer
        self._gaps = gaps
        self._writing = writing

    @property
    def writes_calls(self) -> bool:
        """Whether it is known how the template writes calls."""
        return self._writing is not None

    def lark(self, demand: Demand) -> str:
        """The grammar, in llguidance's Lark."""
        rules = Rules(self._tokenizer)
        if demand.place == "text":
            return rules.text(self._text_goes_on(rules, demand))
        behind = self._thought(rules, demand)
        if demand.place == "thinking" and behind is not None:
            return rules.text(behind)
        at_start = self._at_start(rules, demand)
        opener = self._thought_opener()
        if not (demand.thinks and opener and behind):
            return rules.text(at_start)
        return rules.text(f"{at_start} | {rules.literal(opener)} {rules.rule(behind)}")

    def _thought_opener(self) -> str:
        """What the model writes itself to begin a thought."""
        gap = self._gaps.to_thinking
        if gap is None or not gap.startswith(self._gaps.opener):
            return ""
        return gap[len(self._gaps.opener) :]

    def _thought(self, rules: Rules, demand: Demand) -> str | None:
        """The rest of a thought, and what follows it; None where the template knows no thoughts."""
        to_text, writing = self._gaps.thinking_to_text, self._writing
        closer = to_text or self._gaps.thinking_to_call
        if closer is None or not closer.strip():
            return None
        alternatives = []
        core = closer.strip()
        if demand.choice != "required":
            answer = rules.rule(self._answer(rules, demand))
            alternatives.append(f"{rules.until(core)} {_blanks(closer)} {answer}")
        if writing is not None and _calls(demand):
            gap = writing.after_thought
            if gap is None or not gap.strip().startswith(core):
                gap = (gap or closer) + ("" if gap else writing.at_start)
            calls = self._calls(rules, demand)
            begin = gap.lstrip()
            if begin.startswith(core):
                rest = rules.literal(begin[len(core) :].lstrip())
                head = f"{rules.until(core)} {_blanks(begin[len(core) :])} {rest}"
            else:
                head = rules.until(begin)
            alternatives.append(f"{head} {calls}")
        return " | ".join(alternatives) or None

    def _at_start(self, rules: Rules, demand: Demand) -> str:
        writing = self._writing
        alternatives = []
        if demand.choice != "required":
            alternatives.append(self._answer(rules, demand))
        if writing is not None and _calls(demand):
            calls = self._calls(rules, demand)
            alternatives.append(f"{rules.literal(writing.at_start)} {calls}".strip())
        return " | ".join(alternatives)

    def _text_goes_on(self, rules: Rules, demand: Demand) -> str:
        if demand.choice == "required" and self._writing is not None:
            return self._text_then_calls(rules, demand)
        return self._answer(rules, demand)

    def _answer(self, rules: Rules, demand: Demand) -> str:
        """A text, then perhaps calls; or a value."""
        if demand.schema is not None:
            return rules.value(demand.schema, SPELLING)
        writing = self._writing
        if writing is None:
            return rules.without([])
        if not _calls(demand):
            return rules.without(self._call_openings())
        if writing.after_text is None:
            return rules.not_beginning(self._opening(writing.at_start))
        plain = rules.without(self._call_openings())
        return f"{plain} | {self._text_then_calls(rules, demand)}"

    def _text_then_calls(self, rules: Rules, demand: Demand) -> str:
        """A text and calls behind it: the text ends where the first call's marker begins."""
        assert self._writing is not None
        gap = (self._writing.after_text or "").lstrip()
        first = self._opening(gap)
        return f"{rules.until(first)} {self._calls(rules, demand, opened=first, gap=gap)}"

    def _call_openings(self) -> list[str]:
        """Literals that no text may hold, as a call would begin there."""
        writing = self._writing
        if writing is None:
            return []
        places = [writing.at_start, writing.after_text]
        return [self._opening(place) for place in places if place is not None]

    def _opening(self, gap: str) -> str:
        """The first marker of a call behind this gap: its first control token, or the plain text
        up to the first slot."""
        assert self._writing is not None
        head = self._writing.unit[0]
        literal = (gap + (head.text if isinstance(head, Literally) else "")).lstrip()
        first = self._tokenizer.split_frame(literal)[0]
        if isinstance(first, int):
            return self._tokenizer.decode([first])
        return first.rstrip() if len(first.rstrip()) < len(literal) else first

    def _calls(self, rules: Rules, demand: Demand, *, opened: str = "", gap: str = "") -> str:
        """One call or several, and the end of their section. `opened`: what of gap and first call
        is written already."""
        writing = self._writing
        assert writing is not None
        one = rules.rule(" | ".join(self._call(rules, tool, "") for tool in demand.tools))
        first = one
        if opened:
            begun = [self._call(rules, tool, opened, gap) for tool in demand.tools]
            first = rules.rule(" | ".join(begun))
        more = ""
        if demand.parallel and writing.between is not None:
            others = (self._call(rules, tool, "", writing.between) for tool in demand.tools)
            more = f"{rules.rule(' | '.join(others))}*"
        return f"{first} {more} {rules.literal(writing.end)}".strip()

    def _call(self, rules: Rules, tool: ToolShape, opened: str, gap: str = "") -> str:
        """A call of one tool, without what was `opened` of it."""
        writing = self._writing
        assert writing is not None
        options = [self._unit(rules, writing.unit, tool, opened, gap)]
        if writing.bare != writing.unit and not tool.parameters.get("required"):
            bare = self._unit(rules, writing.bare, tool, opened, gap)
            if not tool.parameters.get("properties"):
                return bare
            options.append(bare)
        return " | ".join(options)

    def _unit(
        self, rules: Rules, parts: Sequence[Part], tool: ToolShape, opened: str, gap: str
    ) -> str:
        assert self._writing is not None
        written: list[str] = []
        first = parts[0]
        before = gap + (first.text if isinstance(first, Literally) else "")
        before = before.removeprefix(opened) if opened else before
        parts = parts[1:] if isinstance(first, Literally) else parts
        for part in parts:
            if isinstance(part, Literally):
                before += part.text
                continue
            if part == "arguments":
                arguments = self._writing.arguments
                written.append(spell(rules, arguments, tool.parameters, before=before))
            else:
                slot = quoted(tool.name) if part == "name" else _ID if part == "id" else _INDEX
                written.append(f"{rules.literal(before)} {slot}")
            before = ""
        return " ".join([*written, rules.literal(before)]).strip()


def _calls(demand: Demand) -> bool:
    return demand.choice != "none" and bool(demand.tools)


def _blanks(closer: str) -> str:
    """Blanks that may follow a marker."""
    return "/[ \\n]{0,3}/" if closer[len(closer.rstrip()) :] else ""

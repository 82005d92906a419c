# SPDX-License-Identifier: Apache-2.0
"""One parse for every chunking, in every format of calls that templates show or names stand for.

A scripted turn (a thought, a text, up to three calls with hostile arguments, a text behind them) is
laid out by the format and cut into ids anywhere: inside markers, characters and escapes. The script
is the oracle; what streams must join to it.
"""

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from freetoken_agent.call_formats.call_format import QuotedCalls, TaggedCalls
from freetoken_agent.call_formats.call_spelling import Literally
from freetoken_agent.call_formats.call_writing import CallWriting, learn_call_writing
from freetoken_agent.call_formats.named_formats import FORMATS
from freetoken_agent.chat_templates.markup import beyond
from freetoken_agent.chat_templates.markup_probes import find_gaps
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.parsing import (
    CallDelta,
    CallStarted,
    ParseEvent,
    SegmentDone,
    StreamParser,
    TextDelta,
    ThinkingDelta,
)
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tooling.json_values import equal

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
UNLEARNABLE = "fireworks-ai-llama-3-firefunction-v2"  # refuses a user's message and an answer
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.stem != UNLEARNABLE)
ALL = [f"template {name}" for name in TEMPLATES] + [f"format {name}" for name in FORMATS]
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
CONTROL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|\[[A-Z_/]{4,}\]|<\|\"\|>|</?tool_call\|?>")


INDENTED = "\x85\u2028\u2029"  # line ends to Jinja's `indent`, which puts blanks behind them


class Chunks(ByteTokenizer):
    """Bytes and controls, and an id for every piece of bytes that a cutting makes."""

    def __init__(self, controls: Sequence[str]) -> None:
        super().__init__(controls, special_tokens=SPECIAL)
        self._controls = 256 + len(controls)

    def id_of(self, piece: bytes) -> int:
        if len(piece) == 1:
            return piece[0]
        self._pieces.append(piece)
        return len(self._pieces) - 1

    def is_control(self, token_id: int) -> bool:
        return 256 <= token_id < self._controls

    def forget(self) -> None:
        del self._pieces[self._controls :]


@dataclass(frozen=True)
class Setup:
    """A format of calls. `control`: whether its tags are control tokens."""

    format: ChatFormat
    tokenizer: Chunks
    writing: CallWriting


@cache
def learned(name: str, control: bool) -> Setup:
    kind, _, which = name.partition(" ")
    source, chosen = PLAIN, which if kind == "format" else None
    if chosen is None:
        source = (FOLDER / f"{which}.jinja").read_text(encoding="utf-8")
    tags = source + "".join(FORMATS[chosen].literals.values() if chosen else ())
    found = CONTROL.findall(tags) if control else ()
    stops = ("<|im_start|>", "<|im_end|>", *SPECIAL.values())
    tokenizer = Chunks(
        list(dict.fromkeys((*(CHATML_CONTROLS if control else stops), *stops, *found)))
    )
    format = ChatFormat.learn(source, tokenizer, call_format=chosen)
    writing = learn_call_writing(format.grammar, format.markup, find_gaps(format.grammar))
    assert writing is not None
    return Setup(format, tokenizer, writing)


@dataclass(frozen=True)
class Script:
    """A turn as it is meant."""

    thought: str | None
    text: str | None
    calls: list[tuple[str, dict[str, Any]]]
    after: str | None
    spelling: int  # of JSON: as the template, in ASCII, compact, indented

    def contents(self, start: str) -> list[Item]:
        thought = self.thought or ("Hm." if start == "thinking" else None)
        items = [] if thought is None else [Item("thinking", thought, open=True)]
        text = self.text or (None if self.calls else "So.")
        items += [] if text is None else [Item("text", text, open=bool(self.calls))]
        items += [
            Item("tool_call", name=name, arguments=arguments, call_id=f"call{i:05d}", open=True)
            for i, (name, arguments) in enumerate(self.calls)
        ]
        return items


HOSTILE = (
    "</tool_call>", "<tool_call>", "</parameter", "</think>", "<think>", '"}}', '"', "\\", "\n",
    "\\n", "]", "}", "{", "[", "'", ")", ", ", '{"name": "x", "arguments": {}}', "\U0001f600", "é",
    "\u2028", "\x7f", "<|call|>", "<|im_end|>", "[TOOL_CALLS]", "```", "</invoke>", "\t", "a" * 80,
    "<｜tool▁call▁end｜>", "<|tool_call_end|>", "</arg_value", "</function>", "1e5", "null", " ",
)  # fmt: skip
STRINGS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=6).map("".join)
NUMBERS = st.integers(-(10**15), 10**15) | st.sampled_from([1e5, -2.5e-7, 1e22, 0.1, 0.0])
LEAVES = st.none() | st.booleans() | NUMBERS | STRINGS
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
WORDS = st.text("abc é\U0001f600.,!<[{|`\n", min_size=1, max_size=30).map(str.strip).filter(bool)
CALLS = st.tuples(
    st.sampled_from(["look_up", "f", "get-x2"]), st.dictionaries(KEYS, VALUES, max_size=4)
)
SCRIPTS = st.builds(
    Script,
    st.none() | WORDS,
    st.none() | WORDS,
    st.lists(CALLS, max_size=3),
    st.none() | WORDS,
    st.integers(0, 3),
)
SETTINGS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)


@dataclass
class Parsed:
    """What came out, in the order of events."""

    done: list[SegmentDone] = field(default_factory=list)
    deltas: dict[str, str] = field(default_factory=dict)  # all of a kind, joined
    started: list[tuple[int, str]] = field(default_factory=list)

    def take(self, events: Sequence[ParseEvent]) -> None:
        for event in events:
            match event:
                case SegmentDone():
                    self.done.append(event)
                case CallStarted(index, name):
                    self.started.append((index, name))
                case CallDelta(index, text):
                    assert self.started[-1][0] == index, "a call's text before its name"
                    self._add(f"call {index}", text)
                case ThinkingDelta(text):
                    self._add("thinking", text)
                case TextDelta(text):
                    self._add("text", text)

    def _add(self, key: str, text: str) -> None:
        self.deltas[key] = self.deltas.get(key, "") + text


def parse(setup: Setup, ids: Sequence[int], kind: Any) -> Parsed:
    parser, parsed = StreamParser(setup.format, setup.tokenizer, kind=kind), Parsed()
    for token_id in ids:
        parsed.take(parser.feed(token_id))
    parsed.take(parser.finish("stop"))
    return parsed


def laid_out(setup: Setup, script: Script) -> tuple[list[Item], list[str], Any]:
    """The contents, the pieces of what the model writes (gap, content, gap …), and what it begins
    with. Scripts for which the template has no place are left out."""
    user = Item("user", "Go.")
    opener = setup.format.opener([user])
    items = script.contents(opener.kind)
    try:
        pieces = setup.format.layout([user, *items], start=1)
    except TemplateUnsupported:
        assume(False)
        raise
    begun = pieces[0].gap_text.startswith(opener.text)
    assume(begun or items[0].kind != "thinking")  # the opener begins the thought in its own way
    written = []
    for item, piece in zip(items, pieces, strict=True):
        text = piece.text
        if item.kind == "tool_call":
            text = respelled(text, item.arguments or {}, script.spelling)
        written += [piece.gap_text, text]
    written[0] = behind(opener.text, written[0])
    if script.calls:
        written.append(setup.writing.end)
    return items, written, opener.kind


def behind(opener: str, gap: str) -> str:
    """What of a gap the model writes behind the generation opener."""
    ending = max(size for size in range(len(gap) + 1) if opener.endswith(gap[:size]))
    if ending < len(os.path.commonprefix([opener, gap])):
        return beyond(opener, gap)
    return gap[ending:]


def respelled(unit: str, arguments: Mapping[str, object], spelling: int) -> str:
    """A call with its JSON written in another of the ways in which models write it."""
    ways: list[dict[str, Any]] = [
        {"ensure_ascii": False},
        {},
        {"separators": (",", ":"), "ensure_ascii": False},
        {"indent": 2},
    ]
    return unit.replace(
        json.dumps(arguments, ensure_ascii=False), json.dumps(arguments, **ways[spelling])
    )


def cut(setup: Setup, pieces: Sequence[str], rng: random.Random, size: int) -> list[int]:
    """Ids of about `size` bytes; control tokens are ids of their own. Pieces stay apart."""
    ids: list[int] = []
    for text in pieces:
        for part in setup.tokenizer.split_frame(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            data, start = part.encode(), 0
            while start < len(data):
                end = start + rng.randint(1, size)
                ids.append(setup.tokenizer.id_of(data[start:end]))
                start = end
    return ids


def suits(setup: Setup, script: Script) -> bool:
    """Whether the format can write the arguments: formats without escapes cannot write what closes
    a string, and control tokens cannot be told from their text by anybody."""
    calls = setup.format.markup.calls
    barred = [calls.close] if isinstance(calls, TaggedCalls) else []
    if isinstance(calls, QuotedCalls):
        barred = [calls.quotes.open, calls.quotes.close]
    strings = [text for _, arguments in script.calls for text in strings_of(arguments)]
    if any(tag.strip() in text for tag in barred for text in strings):
        return False
    if any(character in text for character in INDENTED for text in strings):
        return "\n    " not in joined(setup.writing)
    if isinstance(calls, TaggedCalls):
        tops = [v for _, arguments in script.calls for v in arguments.values()]
        if any(isinstance(v, str) and (reads_as_value(v) or v != v.strip()) for v in tops):
            return False
    return True


def joined(writing: CallWriting) -> str:
    return "".join(part.text for part in writing.unit if isinstance(part, Literally))


def strings_of(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in strings_of(item)]
    return [text for item in value for text in strings_of(item)] if isinstance(value, list) else []


def reads_as_value(text: str) -> bool:
    """Whether a string without quotes means another value: only a schema could tell."""
    try:
        return not isinstance(json.loads(text), str)
    except ValueError:
        return False


def same(setup: Setup, found: object, wanted: object) -> bool:
    """Equal as JSON; some templates print values as Python does between tags."""
    if isinstance(setup.format.markup.calls, TaggedCalls):
        assert isinstance(found, dict) and isinstance(wanted, dict)
        words = {
            key: str(value)
            for key, value in wanted.items()
            if not isinstance(value, str) and found.get(key) == str(value)
        }
        wanted = {**wanted, **words}
    return equal(found, wanted)


def check(name: str, control: bool, script: Script, seed: int) -> None:
    setup = learned(name, control)
    assume(suits(setup, script))
    if name == "template openai-gpt-oss-120b":  # it shows a text before calls as a thought
        assume(script.text is None or not script.calls)
    items, pieces, kind = laid_out(setup, script)
    rng = random.Random(seed)
    after = script.after if script.calls else None
    setup.tokenizer.forget()
    whole = cut(setup, pieces, rng, 1 << 20)
    compare(setup, parse(setup, whole, kind), items, whole)
    assert [one.text for one in parse(setup, whole, kind).done] == pieces[1 : 2 * len(items) : 2]
    for size in (1, 3, 12):
        ids = cut(setup, pieces, rng, size)
        compare(setup, parse(setup, ids, kind), items, ids)
    for size in (4, 15):  # across the borders of contents, too, and with a text behind the calls
        ids = cut(setup, ["".join(pieces) + (after or "")], rng, size)
        compare_across(setup, parse(setup, ids, kind), items, ids, after)


def compare(setup: Setup, parsed: Parsed, items: list[Item], ids: list[int]) -> None:
    """The script, where ids keep to the borders of contents."""
    done = parsed.done
    assert [one.kind for one in done] == [item.kind for item in items]
    for one, item in zip(done, items, strict=True):
        if item.kind == "tool_call":
            assert one.name == item.name
            assert same(setup, one.arguments, item.arguments), (one.text, one.arguments)
            index = sum(other.kind == "tool_call" for other in done[: done.index(one)])
            assert parsed.deltas[f"call {index}"] == one.text
        else:
            assert one.text == item.text
    for kind in ("thinking", "text"):
        said = "".join(item.text for item in items if item.kind == kind)
        assert parsed.deltas.get(kind, "") == said
    held_once(setup, parsed, ids)


def compare_across(
    setup: Setup, parsed: Parsed, items: list[Item], ids: list[int], after: str | None
) -> None:
    """Ids that hold both sides of a border stay with one of them, so that texts may be longer."""
    found = [one for one in parsed.done if one.kind == "tool_call"]
    wanted = [item for item in items if item.kind == "tool_call"]
    assert [one.name for one in found] == [item.name for item in wanted]
    for one, item in zip(found, wanted, strict=True):
        assert same(setup, one.arguments, item.arguments), (one.text, one.arguments)
    kinds = [one.kind for one in parsed.done if one.kind != "tool_call"]
    said = [item for item in items if item.kind != "tool_call"]
    allowed = [*(item.kind for item in said), *(["text"] if after else [])]
    assert is_within(kinds, allowed), "a content that was not there"
    everything = "".join(one.text for one in parsed.done)
    assert is_within("".join(item.text.strip() for item in said), everything)
    held_once(setup, parsed, ids)


def is_within(small: Sequence[str], large: Sequence[str]) -> bool:
    """Whether the one is the other without some of its members."""
    rest = iter(large)
    return all(one in rest for one in small)


def held_once(setup: Setup, parsed: Parsed, ids: list[int]) -> None:
    """Every id in one place, in order; only frame may be left over. What streams joins to texts."""
    held = [token_id for one in parsed.done for token_id in (*one.gap_ids, *one.ids)]
    assert held == ids[: len(held)]
    position = 0
    for one in parsed.done:
        position += len(one.gap_ids)
        assert one.text == setup.tokenizer.decode(one.ids, after=ids[:position])
        position += len(one.ids)
    calls = [one for one in parsed.done if one.kind == "tool_call"]
    assert parsed.started == [(index, call.name) for index, call in enumerate(calls)]
    for index, call in enumerate(calls):
        again = setup.format.markup.calls
        assert again is not None
        read = again.parse(parsed.deltas[f"call {index}"])
        assert read is not None and dict(read.arguments) == call.arguments
    for kind in ("thinking", "text"):
        said = "".join(one.text for one in parsed.done if one.kind == kind)
        assert parsed.deltas.get(kind, "") == said


@pytest.mark.parametrize("control", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", ALL)
def test_every_chunking_gives_the_script(name: str, control: bool) -> None:
    """Oracle: the script. A few for each format."""
    settings(SETTINGS, max_examples=6)(
        given(SCRIPTS, st.integers(0, 1 << 32))(lambda s, seed: check(name, control, s, seed))
    )()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", ALL)
def test_500_scripts_in_every_format(name: str, control: bool) -> None:
    """The same, 500 for each format: 250 with its tags as tokens, 250 as text."""
    settings(SETTINGS, max_examples=250)(
        given(SCRIPTS, st.integers(0, 1 << 32))(lambda s, seed: check(name, control, s, seed))
    )()

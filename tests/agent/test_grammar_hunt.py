# SPDX-License-Identifier: Apache-2.0
"""Random tools, schemas and ids on every template, with control tokens and without: whatever a
grammar lets through is read back as calls that fit, and what the template writes is let through.

No model: ids are drawn from what is allowed, with a liking for what closes things and for
literals that mean something to the parser. The oracles are the stream parser, which does not know
the grammar, `jsonschema`, and the template's own rendering."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from freetoken_agent.call_formats.call_writing import CallWriting, learn_call_writing
from freetoken_agent.chat_templates.markup_probes import find_gaps
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.grammar import Choice, Demand, Place, ToolShape
from freetoken_agent.grammars.constraint import GrammarConstraint, vocabulary
from freetoken_agent.parsing import SegmentDone, parse_turn
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tooling.coercion import coerce

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
CONTROL = re.compile(
    r"<[|｜][^<>\s]{1,30}[|｜]>|\[(?:TOOL_CALLS|ARGS|CALL_ID|/?INST)\]|</?arg_\w+>"
)
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
PLACES: tuple[Place, ...] = ("start", "text", "thinking")
SPELLINGS = ("tokens", "plain")  # whether the template's literals are tokens of their own
SEEDS = [pytest.param(range(1)), pytest.param(range(1, 25), marks=pytest.mark.slow)]
FORMATS = jsonschema.FormatChecker(("date", "ipv4", "email"))


class Writer:
    """A template, its tokenizer, and what a model writes of its calls."""

    def __init__(self, name: str, spelling: str) -> None:
        source = CHATML if name == "chatml" else (FOLDER / name).read_text(encoding="utf-8")
        found = [*CHATML_CONTROLS, *SPECIAL.values(), *CONTROL.findall(source)]
        controls = list(dict.fromkeys(found)) if spelling == "tokens" else []
        self.tokenizer = ByteTokenizer(controls or CHATML_CONTROLS, special_tokens=SPECIAL)
        self.format = ChatFormat.learn(source, self.tokenizer)
        self.stops = self.tokenizer.stop_ids | self.format.closers
        grammar, markup = self.format.grammar, self.format.markup
        writing = learn_call_writing(grammar, markup, find_gaps(grammar))
        assert writing is not None
        self.writing: CallWriting = writing

    def constraint(self, demand: Demand) -> GrammarConstraint:
        lark = self.format.writer.lark(demand)
        return vocabulary(self.tokenizer, self.stops).constraint(lark)

    def allowed(self, constraint: GrammarConstraint) -> list[int]:
        row = np.zeros(self.tokenizer.vocab_size, dtype=np.float32)
        constraint.mask(row)
        return [int(i) for i in np.flatnonzero(row == 0)]

    def feed(self, constraint: GrammarConstraint, ids: Sequence[int]) -> list[int]:
        """Those of the ids that are allowed, up to the first that is not."""
        fed: list[int] = []
        for token_id in ids:
            if token_id in self.stops or token_id not in self.allowed(constraint):
                break
            constraint.accept(token_id)
            fed.append(token_id)
        return fed

    def literals(self) -> list[str]:
        """What has a meaning for the parser, and pieces of it."""
        markup, writing = self.format.markup, self.writing
        groups = (markup.start, markup.text, markup.thinking, markup.after_call)
        found = [text for group in groups for m in group for text in (m.core, m.unit)]
        found += [part.text for part in writing.unit if not isinstance(part, str)]
        found += [writing.at_start, writing.after_text or "", writing.between or "", writing.end]
        found += [str(value) for value in vars(writing.arguments).values() if value]
        found += [self.call("get", {"x": "v"}), self.call("bogus", {}), markup.call_end]
        words = '\n|\n\n| |{|}|"|{"a": "|}}|, |</tool_call>|</function>|</think>|get|hello'
        return [text for text in (*found, *words.split("|")) if text]

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        call = Item("tool_call", name=name, arguments=dict(arguments), call_id="aaaaaaaa1")
        return self.format.layout([Item("user", "?"), call], start=1)[0].text


@cache
def _writer(name: str, spelling: str) -> Writer:
    return Writer(name, spelling)


def writer_of(name: str, spelling: str) -> Writer:
    try:
        return _writer(name, spelling)
    except TemplateUnsupported:
        pytest.skip("the template refuses every conversation of ours")


def names() -> list[str]:
    return ["chatml", *sorted(path.name for path in FOLDER.glob("*.jinja"))]


def text_schema(rng: random.Random) -> dict[str, Any]:
    bounds: dict[str, Any] = rng.choice(
        [
            {"maxLength": rng.choice((0, 1, 5, 9))},
            {"minLength": 2, "maxLength": 4},
            {"pattern": "^[a-c]{1,3}$"},
            {"pattern": "[0-9]", "maxLength": 6},
            {"pattern": "^a+b?$|^c/d", "maxLength": 7},
            {"format": rng.choice(("date", "ipv4", "email"))},
        ]
    )
    return {"type": "string", **bounds}


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        text_schema(rng),
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100},
        {"type": rng.choice(("boolean", "null"))},
        {"enum": rng.sample(["a", "ö", "b c", "x\ny", "a<b", "", "5", "true"], 3)},
        {"enum": rng.sample(["a", "b c", 1, None, True, "5", 2.5], 3)},
        {"const": rng.choice(("k", 3, None, "7"))},
        {"type": ["string", "null"], "maxLength": 5},
        {"anyOf": [{"type": ["integer", "null"], "maximum": 9}, text_schema(rng)]},
        {"allOf": [{"$ref": "#/$defs/kind"}]},
        {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}},
    ]
    if depth == 2 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.4:
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    if rng.random() < 0.5:
        return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 2}
    return record(rng, depth + 1)


def record(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = rng.sample(["name", "größe", "x", "items", "is_ok", "tree"], rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {key: schema(rng, depth) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def tools(rng: random.Random) -> tuple[ToolShape, ...]:
    """Names that begin alike, schemas with a definition that refers to itself."""
    kind = {"type": "string", "enum": ["noun", "verb"]}
    node = {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": 3},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["label"],
        "additionalProperties": False,
    }
    made = []
    for name in rng.sample(["get", "get_x", "list-files", "a.b"], rng.randint(1, 3)):
        parameters: dict[str, Any] = {**record(rng), "$defs": {"kind": kind, "node": node}}
        if rng.random() < 0.3:
            parameters["properties"]["node"] = {"$ref": "#/$defs/node"}
        made.append(ToolShape(name, parameters))
    return tuple(made)


def walk(writer: Writer, demand: Demand, rng: random.Random) -> tuple[list[int], bool]:
    """Ids that were let through, and whether they are complete. On the way: there is always a way
    on, what is forced is allowed, and a copy leads a life of its own."""
    constraint = writer.constraint(demand)
    literals = writer.literals()
    ids: list[int] = []
    while len(ids) < 500:
        if rng.random() < 0.08:
            spelled = rng.choice((writer.tokenizer.encode_frame, writer.tokenizer.encode_content))
            ids += writer.feed(constraint, spelled(rng.choice(literals)))
        allowed = writer.allowed(constraint)
        assert allowed, writer.tokenizer.decode(ids)
        if rng.random() < 0.03:
            forced = list(constraint.forced())
            assert writer.feed(constraint.copy(), forced) == forced
            assert writer.allowed(constraint) == allowed
        ends = writer.stops.intersection(allowed)
        assert bool(ends) == constraint.accepting
        if ends and (len(ends) == len(allowed) or rng.random() < 0.3):
            return ids, True
        inner = [i for i in allowed if i not in writer.stops]
        liked = [i for i in inner if i >= 256 or chr(i) in '"}]<,/e)>']
        drawn = rng.choice(liked if liked and rng.random() < 0.6 else inner)
        constraint.accept(drawn)
        ids.append(drawn)
    return ids, False


def segments_in(
    writer: Writer, ids: Sequence[int], place: Place, complete: bool
) -> list[SegmentDone]:
    kind: Any = "thinking" if place == "thinking" else "text"
    reason: Any = "stop" if complete else "length"
    events = parse_turn(writer.format, writer.tokenizer, ids, kind=kind, reason=reason)
    return [event for event in events if isinstance(event, SegmentDone)]


def calls_in(writer: Writer, ids: Sequence[int], place: Place, complete: bool) -> list[SegmentDone]:
    done = segments_in(writer, ids, place, complete)
    return [segment for segment in done if segment.kind == "tool_call"]


def check(calls: Sequence[SegmentDone], offered: Sequence[ToolShape]) -> None:
    """Each is a call of an offered tool; its arguments, read as sessions do, fit its schema."""
    schemas = {tool.name: tool.parameters for tool in offered}
    for call in calls:
        assert call.name in schemas and call.arguments is not None, call.text
        wanted = schemas[call.name]
        read = coerce(call.arguments if call.texts is None else call.texts, wanted, wanted)
        jsonschema.validate(json.loads(json.dumps(read)), wanted, format_checker=FORMATS)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", names())
def test_demanded_calls_are_read_back_and_fit(name: str, spelling: str, seeds: range) -> None:
    """Oracle: the parser and jsonschema, formats of texts included."""
    writer, finished = writer_of(name, spelling), 0
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        offered, parallel = tools(rng), rng.random() < 0.5
        demand = Demand("start", "required", offered, parallel=parallel, thinks=False)
        ids, complete = walk(writer, demand, rng)
        calls = calls_in(writer, ids, "start", complete)
        check(calls, offered)
        finished += complete
        assert not complete or calls, writer.tokenizer.decode(ids)
        assert len(calls) < 2 or parallel
    assert finished > len(seeds) // 2 or len(seeds) == 1


def pieced(writer: Writer, demand: Demand, rng: random.Random) -> tuple[list[int], bool]:
    """Literals in any order, as far as each is allowed."""
    constraint, ids = writer.constraint(demand), list[int]()
    literals = writer.literals()
    for _ in range(rng.randint(2, 12)):
        spelled = writer.tokenizer.encode_frame
        if rng.random() < 0.2:
            spelled = writer.tokenizer.encode_content
        ids += writer.feed(constraint, spelled(rng.choice(literals)))
        assert writer.allowed(constraint), writer.tokenizer.decode(ids)
    return ids, constraint.accepting


@pytest.mark.parametrize("seeds", [pytest.param(range(3)), *SEEDS[1:]])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", names())
def test_no_text_and_no_thought_holds_a_call_that_nothing_binds(
    name: str, spelling: str, seeds: range
) -> None:
    """Oracle: the parser: with `none` it finds no call; with `auto` those it finds fit."""
    writer = writer_of(name, spelling)
    text = {"type": "string", "maxLength": 3}
    bound = {"type": "object", "properties": {"x": text}, "additionalProperties": False}
    offered = (ToolShape("get", {**bound, "required": ["x"]}), ToolShape("put", bound))
    choices: tuple[Choice, ...] = ("none", "auto")
    for seed in seeds:
        for choice in choices:
            rng = random.Random(f"{name} {seed}")
            place = PLACES[seed % 3]
            demand = Demand(place, choice, offered, thinks=rng.random() < 0.5)
            ids, complete = pieced(writer, demand, rng)
            calls = calls_in(writer, ids, place, complete)
            assert not calls or choice == "auto", writer.tokenizer.decode(ids)
            check(calls, offered)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", names())
def test_an_answer_is_a_value_that_fits_or_a_call_that_does(
    name: str, spelling: str, seeds: range
) -> None:
    """Oracle: the parser and jsonschema, at the start of a turn and inside of a thought."""
    writer = writer_of(name, spelling)
    for seed in seeds:
        for place in PLACES[::2]:
            rng = random.Random(f"{name} {seed} {place}")
            offered = tools(rng)
            wanted = {**record(rng), "$defs": offered[0].parameters["$defs"]}
            kept = offered if rng.random() < 0.5 else ()
            demand = Demand(place, "auto", kept, schema=wanted, thinks=rng.random() < 0.3)
            ids, complete = walk(writer, demand, rng)
            done = segments_in(writer, ids, place, complete)
            calls = [segment for segment in done if segment.kind == "tool_call"]
            check(calls, kept)
            if complete and not calls:
                answer = "".join(segment.text for segment in done if segment.kind == "text")
                jsonschema.validate(json.loads(answer), wanted, format_checker=FORMATS)


ARGUMENTS: Sequence[tuple[dict[str, Any], bool]] = (
    ({"word": "heron"}, True),
    ({"count": 3, "word": 'a</b> "c"'}, True),
    ({"count": 12}, False),
    ({"word": "too long a word"}, False),
)


def conversations(writer: Writer) -> Iterator[tuple[str, bool, bool]]:
    """What a model writes: a text with calls or calls alone; whether there is a text; and whether
    the arguments are good."""
    writing = writer.writing
    for arguments, good in ARGUMENTS:
        for count in (1, 2):
            items = [Item("user", "?")]
            for number in range(count):
                call = Item(
                    "tool_call", name="look_up", arguments=arguments, call_id=f"aaaaaaaa{number}"
                )
                items.append(call)
            if count == 2 and writing.between is None:
                continue
            units = [piece.text for piece in writer.format.layout(items, start=1)]
            calls = (writing.between or "").join(units) + writing.end
            yield writing.at_start + calls, False, good
            if writing.after_text is not None:
                yield "Let me look." + writing.after_text + calls, True, good


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", names())
def test_calls_as_the_template_writes_them_are_let_through(name: str, spelling: str) -> None:
    """Oracle: the template's own rendering of the calls, which `auto` and `required` let through
    and `none` does not; and none of them where an argument does not fit."""
    if "Apriel" in name or name.startswith("CohereForAI"):
        pytest.skip("it writes calls of earlier turns otherwise than a model shall")
    writer = writer_of(name, spelling)
    parameters = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "maximum": 9},
            "word": {"type": "string", "maxLength": 9},
        },
        "required": ["word"],
        "additionalProperties": False,
    }
    choices: tuple[Choice, ...] = ("none", "auto", "required")
    opener = find_gaps(writer.format.grammar)
    for choice in choices:
        demand = Demand("start", choice, (ToolShape("look_up", parameters),), thinks=False)
        for text, has_text, good in conversations(writer):
            if has_text and name.startswith("openai-gpt-oss"):
                text = (opener.to_text or "").removeprefix(opener.opener) + text
            ids = writer.tokenizer.encode_frame(text)
            constraint = writer.constraint(demand)
            fed = writer.feed(constraint, ids)
            whole = fed == list(ids) and constraint.accepting
            wanted = good and choice != "none" and not (has_text and choice == "required")
            assert whole is wanted, (choice, text, writer.tokenizer.decode(fed))


def test_a_value_does_not_hold_the_token_that_ends_it_as_plain_text() -> None:
    """Oracle: what was written as plain text would be read as the value's end."""
    if not FOLDER.is_dir():
        pytest.skip("the folder of real templates, ../shared/templates, is not here")
    writer = _writer("GLM-4.6.jinja", "tokens")
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    demand = Demand("start", "required", (ToolShape("put", parameters),), thinks=False)
    constraint = writer.constraint(demand)
    tokenizer = writer.tokenizer
    begin = tokenizer.encode_frame("<tool_call>put\n<arg_key>x</arg_key>\n<arg_value>")
    assert writer.feed(constraint, begin) == list(begin)
    plain = tokenizer.encode_content("a </arg_value")
    assert writer.feed(constraint, plain) == list(plain)
    assert ord(">") not in writer.allowed(constraint)
    assert ord("|") in writer.allowed(constraint)

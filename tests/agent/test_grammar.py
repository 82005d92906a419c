# SPDX-License-Identifier: Apache-2.0
"""Grammars of calls: whatever they let through is read back as calls that fit their schemas.

A walk draws ids from what a grammar allows, without a model. The oracles are the stream parser,
which does not know the grammar, and `jsonschema`."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.grammar import Demand, Place, ToolShape
from freetoken_agent.grammars.constraint import GrammarConstraint, vocabulary
from freetoken_agent.parsing import SegmentDone, StreamParser
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tooling.coercion import coerce

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
CONTROL = re.compile(r"<[|｜][^<>\s]{1,30}[|｜]>|\[(?:TOOL_CALLS|ARGS|CALL_ID|/?INST)\]")
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
TOOLS = (
    ToolShape("ping", {"type": "object", "properties": {}}),
    ToolShape(
        "look_up",
        {
            "type": "object",
            "properties": {
                "word": {"type": "string", "maxLength": 8},
                "count": {"type": "integer", "minimum": 0, "maximum": 99},
                "kind": {"enum": ["noun", "verb"]},
                "sure": {"type": "boolean"},
            },
            "required": ["word", "count"],
            "additionalProperties": False,
        },
    ),
    ToolShape(
        "nested",
        {
            "type": "object",
            "properties": {
                "tree": {"$ref": "#/$defs/node"},
                "either": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
            },
            "required": ["tree"],
            "additionalProperties": False,
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 4},
                        "children": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/node"},
                            "maxItems": 2,
                        },
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
        },
    ),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


@dataclass(frozen=True)
class Walk:
    """Ids that a grammar let through, and whether it was complete in the end."""

    ids: list[int]
    complete: bool


@cache
def learned(name: str) -> ChatFormat:
    """A template with control tokens of its own wherever it writes something like one."""
    source = CHATML if name == "chatml" else (FOLDER / name).read_text(encoding="utf-8")
    found = dict.fromkeys((*CHATML_CONTROLS, *SPECIAL.values(), *CONTROL.findall(source)))
    return ChatFormat.learn(source, ByteTokenizer(list(found), special_tokens=SPECIAL))


def tokenizer_of(format: ChatFormat) -> ByteTokenizer:
    tokenizer = format._tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    return tokenizer


def constraint_of(format: ChatFormat, demand: Demand) -> GrammarConstraint:
    tokenizer = tokenizer_of(format)
    stops = tokenizer.stop_ids | format.closers
    return vocabulary(tokenizer, stops).constraint(format.writer.lark(demand))


def walk(format: ChatFormat, demand: Demand, seed: int, length: int = 500) -> Walk:
    """Draw ids, with a liking for what closes things, so that most walks end."""
    rng, tokenizer = random.Random(seed), tokenizer_of(format)
    stops = tokenizer.stop_ids | format.closers
    constraint = constraint_of(format, demand).copy()
    ids: list[int] = []
    while len(ids) < length:
        row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        constraint.mask(row)
        allowed = np.flatnonzero(row == 0).tolist()
        assert allowed, tokenizer.decode(ids)
        ends = sorted(stops.intersection(allowed))
        assert bool(ends) == constraint.accepting
        if ends and (len(ends) == len(allowed) or rng.random() < 0.3):
            return Walk(ids, True)
        liked = [i for i in allowed if i < 256 and chr(i) in '"}]<,/e'] + [
            i for i in allowed if i >= 256 and i not in stops
        ]
        drawn = rng.choice(liked if liked and rng.random() < 0.6 else allowed)
        constraint.accept(drawn)
        ids.append(drawn)
    return Walk(ids, False)


def parse(format: ChatFormat, ids: Sequence[int], *, complete: bool) -> list[SegmentDone]:
    parser = StreamParser(format, tokenizer_of(format))
    events = [event for token_id in ids for event in parser.feed(token_id)]
    events += parser.finish("stop" if complete else "length")
    return [event for event in events if isinstance(event, SegmentDone)]


def leading_calls(segments: Sequence[SegmentDone]) -> Iterator[SegmentDone]:
    """Calls up to the first content that is none: behind them only section closers may come."""
    seen = False
    for segment in segments:
        if segment.kind == "tool_call":
            seen = True
            yield segment
        elif seen:
            return


def check(calls: Sequence[SegmentDone]) -> None:
    for call in calls:
        assert call.name in SCHEMAS
        schema = SCHEMAS[call.name]
        arguments = json.loads(json.dumps(coerce(call.arguments or {}, schema, schema)))
        jsonschema.validate(arguments, schema)


def names() -> list[str]:
    return ["chatml", *sorted(path.name for path in FOLDER.glob("*.jinja"))]


@pytest.mark.parametrize("name", names())
def test_a_demanded_call_is_read_back_and_fits_its_schema(name: str) -> None:
    """Oracle: the stream parser and jsonschema, in every template's own spelling of calls."""
    try:
        format = learned(name)
    except TemplateUnsupported:
        pytest.skip("the template refuses conversations with tools")
    finished = 0
    for seed in range(12):
        demand = Demand("start", "required", TOOLS, parallel=seed % 2 == 0, thinks=False)
        walked = walk(format, demand, seed)
        calls = list(leading_calls(parse(format, walked.ids, complete=walked.complete)))
        check(calls)
        if walked.complete:
            finished += 1
            assert calls, tokenizer_of(format).decode(walked.ids)
            assert len(calls) == 1 or demand.parallel
    assert finished >= 6


@pytest.mark.parametrize("name", names())
def test_a_call_that_the_model_begins_by_itself_is_held_to_its_schema(name: str) -> None:
    """Oracle: as above. A walk of random ids seldom begins a call, so the first one's marker is
    fed as the template writes it behind a text."""
    try:
        format = learned(name)
    except TemplateUnsupported:
        pytest.skip("the template refuses conversations with tools")
    for choice in ("auto", "none"):
        for seed in range(3):
            walked = walk(format, Demand("start", choice, TOOLS, thinks=False), seed, length=60)
            calls = list(leading_calls(parse(format, walked.ids, complete=walked.complete)))
            check(calls)
            assert not calls or choice == "auto"


def feed(constraint: GrammarConstraint, tokenizer: ByteTokenizer, text: str) -> int:
    """How many ids of the text were allowed."""
    for count, token_id in enumerate(tokenizer.encode_frame(text)):
        row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        constraint.mask(row)
        if row[token_id] != 0:
            return count
        constraint.accept(token_id)
    return len(tokenizer.encode_frame(text))


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a", "count": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "text", "allowed"),
    [
        ("auto", f"Let me see.{CALL}", True),
        ("auto", CALL, True),
        ("auto", CALL.replace("look_up", "look_down"), False),
        ("auto", CALL.replace(": 3", ': "3"'), False),
        ("auto", CALL.replace(", ", ",  "), False),  # s49: blanks are those of the template
        ("auto", f"{CALL}\n{CALL}", True),
        ("auto", "Nothing <to> call {here}", True),
        ("auto", "a <|im_start|> in a text", False),
        ("none", f"Let me see.{CALL}", False),
        ("none", "Just a text", True),
        ("required", CALL, True),
        ("required", f"Let me see.{CALL}", False),
        ("required", f"<think>\nhm {{ </think>\n\n{CALL}", True),  # s50: nothing binds a thought
    ],
)
def test_what_each_choice_lets_through(choice: Any, text: str, allowed: bool) -> None:
    """Oracle: written by hand, on a template with tokens for its markers."""
    format = learned("chatml")
    tokenizer = tokenizer_of(format)
    constraint = constraint_of(format, Demand("start", choice, TOOLS)).copy()
    whole = len(tokenizer.encode_frame(text))
    fed = feed(constraint, tokenizer, text)
    assert (fed == whole and constraint.accepting) is allowed


def test_s50_a_schema_binds_behind_the_thought_and_not_in_it() -> None:
    """Oracle: written by hand. The model is inside a thought when the grammar begins."""
    format = learned("chatml")
    tokenizer = tokenizer_of(format)
    demand = Demand("thinking", schema={"type": "array", "items": {"type": "integer"}})
    constraint = constraint_of(format, demand).copy()
    assert feed(constraint, tokenizer, "any {text} at [all]\n</think>\n\n[1, 2]") > 20
    assert constraint.accepting
    again = constraint_of(format, demand).copy()
    text = "a thought\n</think>\n\nno value"
    assert feed(again, tokenizer, text) == len(tokenizer.encode_frame(text)) - len("no value")


def test_s37_no_call_begins_inside_a_thought() -> None:
    """Oracle: written by hand: the thought has to be closed first."""
    format = learned("chatml")
    tokenizer = tokenizer_of(format)
    for text, allowed in ((f"hm{CALL}", False), (f"hm\n</think>\n\n{CALL}", True)):
        constraint = constraint_of(format, Demand("thinking", "auto", TOOLS)).copy()
        whole = len(tokenizer.encode_frame(text))
        assert (feed(constraint, tokenizer, text) == whole) is allowed


def test_s49_a_value_closes_although_only_blanks_are_wanted() -> None:
    """Oracle: the value's end. The draw prefers blanks wherever they are allowed."""
    format = learned("chatml")
    tokenizer = tokenizer_of(format)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = constraint_of(format, Demand("start", schema=schema, thinks=False)).copy()
    ids: list[int] = []
    while not constraint.accepting:
        row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        constraint.mask(row)
        drawn = next(i for i in (10, 32, 9, *range(256)) if row[i] == 0)
        constraint.accept(drawn)
        ids.append(drawn)
        assert len(ids) < 40
    assert json.loads(tokenizer.decode(ids)) == {"a": "   "}


def test_a_constraint_leads_its_copies_lives_apart() -> None:
    """Oracle: a copy allows what the original did when it was made."""
    format = learned("chatml")
    tokenizer = tokenizer_of(format)
    first = constraint_of(format, Demand("start", "required", TOOLS, thinks=False)).copy()
    forced = tokenizer.decode(list(first.forced()))
    assert forced == '<tool_call>\n{"name": "'
    second = first.copy()
    assert feed(first, tokenizer, CALL) == len(tokenizer.encode_frame(CALL))
    assert tokenizer.decode(list(second.forced())) == forced


NEXT = "<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary"
OWN = " <|constrain|>json<|message|>{{{0}}}<|call|>"
SHOWN = f" to=functions.get{COMMENTARY}" + OWN.replace("<|constrain|>", "")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("start", f"{COMMENTARY} to=functions.get{OWN}"),
        ("start", f"{COMMENTARY}<|message|>I look.{NEXT}{COMMENTARY} to=functions.get{OWN}"),
        ("start", f"<|channel|>analysis<|message|>hm{NEXT}{COMMENTARY} to=functions.get{OWN}"),
        ("thinking", f"hm{NEXT}{COMMENTARY} to=functions.get{OWN}"),
        (
            "thinking",
            f"hm{NEXT}{COMMENTARY}<|message|>So.{NEXT}{SHOWN}",
        ),
        ("thinking", f"hm{NEXT}<|channel|>final<|message|>Done."),
        ("start", "<|channel|>final<|message|>Done."),
    ],
)
def test_gpt_oss_calls_as_it_does_and_as_its_template_shows(place: Place, text: str) -> None:
    """Oracle: turns written by hand, as the format's documentation has them."""
    format = learned("openai-gpt-oss-120b.jinja")
    tokenizer = tokenizer_of(format)
    bound = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for arguments, fits in (('"x": 1', True), ('"x": "1"', "{0}" not in text)):
        demand = Demand(place, "auto", (ToolShape("get", bound),))
        constraint = constraint_of(format, demand).copy()
        ids = tokenizer.encode_frame(text.replace("{{{0}}}", "{" + arguments + "}"))
        fed = feed(constraint, tokenizer, text.replace("{{{0}}}", "{" + arguments + "}"))
        whole = fed == len(ids) and constraint.accepting
        assert whole is fits, tokenizer.decode(ids[:fed])
        if whole and place == "start":
            calls = [s for s in parse(format, ids, complete=True) if s.kind == "tool_call"]
            assert [call.arguments for call in calls] == [{"x": 1}] * ("{0}" in text)

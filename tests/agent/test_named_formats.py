# SPDX-License-Identifier: Apache-2.0
"""Call formats that are chosen by name, against the templates of the families they stand for."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest

from freetoken_agent import Agent, LocalModel, Segment, SessionReadOnly, Store, UnknownCallFormat
from freetoken_agent.call_formats.call_spelling import CallSpelling, Literally, Part
from freetoken_agent.call_formats.call_writing import CallWriting, learn_call_writing
from freetoken_agent.call_formats.named_formats import FORMATS, HERMES, likely
from freetoken_agent.chat_templates.markup_probes import find_gaps
from freetoken_agent.grammar import Demand, ToolShape
from freetoken_agent.grammars.constraint import vocabulary
from freetoken_agent.parsing import SegmentDone, parse_turn
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.testing import CHATML, Call, Raw, ScriptedModel
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tools import tool

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
TEMPLATES = [  # format, template that writes it
    ("hermes", "Qwen-Qwen2.5-7B-Instruct"),
    ("hermes", "Qwen-Qwen3-0.6B"),
    ("hermes", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    ("hermes", "ibm-granite-granite-4.0"),
    ("qwen3_coder", "Qwen3-Coder"),
    ("qwen3_coder", "Qwen3.5-4B"),
    ("llama3", "meta-llama-Llama-3.1-8B-Instruct"),
    ("llama3", "meta-llama-Llama-3.3-70B-Instruct"),
    ("mistral_v3", "mistralai-Mistral-Nemo-Instruct-2407"),
    ("mistral_v11", "Mistral-Small-3.2-24B-Instruct-2506"),
    ("mistral_v13", "unsloth-mistral-Devstral-Small-2507"),
    ("deepseek_v3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    ("deepseek_v3", "llama-cpp-deepseek-r1"),
    ("deepseek_v31", "deepseek-ai-DeepSeek-V3.1"),
    ("glm", "GLM-4.6"),
    ("kimi", "moonshotai-Kimi-K2"),
    ("minimax_m1", "MiniMax-M1"),
    ("minimax_m2", "MiniMax-M2"),
    ("harmony", "openai-gpt-oss-120b"),
]
DROPPING = {  # templates that drop calls, or that the sandbox lets render none
    "LFM2-8B-A1B": "lfm2",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "Kimi-K2-Instruct": "kimi",
    "google-gemma-2-2b-it": "hermes",
    "HuggingFaceTB-SmolLM3-3B": "hermes",
}
ARGUMENTS: dict[str, Any] = {
    "path": 'a "b" é.txt',
    "deep": {"on": [1, 2.5, "x"], "none": {}},
    "count": 100000.0,
    "lines": ["one", "two"],
}
# Written by hand from the model cards: their templates do not write calls.
CARDS = {
    "lfm2": (
        '<|tool_call_start|>[find(city="Oslo", days=2, deep={"on": True, "none": None}), '
        "now()]<|tool_call_end|>"
    ),
    "granite": (
        '<|tool_call|>[{"name": "find", "arguments": {"city": "Oslo", "days": 2, "deep": {"on": '
        'true, "none": null}}}, {"name": "now", "arguments": {}}]'
    ),
}
CARD_CALLS = [
    ("find", {"city": "Oslo", "days": 2, "deep": {"on": True, "none": None}}),
    ("now", {}),
]


def source(template: str) -> str:
    if not FOLDER.exists():
        pytest.skip("the folder of real templates is not there")
    return (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")


def literals(spelling: CallSpelling) -> str:
    return "".join(spelling.literals.values())


@cache
def learned(template: str, name: str | None = None) -> tuple[ChatFormat, ByteTokenizer]:
    """A template with its tags, or those of the format, as control tokens."""
    text = PLAIN if template == "plain" else source(template)
    tags = re.findall(
        r"<[|｜][^<>\s]+[|｜]>|\[[A-Z_]+\]", text + (literals(FORMATS[name]) if name else "")
    )
    controls = dict.fromkeys((*CHATML_CONTROLS, *SPECIAL.values(), *tags))
    tokenizer = ByteTokenizer(list(controls), special_tokens=SPECIAL)
    return ChatFormat.learn(text, tokenizer, call_format=name), tokenizer


def writing_of(format: ChatFormat) -> CallWriting:
    gaps = find_gaps(format.grammar)
    writing = learn_call_writing(format.grammar, format.markup, gaps)
    assert writing is not None
    return writing


def joined(parts: tuple[Part, ...]) -> str:
    return "".join(p.text if isinstance(p, Literally) else f"«{p.upper()}»" for p in parts)


Calls = Sequence[tuple[str, Mapping[str, object]]]


def turn(format: ChatFormat, calls: Calls) -> str:
    """What the model writes of a turn that is these calls, with what closes their section."""
    items = [Item("user", "Go.")] + [
        Item("tool_call", name=name, arguments=arguments, call_id=f"call{i:05d}", open=True)
        for i, (name, arguments) in enumerate(calls)
    ]
    pieces = format.layout(items, start=1)
    opener = format.opener(items[:1]).text
    text = "".join(piece.gap_text + piece.text for piece in pieces)
    return text.removeprefix(opener) + writing_of(format).end


def calls_in(
    format: ChatFormat, tokenizer: ByteTokenizer, text: str
) -> list[tuple[str | None, object]]:
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    done = [event for event in events if isinstance(event, SegmentDone)]
    assert {one.kind for one in done} == {"tool_call"}, done
    return [(one.name, one.arguments) for one in done]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_a_named_format_is_what_its_template_writes(name: str, template: str) -> None:
    """Oracle: what is learned from renderings of the template itself."""
    spelling, own = FORMATS[name], writing_of(learned(template)[0])
    assert joined(own.unit) == joined(spelling.unit)
    assert joined(own.bare) == joined(spelling.bare or spelling.unit)
    assert own.arguments == spelling.arguments
    assert (own.between, own.end) == (spelling.between, spelling.end)
    assert own.at_start.strip() == spelling.begin.strip()


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("Kimi-K3", "<|close|>tools<|sep|>"),
        ("unsloth-Apriel-1.5", "]</tool_calls>"),
        ("deepseek-ai-DeepSeek-V4", "\n</｜DSML｜tool_calls>"),
        ("Qwen3-Coder", ""),
    ],
)
def test_what_closes_a_section_of_calls_is_the_models_to_write(template: str, end: str) -> None:
    """Oracle: by hand, from the template."""
    assert writing_of(learned(template)[0]).end == end


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_learned_from_an_inlined_format_is_the_format(name: str) -> None:
    """Oracle: the data. What is inlined is found again by the probes that learn templates."""
    spelling, own = FORMATS[name], writing_of(learned("plain", name)[0])
    assert joined(own.unit) == joined(spelling.unit)
    assert joined(own.bare) == joined(spelling.bare or spelling.unit)
    assert own.arguments == spelling.arguments
    assert (own.between, own.end) == (spelling.between, spelling.end)
    assert own.at_start == spelling.begin
    assert own.after_text == spelling.after_text + spelling.begin


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_inlined_calls_are_those_of_the_templates_own_rendering(name: str, template: str) -> None:
    """Oracle: the template, rendered by jinja2 alone; and both formats read the same calls."""
    format, tokenizer = learned("plain", name)
    wanted = [("write", ARGUMENTS), ("now", {})]
    if FORMATS[name].between is None:
        wanted = wanted[:1]
    if FORMATS[name].constants == "python":
        wanted[0] = ("write", {**ARGUMENTS, "sure": True, "none": None})
    text = turn(format, wanted)
    assert text.strip() in rendered(source(template), wanted)
    own, own_tokenizer = learned(template)
    found = calls_in(format, tokenizer, text)
    begin = writing_of(own).at_start
    native = begin + text.removeprefix(FORMATS[name].begin)
    assert calls_in(own, own_tokenizer, native) == found
    assert [call[0] for call in found] == [call[0] for call in wanted]
    if FORMATS[name].constants == "json":
        assert found == wanted


def rendered(template: str, calls: Calls) -> str:
    """What the template makes of a question, the calls and their results."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda _: "today"
    environment.globals["raise_exception"] = _refuse
    made = [
        {
            "type": "function",
            "id": f"call{index:05d}",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    results = [
        {"role": "tool", "content": "ok", "tool_call_id": call["id"], "name": calls[index][0]}
        for index, call in enumerate(made)
    ]
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": made},
        *results,
    ]
    return environment.from_string(template).render(messages=messages, tools=[], **SPECIAL)


def _refuse(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_choosing_the_format_that_a_template_has_changes_nothing(name: str, template: str) -> None:
    """Oracle: the format as learned without a choice. Sessions stay bound to the template."""
    own, named = learned(template)[0], learned(template, name)[0]
    assert named.digest == own.digest and named.report == own.report
    assert writing_of(named) == writing_of(own)


@pytest.mark.parametrize(("template", "name"), DROPPING.items())
def test_where_a_template_drops_calls_they_are_written_as_its_models_do(
    template: str, name: str
) -> None:
    """Oracle: the format of the family, and the calls given. Without a choice."""
    format, tokenizer = learned(template)
    assert format.report.call_format == name
    wanted = [("write", ARGUMENTS), ("now", {})]
    text = turn(format, wanted)
    assert text.strip() == turn(learned("plain", name)[0], wanted).strip()
    assert calls_in(format, tokenizer, text) == wanted


@pytest.mark.parametrize("name", CARDS)
def test_calls_as_on_the_model_card(name: str) -> None:
    """Oracle: the text written by hand, and its calls."""
    format, tokenizer = learned("plain", name)
    assert turn(format, CARD_CALLS) == CARDS[name]
    assert calls_in(format, tokenizer, CARDS[name]) == CARD_CALLS


def test_the_likely_format_needs_a_sign() -> None:
    """Oracle: written by hand: a control token is one, its characters are none."""
    assert likely(PLAIN, ByteTokenizer()) is HERMES
    assert likely(PLAIN, ByteTokenizer(("<|tool_call_start|>",))).name == "lfm2"
    assert likely(PLAIN + "{# <minimax:tool_call> #}", ByteTokenizer()).name == "minimax_m2"


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    """Oracle: the names. Nothing is read before."""
    for refused in (
        lambda: ChatFormat.learn(PLAIN, ByteTokenizer(), call_format="herms"),
        lambda: ScriptedModel(call_format="herms"),
        lambda: LocalModel.load("no such model", call_format="herms"),
    ):
        with pytest.raises(UnknownCallFormat) as caught:
            refused()
        assert caught.value.code == "unknown_call_format"
        assert all(name in str(caught.value) for name in ("herms", *FORMATS))


@tool
def add(left: int, right: int, note: str = "") -> int:
    """Add two numbers."""
    return left + right


@pytest.mark.parametrize("shows", [True, False], ids=["shows hermes", "drops calls"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_run_in_a_chosen_format(name: str, shows: bool, tmp_path: Path) -> None:
    """Oracle: the answers written by hand; the ids of the session after a restart, and of one that
    was laid out anew from its messages."""
    template = CHATML if shows else PLAIN
    calls = [
        Call("add", {"left": 1, "right": 2, "note": 'a "b"\n]}</x>'}),
        Call("add", {"left": 3}),
    ]
    calls = calls[:1] if FORMATS[name].between is None else calls
    with Store(tmp_path / "store") as store:
        model = ScriptedModel([calls, "Three."], template=template, call_format=name)
        session = store.create("s", model)
        result = Agent(model, tools=[add]).run_sync("What is 1 + 2?", session=session)
        found = session.find(kind="tool_call")
        assert [call.arguments for call in found] == [dict(call.arguments) for call in calls]
        answers = session.find(kind="tool_result")
        assert result.output == "Three." and answers[0].content == "3" and not answers[0].error
        assert all(mark not in session.render() for mark in FORMATS[name].literals)
        ids = session.ids()
    with Store(tmp_path / "store") as store:
        model = ScriptedModel(template=template, call_format=name)
        session = store.open("s", model)
        assert session.binding.state == "bound" and session.ids() == ids
        session.append("user", "And 2 + 2?")
        session.append_result(session.append_call("add", {"left": 2, "right": 2}), "4")
        copied = store.create("copy", model)
        copied.set_tools([add])
        copied.append_messages(session.to_messages("openai"), "openai")
        assert [_said(s) for s in copied.path()] == [_said(s) for s in session.path()]


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_reads_no_meaning_into_an_inlined_call(name: str) -> None:
    """Oracle: the arguments. Some templates cut a message at a closing tag, and most trim it."""
    content = "message.content.split('</think>')[-1] | trim"
    template = PLAIN.replace("message.content", f"({content})")
    model = ScriptedModel(template=template, call_format=name)
    arguments = {"text": "a </think> b", "more": ["</think>"]}
    with Store(":memory:") as store:
        session = store.create("s", model)
        session.append("user", "Hi")
        call = session.append_call("f", arguments)
        read = model.format.markup.calls
        assert read is not None and call.text.count("</think>") == 2
        parsed = read.parse(call.text)
        assert parsed is not None and dict(parsed.arguments) == arguments


def test_the_name_and_number_of_a_kimi_call_are_its_id() -> None:
    """Oracle: the template, whose results name the call they answer as the model did."""
    format, tokenizer = learned("moonshotai-Kimi-K2")
    replies = [turn(format, [("add", {"left": 1, "right": 2}), ("add", {"left": 3})]), "Three."]
    model = ScriptedModel([Raw([*tokenizer.encode_frame(r), min(format.closers)]) for r in replies])
    model.tokenizer, model.format = tokenizer, format
    result = Agent(model, tools=[add]).run_sync("Go.")
    calls = result.session.find(kind="tool_call")
    assert [call.call_id for call in calls] == ["functions.add:0", "functions.add:1"]
    assert "## Return of functions.add:1" in result.session.render()


def _said(segment: Segment) -> tuple[object, ...]:
    return segment.kind, segment.content, segment.arguments, segment.call_id


def test_a_session_is_bound_to_its_call_format(tmp_path: Path) -> None:
    """Oracle: the reason and the remedy in words; the session is as it was."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", ScriptedModel(call_format="lfm2"))
        session.append("user", "Hi")
    for other, words in ((None, "the template's own format"), ("kimi", "the format 'kimi'")):
        with Store(tmp_path / "store") as store:
            session = store.open("s", ScriptedModel(call_format=other))
            assert session.binding.state == "read_only"
            assert session.binding.reason is not None and words in session.binding.reason
            assert session.binding.remedy is not None
            assert "call_format='lfm2'" in session.binding.remedy
            with pytest.raises(SessionReadOnly, match="lfm2"):
                session.append("user", "Ho")
    model = ScriptedModel(call_format="kimi")
    with Store(tmp_path / "store") as store:
        copy = store.open("s", model).rerender(model, "copy")
        assert [s.text for s in copy.path()] == ["Hi"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_lets_through_what_the_format_writes(name: str) -> None:
    """Oracle: the ids that the format lays out, and the schema for what must not pass."""
    format, tokenizer = learned("plain", name)
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "sunny": {"type": "boolean"},
            "deep": {"type": "object", "properties": {"a": {"type": "array"}}},
            "none": {"type": "null"},
        },
        "required": ["city"],
    }
    stops = tokenizer.stop_ids | format.closers
    demand = Demand("start", "required", (ToolShape("find", schema),), thinks=False)
    made = vocabulary(tokenizer, stops).constraint(format.writer.lark(demand))
    good = {"city": 'Os"lo]', "days": 2, "deep": {"a": ["x", "y"]}}
    if FORMATS[name].constants == "json":
        good = {"city": 'Os"lo]', "days": 2, "sunny": True, "deep": {"a": ["x"]}, "none": None}
    ids = tokenizer.encode_frame(turn(format, [("find", good)]))
    constraint = made.copy()
    for token_id in ids:
        constraint.accept(token_id)
    assert constraint.accepting
    other = tokenizer.encode_frame(turn(format, [("find", {"city": "Oslo", "days": "two"})]))
    constraint = made.copy()
    with pytest.raises(Exception, match="grammar"):
        for token_id in other:
            constraint.accept(token_id)

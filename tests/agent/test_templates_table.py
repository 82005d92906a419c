# SPDX-License-Identifier: Apache-2.0
"""Real chat templates: docs/templates.md is current and says what the acceptance asks for."""

import importlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freetoken_agent.chat_templates.gaps import GapSource
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.template import ChatFormat, Item, Options
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT.parent / "shared" / "templates"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the folder of real templates, ../shared/templates, is not here"
)


@pytest.fixture(scope="module")
def table() -> Iterator[ModuleType]:
    """docs/templates_table.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("templates_table")


@pytest.fixture(scope="module")
def study(table: ModuleType) -> ModuleType:
    """docs/templates_study.py, which the table is made of."""
    return importlib.import_module("templates_study")


@pytest.fixture(scope="module")
def rows(study: ModuleType) -> list[Any]:
    return list(study.study_all(FOLDER))


def test_the_table_in_docs_is_current(table: ModuleType, rows: list[Any]) -> None:
    """Oracle: the generator's output now, whose own oracle is transformers' rendering."""
    written = (ROOT / "docs/templates.md").read_text(encoding="utf-8")
    assert written == table.markdown(rows), "run `python docs/templates_table.py` again"


def test_at_least_38_templates_are_equal_on_all_they_accept(
    table: ModuleType, study: ModuleType, rows: list[Any]
) -> None:
    """Oracle: the acceptance figure; and none is unequal in the first column."""
    assert len(rows) == 46 and len(study.CONVERSATIONS) == 12
    assert sum(table.whole(row, "listed") for row in rows) >= 38
    unequal = [
        row.name for row in rows if not table.whole(row, "listed") and table.count(row, "listed")[1]
    ]
    assert unequal == []


@pytest.mark.parametrize(("calls", "least"), [("one", 30), ("two", 27)])
def test_calls_and_their_results_are_as_the_template_renders_them(
    table: ModuleType, rows: list[Any], calls: str, least: int
) -> None:
    """Oracle: transformers' own rendering, of at least as many templates as the acceptance asks
    for, and of every one that renders them; also the figures on the page are those."""
    shown = {row.name: found for row in rows if (found := table.shown(row, calls))}
    for name, outcomes in shown.items():
        assert all(outcome.listed for outcome in outcomes), name
    assert len(shown) >= least
    stepwise = sum(all(outcome.stepwise for outcome in found) for found in shown.values())
    assert stepwise >= least
    page = (ROOT / "docs/templates.md").read_text(encoding="utf-8")
    assert f" | {len(shown)} | {len(shown)} | {stepwise} |" in page


def test_each_template_whose_calls_differ_is_named_with_the_reason(
    table: ModuleType, rows: list[Any]
) -> None:
    """Oracle: the study: in the section of calls stands whoever is not equal in every way, and only
    they, each with words; those that render one call but no pair hold a step to one call."""
    page = (ROOT / "docs/templates.md").read_text(encoding="utf-8")
    section = page.partition("\n## Calls\n")[2].partition("\n## ")[0]
    lines = [line.split(" | ") for line in section.splitlines() if line.count(" | ") == 5]
    named = {cells[0].removeprefix("| "): cells[-1].removesuffix(" |") for cells in lines[1:]}
    differing = {
        row.name
        for row in rows
        if not all(o.accepted and o.listed and o.stepwise for o in row.calls.values())
    }
    assert set(named) == differing and all(len(reason) > 10 for reason in named.values())
    for row in rows:
        if table.shown(row, "one"):
            assert bool(table.shown(row, "two")) is row.learned.report.parallel_calls, row.name


def test_one_by_one_differs_only_where_the_report_says_so(
    table: ModuleType, rows: list[Any]
) -> None:
    """Oracle: the second column: a template that differs there is one that treats the end of a
    list in its own way, which its report names, or that marks calls by what follows them."""
    for row in rows:
        equal, accepted = table.count(row, "stepwise")
        if equal < accepted:
            notes = " ".join(row.learned.report.notes)
            named = ("last answer", "drops earlier", "a call otherwise")
            assert any(name in notes for name in named), (row.name, notes)


def test_what_is_not_accepted_is_named(table: ModuleType, rows: list[Any]) -> None:
    """Oracle: for each conversation that a template drops, moves or refuses, a sentence of its
    report or the refusal at load."""
    needs = {
        "a thought in history": ("drops earlier", "has no thinking", "before calls only"),
        "a thought at the end": ("has no thinking", "before calls only", "no system"),
        "a system text in the middle": ("later system text", "no system role"),
    }
    for row in rows:
        if row.learned is None:
            assert "refuses" in row.error or "cannot be learned" in row.error
            continue
        notes = " ".join(row.learned.report.notes)
        for title, names in needs.items():
            if not row.outcomes[title].accepted:
                assert any(name in notes for name in names), (row.name, title, notes)


def random_path(rng: random.Random, study: ModuleType, tools_first: bool) -> list[Item]:
    """Several turns of several steps, with parallel calls."""
    items = [Item("system", "s")] if rng.random() < 0.6 else []
    items += [study.TOOLS] if rng.random() < 0.5 else []
    if tools_first:
        items.reverse()
    number = 0
    for _ in range(rng.randint(1, 4)):
        items.append(Item("user", "u"))
        for calls in rng.choices((1, 2, 3), weights=(3, 1, 1), k=rng.randint(0, 3)):
            items += [Item("thinking", "k", open=True)] if rng.random() < 0.4 else []
            items += [Item("text", "t", open=True)] if rng.random() < 0.3 else []
            numbers = range(number, number + calls)
            number += calls
            items += [
                Item("tool_call", name=f"f{n}", arguments={}, call_id=f"c{n:08d}") for n in numbers
            ]
            items += [Item("tool_result", "r", name=f"f{n}", call_id=f"c{n:08d}") for n in numbers]
        items += [Item("thinking", "k", open=True)] if rng.random() < 0.4 else []
        items.append(Item("text", "t"))
    return items


def test_windows_hold_on_random_paths_of_every_template(study: ModuleType, rows: list[Any]) -> None:
    """Oracle: each gap and opener cut from a rendering of the whole path."""
    compared = 0
    for row in rows:
        if row.learned is None:
            continue
        used = row.learned.gaps
        whole = GapSource(row.learned.grammar, windows=False)
        rng = random.Random(row.name)
        for _ in range(4):
            items = random_path(rng, study, row.learned.report.tools_before_system)
            for index in range(1, len(items) + 1):
                wanted = gap(whole, items, index)
                if wanted is not None:
                    assert gap(used, items, index) == wanted, (row.name, index, items)
                    compared += 1
    assert compared > 2000


def gap(source: GapSource, items: list[Item], index: int) -> list[Any] | None:
    """None where the template refuses."""
    try:
        if index == len(items):
            return source.opener(items, Options())
        return source.single(items[: index + 1], index, Options())
    except TemplateUnsupported:
        return None


def test_a_wrong_frame_is_seen(
    table: ModuleType, study: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same study with one character more in every gap finds nothing equal."""
    layout = ChatFormat.layout

    def spoiled(self: ChatFormat, *arguments: Any, **more: Any) -> Any:
        return [replace(p, gap_text=p.gap_text + "!") for p in layout(self, *arguments, **more)]

    monkeypatch.setattr(ChatFormat, "layout", spoiled)
    row = study.study(FOLDER / "Qwen-Qwen2.5-7B-Instruct.jinja")
    assert table.count(row, "listed")[0] == table.count(row, "stepwise")[0] == 0
    assert table.count(row, "listed")[1] > 0


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_s55_schemas_and_arguments_hold_no_control_in_any_template(path: Path) -> None:
    """Oracle: the control ids of the same path with harmless strings. Each template's own control
    literals are the tokenizer's here, and stand in the description, arguments and result."""
    source = path.read_text(encoding="utf-8")
    names = ("<|im_end|>", "<|eot_id|>", "</tool_call>", "<|end|>", "[/INST]")
    controls = tuple(dict.fromkeys((*CHATML_CONTROLS, *names)))
    tokenizer = ByteTokenizer(controls, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    try:
        format = ChatFormat.learn(source, tokenizer)
    except TemplateUnsupported:
        pytest.skip("this template cannot be learned; the table says why")

    def held(evil: str) -> list[list[int]]:
        schema = {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": f"Look {evil} up.",
                "parameters": {
                    "type": "object",
                    "properties": {"word": {"type": "string", "description": f"A {evil}."}},
                    "required": ["word"],
                },
            },
        }
        tools = Item("tools", json.dumps([schema]))
        turn = [
            Item("user", f"say {evil}"),
            Item("tool_call", name="look_up", arguments={"word": evil}, call_id="aaaaaaaa1"),
            Item("tool_result", f"it is {evil}", name="look_up", call_id="aaaaaaaa1"),
        ]
        pieces = format.layout([tools, *turn])
        return [
            [i for i in ids if tokenizer.is_control(i)]
            for piece in pieces
            for ids in (piece.gap_ids, piece.ids)
        ]

    assert held(" ".join(names)) == held("heron")

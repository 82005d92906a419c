# SPDX-License-Identifier: Apache-2.0
"""Models write thoughts and texts before calls, and thoughts without an answer, whether or not
their template has a place for them. The session goes on, on every real template."""

from pathlib import Path

import pytest

from freetoken_agent import Agent, Store
from freetoken_agent.call_formats.call_spelling import Literally
from freetoken_agent.call_formats.call_writing import CallWriting, learn_call_writing
from freetoken_agent.chat_templates.markup_probes import find_gaps
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import Raw, ScriptedModel
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tools import tool

FOLDER = Path(__file__).parents[2].parent / "shared" / "templates"
UNLEARNABLE = "fireworks-ai-llama-3-firefunction-v2"  # refuses a user's message and an answer
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.stem != UNLEARNABLE)
NARROW = (  # those that refuse, drop or move something in such turns
    "MiniMax-M2",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-4-31B-it",
    "llama-cpp-deepseek-r1",
    "openai-gpt-oss-120b",
)
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@tool
def look(at: int = 1) -> str:
    """Look.

    Args:
        at: Where.
    """
    return "seen"


def call_text(writing: CallWriting) -> str:
    filled = {"name": "look", "id": "abcdefghi", "index": "0", "arguments": "{}"}
    spelled = (p.text if isinstance(p, Literally) else filled[p] for p in writing.bare)
    return "".join(spelled) + writing.end


def turns(format: ChatFormat) -> list[str]:
    """A text and a call, a thought and a call, all three, and a thought alone."""
    gaps = find_gaps(format.grammar)
    writing = learn_call_writing(format.grammar, format.markup, gaps)
    assert writing is not None
    call = call_text(writing)
    opened = gaps.to_thinking or ""
    begin = opened[len(gaps.opener) :] if opened.startswith(gaps.opener) else ""
    closer = gaps.thinking_to_text or "\n"
    behind_text = "\n" + writing.at_start if writing.after_text is None else writing.after_text
    behind_thought = writing.after_thought or closer + writing.at_start
    return [
        f"So.{behind_text}{call}",
        f"{begin}Hm.{behind_thought}{call}",
        f"{begin}Hm.{closer}So.{behind_text}{call}",
        f"{begin}Hm.",
    ]


def goes_on(template: str) -> None:
    tokenizer = ByteTokenizer((*CHATML_CONTROLS, *SPECIAL.values()), special_tokens=SPECIAL)
    source = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    format = ChatFormat.learn(source, tokenizer)
    stop = min(format.closers, default=tokenizer.encode_frame("<|eos|>")[0])
    for text in turns(format):
        model = ScriptedModel(
            [Raw([*tokenizer.encode_frame(reply), stop]) for reply in (text, "Done.", "Done.")]
        )
        model.tokenizer, model.format = tokenizer, format
        with Store(":memory:") as store:
            session = store.create("s", model, system="Be brief.")
            agent = Agent(model, tools=[look])
            agent.run_sync("Go.", session=session)
            sampled = session.ids()
            session.append("user", "More.")
            session.generate_sync()
            assert session.ids()[: len(sampled)] == sampled
            assert "Hm." in session.render() or "So." in session.render()
            kinds = [segment.kind for segment in session.path()]
            assert kinds.count("tool_call") == kinds.count("tool_result")


@pytest.mark.skipif(not TEMPLATES, reason="the folder of real templates is not there")
@pytest.mark.parametrize("template", NARROW)
def test_a_session_goes_on_after_what_its_template_has_no_place_for(template: str) -> None:
    """Oracle: what was sampled stays, and more can be said."""
    goes_on(template)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_session_goes_on_whatever_the_model_wrote(template: str) -> None:
    """The same, on every template."""
    goes_on(template)

# SPDX-License-Identifier: Apache-2.0
"""Why it missed: scripted edits, each with the segment, the cause and the cost
that it must name. The oracle of all numbers is `freetoken_agent.proving.miss_oracle`.
"""

from freetoken_agent import LocalModel, Segment, Session
from freetoken_agent.proving.miss_oracle import SYSTEM, WEATHER, MissOracle, ends, tool
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML

CLOCK = tool("get_time", "The time.")
FORGETFUL = CHATML.replace(
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and not messages[loop.index:] %}",
)


def only(session: Session, kind: str) -> Segment:
    return session.find(kind=kind)[0]


# -- edits


def test_an_edited_system_text(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "system")
    session.set_system(SYSTEM.replace("one sentence", "three words"))
    world.check(session, "different_ids", only(session, "system"), "edited", old)


def test_tools_added(world: MissOracle) -> None:
    session = world.talk(tools=())
    user = only(session, "user")
    session.set_tools([WEATHER])
    world.check(session, "different_ids", only(session, "tools"), "inserted", user)


def test_one_more_tool(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "tools")
    session.set_tools([WEATHER, CLOCK])
    world.check(session, "different_ids", only(session, "tools"), "edited", old)


def test_a_changed_tool_schema(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "tools")
    session.set_tools([tool("get_weather", "The weather of a city.")])
    world.check(session, "different_ids", only(session, "tools"), "edited", old)


def test_a_changed_thought(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "thinking")
    edit = session.replace(old, "I should ask the tool.")
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_dropped_thought(world: MissOracle) -> None:
    session = world.talk()
    old, call = only(session, "thinking"), only(session, "tool_call")
    session.delete(old)
    world.check(session, "different_ids", call, "removed", old)


def test_changed_arguments_of_a_call(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "tool_call")
    edit = session.replace(old, arguments={"city": "Bergen"})
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_replaced_tool_result(world: MissOracle) -> None:
    session = world.talk()
    old = only(session, "tool_result")
    edit = session.replace(old, "snow")
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_deleted_call_with_its_result(world: MissOracle) -> None:
    session = world.talk()
    call, text = only(session, "tool_call"), only(session, "text")
    session.delete(call)
    world.check(session, "different_ids", text, "removed", call)


def test_an_inserted_message(world: MissOracle) -> None:
    session = world.talk()
    last = session.path()[-1]
    edit = session.insert(before=last, kind="user", content="By the way:")
    world.check(session, "different_ids", edit.added[0], "inserted", last)


def test_several_edits_in_a_batch(world: MissOracle) -> None:
    """The first of them counts."""
    session = world.talk()
    old, result = only(session, "thinking"), only(session, "tool_result")
    with session.batch():
        session.replace(result, "snow")
        session.replace(old, "Hm.")
    world.check(session, "different_ids", only(session, "thinking"), "edited", old)


def test_a_turn_that_makes_the_template_drop_thoughts(world: MissOracle) -> None:
    """C3, on a history that follows the template's own habit."""
    tokenizer = world.model.tokenizer
    format = ChatFormat.learn(FORGETFUL, tokenizer)
    forgetful = LocalModel("forgetful", tokenizer, format, world.model.engine)
    session = world.store.create("s", forgetful, system=SYSTEM, history_thinking="template")
    session.append("user", "How is the weather?")
    thought = session.append("thinking", "It is summer.")
    text = session.append("assistant", "Sunny.")
    world.warm(session)
    session.append("user", "And tomorrow?")
    assert not session.find(kind="thinking")
    world.check(session, "different_ids", text, "removed", thought)


# -- moving about


def test_a_rewind_between_anchors(world: MissOracle) -> None:
    """The model closed its thought and went on at once: a state was kept at the closer, none where
    the answer began."""
    session = world.store.create("s", world.model, system=SYSTEM)
    session.append("user", "How is the weather in Oslo?")
    prompt = world.head_ids(session)
    encode = world.model.tokenizer.encode_frame
    force = encode("<think>\nSummer.\n</think>\n\nIt is sunny.<|im_end|>")
    session.generate_sync(force=force, max_tokens=len(force))
    closed = len(prompt) + len(encode("<think>\nSummer.\n</think>"))
    states = {*ends(session)[:2], len(prompt), closed, len(session.ids())}
    world.computed.append((session.ids(), states))
    session.rewind(to=only(session, "thinking"))
    miss = world.check(session, "no_anchor", None)
    assert miss.gap == (0 if world.cuttable else 1)


def test_a_fork_at_an_earlier_turn(world: MissOracle) -> None:
    session = world.talk()
    last = session.path()[-1]
    fork = session.fork(before=last, name="other")
    added = fork.append("user", "What was the question?")
    world.check(fork, "different_ids", added, "diverged", last)


def test_another_question_after_a_rewind(world: MissOracle) -> None:
    session = world.talk()
    last = session.path()[-1]
    session.rewind(turns=1)
    added = session.append("user", "What was the question?")
    world.check(session, "different_ids", added, "diverged", last)


def test_an_undone_edit(world: MissOracle) -> None:
    """Back on the known path: only the generation opener is new."""
    session = world.talk()
    session.replace(only(session, "thinking"), "Hm.")
    session.undo()
    miss = world.check(session, "never_computed", None)
    assert miss.part == "opener" and miss.explain().startswith("the generation opener")


def test_a_reopened_branch_knows_what_stood_there(world: MissOracle) -> None:
    """The plan's neighbours come from the stored tree."""
    world.on_disk()
    session = world.talk()
    old = only(session, "thinking")
    session.replace(old, "I should ask the tool.")
    reopened = world.restart()
    world.check(reopened, "different_ids", only(reopened, "thinking"), "edited", old)

# SPDX-License-Identifier: Apache-2.0
"""How much of a path a message list repeats."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.branches.history import Match, match_history
from freetoken_agent.chat_templates.items import Item
from freetoken_agent.messages import emit_messages, parse_messages

CALL = Item("tool_call", name="sh", arguments={"a": 1, "b": [2]}, call_id="c1", open=False)
PATH = [
    Item("system", "Be brief."),
    Item("tools", "[1]"),
    Item("user", "Hi"),
    Item("thinking", "hm", open=True),
    Item("text", "I look.", open=True),
    CALL,
    Item("tool_result", "out", name="sh", call_id="c1"),
    Item("thinking", "so", open=True),
    Item("text", "Done."),
]
LISTED = [item for item in PATH if item.kind != "tools"]
NEW = Item("user", "Bye")


def test_rule09_a_repeated_list_matches_whole() -> None:
    """Oracle: everything is kept and only the new turn is left."""
    assert match_history(PATH, [*LISTED, NEW]) == Match(len(PATH), (NEW,))
    assert match_history(PATH, LISTED) == Match(len(PATH), ())


def test_rule09_thoughts_that_the_list_leaves_out_are_kept() -> None:
    """Oracle: the same match as with them."""
    silent = [item for item in LISTED if item.kind != "thinking"]
    assert match_history(PATH, [*silent, NEW]) == Match(len(PATH), (NEW,))
    some = [item for item in LISTED if item.text != "hm"]
    assert match_history(PATH, [*some, NEW]) == Match(len(PATH), (NEW,))


def test_c12_a_call_resent_in_another_spelling_matches() -> None:
    """Oracle: C12: other key order and spacing, same id: the path stays."""
    message = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "c1", "function": {"name": "sh", "arguments": '{ "b":[2] , "a":1 }'}}
        ],
    }
    incoming = [LISTED[0], LISTED[1], *parse_messages([message], "openai"), *LISTED[5:], NEW]
    assert match_history(PATH, incoming) == Match(len(PATH), (NEW,))


def test_a_call_with_other_arguments_is_another_call() -> None:
    """Oracle: the match ends before it."""
    changed = replace(CALL, arguments={"a": 2})
    incoming = [*LISTED[:4], changed, *LISTED[5:]]
    wanted = Match(5, (changed, *LISTED[5:]), goes_on=True)  # in the message of the text before
    assert match_history(PATH, incoming) == wanted


def test_the_match_ends_at_the_first_difference() -> None:
    """Oracle: the thought of a replaced answer is not kept for the new one."""
    other = Item("text", "Finished.")
    assert match_history(PATH, [*LISTED[:6], other]) == Match(7, (other,))
    assert match_history(PATH, [LISTED[0], NEW]) == Match(2, (NEW,))


def test_a_shorter_list_keeps_a_beginning() -> None:
    """Oracle: what follows the last listed content goes."""
    assert match_history(PATH, LISTED[:2]) == Match(3, ())
    assert match_history(PATH, []) == Match(2, ())


def test_the_system_text_is_compared_apart() -> None:
    """Oracle: a list without one keeps it; another one replaces it and starts behind the
    preamble; tools stay."""
    assert match_history(PATH, [*LISTED[1:], NEW]) == Match(len(PATH), (NEW,))
    other = Item("system", "Be long.")
    assert match_history(PATH, [other, *LISTED[1:]]) == Match(2, tuple(LISTED[1:]), "Be long.")
    assert match_history(PATH[2:], [other, NEW]) == Match(0, (NEW,), "Be long.")


def test_a_cut_text_matches_as_it_was_emitted() -> None:
    """Oracle: the emitted list, parsed again."""
    path = [
        Item("user", "Hi"),
        Item("text", "Hel", open=True, partial=True),
        Item("text", "lo"),
        Item("user", "Bye"),
    ]
    again = parse_messages(emit_messages(path, "openai"), "openai")
    assert match_history(path, again) == Match(4, ())


def test_an_empty_text_may_be_missing() -> None:
    """Oracle: an assistant's empty text beside a call is not emitted."""
    path = [Item("user", "Hi"), Item("text", "", open=True), CALL]
    assert match_history(path, [Item("user", "Hi"), CALL]) == Match(3, ())


@settings(deadline=None)
@given(st.data())
def test_any_beginning_matches_and_nothing_else_does(data: st.DataObject) -> None:
    """Oracle: an independent walk: the list cut anywhere matches up to the cut; with one content
    changed it matches up to the change."""
    size = data.draw(st.integers(1, len(LISTED)))
    listed = LISTED[:size]
    kept = PATH.index(listed[-1]) + 1 if size > 1 else 2
    assert match_history(PATH, listed) == Match(kept, ())
    at = data.draw(st.integers(0, size - 1))
    if listed[at].kind in ("system", "tool_call"):
        return
    changed = [*listed[:at], replace(listed[at], text="changed"), *listed[at + 1 :]]
    match = match_history(PATH, changed)
    assert match.rest == tuple(changed[at:])
    assert match.kept == (PATH.index(listed[at - 1]) + 1 if at > 1 else 2)

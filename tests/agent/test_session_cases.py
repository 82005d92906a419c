# SPDX-License-Identifier: Apache-2.0
"""Cases from the field at the level of sessions: what is stored, what is reused, what it costs.

Reuse is counted by the scripted model's independent account of forwarded paths.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from freetoken_agent import Segment, Session, Store
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML, Call, Raw, ScriptedModel, Think
from freetoken_agent.tokenizers.byte_tokenizer import ByteDecoder, ByteTokenizer

ARGUMENTS = {"cmd": "ls", "cwd": "/srv/app"}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


def _f1(store: Store, model: ScriptedModel, name: str = "f1") -> Session:
    """Fixture F1, its answer generated."""
    session = store.create(name, model, system="You are helpful.")
    session.append("user", "Hi")
    model.extend("Hello!")
    session.generate_sync()
    return session


def _f2(store: Store, model: ScriptedModel) -> Session:
    """Fixture F2: three rounds of thought, call and result, a long answer, a last user message."""
    session = store.create("f2", model)
    session.append("user", "List /srv/app")
    for number in range(3):
        model.extend([Think(f"thought {number} " * 4), Call("bash", ARGUMENTS)])
        call = session.generate_sync().calls[0]
        session.append_result(call, "\n".join(f"file-{number}-{i}" for i in range(30)))
    model.extend("answer " * 280)
    session.generate_sync()
    session.append("user", "thanks")
    return session


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(s.num_tokens + s.frame_tokens for s in segments)


def test_c01_an_empty_thought_in_the_opener_stays_in_the_history(store: Store) -> None:
    """Oracle: P is the new turn alone; a re-rendered copy differs at the first answer."""
    opens_empty = CHATML.replace(
        "{%- if enable_thinking is defined and enable_thinking is false %}", "{%- if true %}"
    )
    model = ScriptedModel(template=opens_empty)
    session = _f1(store, model)
    head = len(session.ids())
    assert "<think>\n\n</think>\n\nHello!" in session.render()
    session.append("user", "2+2?")
    plan = session.plan()
    assert plan.prefill_tokens == plan.input_tokens - head
    copy = session.rerender(model, "copy")
    assert "<think>" not in copy.render()
    miss = copy.plan().miss
    assert miss is not None and miss.segment is not None
    assert (miss.segment.kind, miss.segment.text) == ("text", "Hello!")


def test_c05_deleting_one_thought_costs_what_follows_it(store: Store) -> None:
    """Oracle: the plan before is what the model then forwards; both are the gap at the hole and
    everything behind it, from the end of what precedes the thought."""
    model = ScriptedModel()
    session = _f2(store, model)
    third = session.find(kind="thinking")[2]
    path = session.path()
    index = next(i for i, s in enumerate(path) if s.id == third.id)
    predicted = session.delete(third, dry_run=True).plan
    edit = session.delete(third)
    assert edit.plan == predicted
    behind = session.path()[index:]
    opener = predicted.input_tokens - len(session.ids())
    shared = predicted.reused_tokens - _tokens(path[:index])  # the gaps begin alike
    assert 0 <= shared <= behind[0].frame_tokens
    assert predicted.prefill_tokens == _tokens(behind) - shared + opener
    assert predicted.miss is not None and predicted.miss.segment is not None
    assert predicted.miss.segment.id == behind[0].id
    model.extend("you are welcome")
    usage = session.generate_sync().usage
    assert (usage.reused_tokens, usage.prefill_tokens) == (
        predicted.reused_tokens,
        predicted.prefill_tokens,
    )


def test_c07_a_tag_without_the_templates_newline_is_kept_as_sampled(store: Store) -> None:
    """Oracle: the sampled ids; P is the result and what opens the next step."""
    model = ScriptedModel()
    session = store.create("s", model)
    session.append("user", "list")
    call = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    model.extend(Raw(f"Looking.{call}<|im_end|>"), "done")
    reply = session.generate_sync()
    assert [s.kind for s in reply.segments] == ["text", "tool_call"]
    assert session.render().endswith(f"Looking.{call}")  # the template would write a newline
    head = len(session.ids())
    session.append_result(reply.calls[0], "a.txt")
    usage = session.generate_sync().usage
    assert usage.prefill_tokens == usage.input_tokens - head


class _PairTokenizer(ByteTokenizer):
    """Has ids for pairs of bytes that its encoder never uses, like ids a merge would not give."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs = {
            1000 + i: pair for i, pair in enumerate((b"ab", b"\n\n", b" ~", b"\xc3\xa9"))
        }

    def stream(self, *, after: Sequence[int] = ()) -> ByteDecoder:
        pieces = self._pieces + [b""] * (1000 - len(self._pieces)) + list(self._pairs.values())
        return ByteDecoder(pieces, after)

    def is_control(self, token_id: int) -> bool:
        return 256 <= token_id < 1000


def test_c09_ids_that_would_be_encoded_differently_are_kept(tmp_path: Path) -> None:
    """Oracle: the forced ids, after saving, reopening and going on; no old token is forwarded."""
    model = ScriptedModel()
    model.tokenizer = _PairTokenizer()
    model.format = ChatFormat.learn(CHATML, model.tokenizer)
    odd = [1000, 1001, 1002, 1003, 97, 98, 1000]
    text = "ab\n\n ~éabab"
    assert model.tokenizer.encode_content(text) != odd
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "go")
        model.extend(Raw([*odd, 258]))
        reply = session.generate_sync()
        assert reply.text == text
        assert session.ids()[-len(odd) :] == odd
        ids = session.ids()
    with Store(tmp_path / "store") as store:
        session = store.open("s", model)
        assert session.ids() == ids
        session.append("user", "on")
        model.extend("ok")
        usage = session.generate_sync().usage
        assert usage.reused_tokens == len(ids)
        assert session.ids()[: len(ids)] == ids


def test_c18_saved_and_loaded_ids_are_identical(tmp_path: Path) -> None:
    """Oracle: ids, segments and renderings before closing."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        session = _f2(store, model)
        session.fork(name="side").rewind(turns=1)
        before = [
            (s.branch, s.ids(), s.render(), s.path(), s.tree(), s.plan().input_tokens)
            for s in (session, session.open_branch("side"))
        ]
    with Store(tmp_path / "store") as store:
        for branch, ids, text, path, tree, tokens in before:
            session = store.open("f2", model, branch=branch)
            assert session.ids() == ids
            assert session.render() == text
            assert [s.model_copy(update={"anchored": False}) for s in session.path()] == [
                s.model_copy(update={"anchored": False}) for s in path
            ]
            assert session.plan().input_tokens == tokens
            assert [n.segment.id for n in session.tree().nodes] == [
                n.segment.id for n in tree.nodes
            ]


def test_c28_the_same_prompt_twice_costs_at_most_one_row(store: Store) -> None:
    """Oracle: R + P; a fork of the same question."""
    model = ScriptedModel(["a", "b"])
    session = store.create("s", model)
    session.append("user", "x")
    twin = session.fork()
    session.generate_sync()
    usage = twin.generate_sync().usage
    assert usage.prefill_tokens <= 1
    assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens


def test_s12_drops_and_rewinds_never_part_a_call_from_its_result(store: Store) -> None:
    """Oracle: every call of the path has its result, at every possible cut but inside a pair."""
    session = _f2(store, ScriptedModel())
    for segment in session.path():
        fork = session.fork(at=segment)
        calls = [s.call_id for s in fork.find(kind="tool_call")]
        results = [s.call_id for s in fork.find(kind="tool_result")]
        assert results == calls[: len(results)]
        assert len(calls) - len(results) == (segment.kind == "tool_call")
        fork.append("user", "next")
        assert len(fork.find(kind="tool_call")) == len(fork.find(kind="tool_result"))

# SPDX-License-Identifier: Apache-2.0
"""ScriptedModel: what it emits, and that its counts are those of an engine."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import Store
from freetoken_agent.model import (
    ContextOverflow,
    Model,
    ModelClosed,
    PathMiss,
    PathUsage,
    SamplingOptions,
    Token,
)
from freetoken_agent.template import Item
from freetoken_agent.testing import (
    Answer,
    Call,
    InvalidScript,
    Raw,
    Request,
    ScriptedModel,
    ScriptExhausted,
    Step,
    Think,
)
from freetoken_storage.errors import StoreMismatch
from freetoken_storage.testing import MemoryDatabase

CLOSER = 258  # <|im_end|> of the byte tokenizer


def play(model: ScriptedModel, ids: list[int], **sampling: object) -> list[Token]:
    options = SamplingOptions(stop_ids=frozenset({CLOSER}), **sampling)  # type: ignore[arg-type]
    return list(model.generate(ids, options))


def said(model: ScriptedModel, ids: list[int]) -> str:
    return model.tokenizer.decode([token.id for token in play(model, ids)])


def test_it_is_a_model() -> None:
    """Oracle: the type checker, and the protocol's member names."""
    model: Model = ScriptedModel()
    assert all(hasattr(model, name) for name in vars(Model) if not name.startswith("_"))


def test_it_needs_no_torch() -> None:
    """Oracle: the module table of a fresh interpreter."""
    code = "import sys, freetoken_agent.testing; assert 'torch' not in sys.modules, 'torch loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("step", "items"),
    [
        ("hello", [Item("text", text="hello")]),
        ("", [Item("text", text="")]),
        (Call("ls", {"p": "/"}), [Item("tool_call", name="ls", arguments={"p": "/"}, call_id="c")]),
        (
            [Think("hm"), "so"],
            [Item("thinking", text="hm", open=True), Item("text", text="so")],
        ),
        (
            ["go", Call("a", {}), Call("b", {"x": [1, None]})],
            [
                Item("text", text="go", open=True),
                Item("tool_call", name="a", arguments={}, call_id="c", open=True),
                Item("tool_call", name="b", arguments={"x": [1, None]}, call_id="d"),
            ],
        ),
    ],
    ids=["text", "empty", "call", "thought", "calls"],
)
def test_emits_what_the_template_would_render(step: Step, items: list[Item]) -> None:
    """Oracle: the template's own layout of the same turn, followed by the closer."""
    model = ScriptedModel([step])
    user = Item("user", text="?")
    pieces = model.format.layout([user, *items])[1:]
    turn = [i for piece in pieces for i in (*piece.gap_ids, *piece.ids)]
    opener = model.format.opener([user]).ids
    assert turn[: len(opener)] == list(opener)
    assert [t.id for t in play(model, [1, 2])] == [*turn[len(opener) :], CLOSER]


def test_raw_is_emitted_exactly() -> None:
    """Oracle: the ids that were scripted; control tokens in a text count as such, none is added."""
    model = ScriptedModel([Raw([7, 300, 9]), Raw("a</think>b")])
    stream = model.generate([1], SamplingOptions())
    assert [t.id for t in stream] == [7, 300, 9]
    assert stream.finish_reason == "length"
    assert [t.id for t in play(model, [1])] == [97, 260, 98]


def test_an_error_comes_out_of_the_stream_and_the_model_goes_on() -> None:
    """Oracle: the script."""
    error = RuntimeError("the device fell off")
    model = ScriptedModel([["par", error], "whole"])
    stream = model.generate([1], SamplingOptions())
    got: list[int] = []
    with pytest.raises(RuntimeError, match="fell off"):
        got.extend(token.id for token in stream)
    assert said(model, [1]) == "whole<|im_end|>"


def test_a_callable_sees_the_request_and_answers() -> None:
    """Oracle: what was passed to generate."""
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        return f"{len(request.ids)} ids"

    model = ScriptedModel([answer])
    assert said(model, [5, 6, 7]) == "3 ids<|im_end|>"
    assert seen == model.requests
    assert seen[0].ids == (5, 6, 7)


def test_an_empty_script_raises_and_the_model_goes_on() -> None:
    """Oracle: the documented error, with its code and remedy."""
    model = ScriptedModel()
    with pytest.raises(ScriptExhausted, match="script one more step") as caught:
        model.generate([1], SamplingOptions())
    assert caught.value.code == "script_exhausted"
    model.extend("now")
    assert said(model, [1]) == "now<|im_end|>"


def test_limits_cut_and_say_so() -> None:
    """Oracle: the counts that were asked for."""
    model = ScriptedModel(["hello", "hello", "x"], context_limit=10)
    stream = model.generate([1], SamplingOptions(max_tokens=3))
    assert len(list(stream)) == 3 and stream.finish_reason == "length"
    stream = model.generate([1] * 8, SamplingOptions())
    assert len(list(stream)) == 2 and stream.finish_reason == "length"
    with pytest.raises(ContextOverflow) as caught:
        model.generate([1] * 11, SamplingOptions())
    assert (caught.value.value, caught.value.code) == (11, "context_overflow")
    assert [t.id for t in play(model, [1])] == [ord("x"), CLOSER]


def test_forced_ids_come_first() -> None:
    """Oracle: the ids given."""
    model = ScriptedModel(["x"])
    assert [t.id for t in play(model, [1], force=(9, 8))] == [9, 8, ord("x"), CLOSER]


def test_a_closed_model_refuses() -> None:
    """Oracle: the documented error."""
    model = ScriptedModel(["x"])
    model.close()
    with pytest.raises(ModelClosed):
        model.generate([1], SamplingOptions())


def test_reuse_is_counted_from_what_was_forwarded() -> None:
    """Oracle: counting by hand. The last sampled id has not been forwarded."""
    model = ScriptedModel(["abc", "d", "e"])
    prompt = list(range(100))
    ids = [t.id for t in play(model, prompt)]
    assert model.plan(prompt + ids).prefill_tokens == 1
    assert model.plan(prompt + ids + [1, 2]).prefill_tokens == 3
    assert model.plan(prompt).prefill_tokens == 0  # the prompt's last row is kept
    assert model.plan(prompt[:50]).prefill_tokens == 1  # no anchor there: one row for the logits
    edited = prompt[:40] + [7] + prompt[41:]
    plan = model.plan(edited)
    assert (plan.reused_tokens, plan.prefill_tokens, plan.source) == (40, 60, "ram")
    assert plan.miss is not None and (plan.miss.position, plan.miss.cause) == (40, "different_ids")
    miss = PathMiss(103, "never_computed", 1)
    assert model.warm(prompt + ids) == PathUsage(104, 103, 1, miss=miss)
    assert model.plan(prompt[:70]).miss == PathMiss(69, "no_anchor", 1)
    assert model.plan(prompt + ids).prefill_tokens == 0
    model.ledger.drop_ram()
    assert model.plan(prompt).source == "none"


def test_states_are_kept_where_they_were_asked_for() -> None:
    """Oracle: counting by hand. Only where a row was kept does a path end without a forward."""
    model = ScriptedModel([Raw([1, 2, 3, 4, 5, 6])])
    prompt = list(range(100, 150))
    stream = model.generate(
        prompt,
        SamplingOptions(),
        anchors=[10],
        lasting=[5],
        anchor_after=frozenset([2]),
        anchor_before={5: 1},
    )
    list(stream)
    path = [*prompt, 1, 2, 3, 4, 5, 6]
    whole = [end for end in range(1, 56) if model.plan(path[:end]).prefill_tokens == 0]
    assert whole == [5, 10, 50, 52, 53, 55]


def test_states_on_disk_serve_another_model_of_the_same_weights_only() -> None:
    """Oracle: counting by hand: whole blocks of 64, and short ones at anchors."""
    database = MemoryDatabase()
    first = ScriptedModel(["ab"])
    first.attach(database.snapshots)
    play(first, list(range(200)))  # anchors at 200 and, after two sampled ids, at 202

    second = ScriptedModel()
    second.attach(database.snapshots)
    plan = second.plan([*range(200), 97])
    assert (plan.reused_tokens, plan.source) == (200, "disk")
    assert second.plan([*range(200), 97, 98, 5]).reused_tokens == 202
    assert second.plan([*range(199), 0]).reused_tokens == 192
    assert second.plan([*range(150), 0]).reused_tokens == 128
    assert second.plan([*range(200)]).prefill_tokens == 0
    assert second.plan([*range(192)]).prefill_tokens == 1  # a block without a row
    assert list(second.anchors([*range(202)])) == [64, 128, 192, 200]

    other = ScriptedModel(name="other weights")
    other.attach(database.snapshots)
    assert other.plan([*range(200)]).reused_tokens == 0


def test_forgetting_leaves_the_states_before_the_position() -> None:
    """Oracle: counting by hand, in RAM and on disk."""
    database = MemoryDatabase()
    model = ScriptedModel(["a", "a"])
    model.attach(database.snapshots)
    play(model, list(range(200)))
    play(model, [*range(100), *range(50)])
    assert model.forget(list(range(200)), 150) > 0
    assert model.plan(list(range(200))).reused_tokens == 150
    model.ledger.drop_ram()
    assert model.plan(list(range(200))).reused_tokens == 128
    assert model.plan([*range(100), *range(50)]).prefill_tokens == 0


def test_a_second_store_is_refused() -> None:
    """Oracle: the documented error; the first store stays attached until `detach`."""
    model = ScriptedModel()
    first, second = MemoryDatabase(), MemoryDatabase()
    model.attach(first.snapshots)
    model.attach(first.snapshots)
    with pytest.raises(StoreMismatch):
        model.attach(second.snapshots)
    model.detach()
    model.attach(second.snapshots)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=140)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["generate", "warm", "evict"]), PATHS), max_size=6))
def test_plans_come_true(actions: list[tuple[str, list[int]]]) -> None:
    """Oracle: a list of the forwarded paths, searched token by token (RAM), and each plan against
    the count that follows it."""
    model = ScriptedModel()
    forwarded: list[list[int]] = []
    for action, ids in actions:
        if action == "evict":
            model.ledger.drop_ram()
            forwarded = []
            continue
        plan = model.plan(ids)
        common = max((_shared(path, ids) for path in forwarded), default=0)
        assert plan.reused_tokens in (common, common - (common == len(ids)))
        if action == "warm":
            usage = model.warm(ids)
            forwarded.append(ids)
        else:
            model.extend("xy")
            stream = model.generate(ids, SamplingOptions())
            forwarded.append(ids + [t.id for t in stream][:-1])
            usage = stream.usage
        assert usage.input_tokens == len(ids) == usage.reused_tokens + usage.prefill_tokens
        assert usage.reused_tokens == plan.reused_tokens


def _shared(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


async def later(request: Request) -> Any:
    return "never"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("hello", r"a list of steps; got 'hello'; remedy: write \['hello'\]"),
        (Call("add", {}), "a list of steps"),
        (None, "a list of steps"),
        (["fine", None], "step 1 of the script is none"),
        ([5], "step 0 of the script is none; got 5"),
        ([{"name": "add"}], "step 0"),
        ([b"bytes"], "step 0"),
        ([["text", 5]], "step 0 of the script is none; got 5"),
        ([[["nested"]]], "step 0"),
        ([ValueError], "step 0 .*ValueError.*an exception"),
        ([KeyboardInterrupt("x")], "step 0"),
        ([later], "step 0 .*plain function"),
    ],
)
def test_what_is_no_step_is_refused_where_it_is_written(script: Any, message: str) -> None:
    """Oracle: the documented error, which names the step; in `extend` too. A text is a script of
    letters for Python, which nobody means."""
    with pytest.raises(InvalidScript, match=message) as caught:
        ScriptedModel(script)
    assert caught.value.code == "invalid_script"
    if isinstance(script, list):
        with pytest.raises(InvalidScript, match=message):
            ScriptedModel().extend(*script)


@pytest.mark.parametrize("answer", [None, 5, ["text", None]])
def test_what_a_function_returns_is_checked(answer: Any, memory_store: Store) -> None:
    """Oracle: the documented error, when the reply is asked for; also of what is a coroutine."""
    coroutine: Any = later
    model = ScriptedModel([lambda request: answer, lambda request: coroutine(request)])
    session = memory_store.create("s", model)
    session.append("user", "?")
    for _ in range(2):
        with pytest.raises(InvalidScript, match="a function of the script returned is none"):
            session.generate_sync()

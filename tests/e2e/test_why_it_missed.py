# SPDX-License-Identifier: Apache-2.0
"""Why it missed: scripted causes, each with the segment, the cause and the cost that it must name.

Oracle: plain lists. `World` keeps the ids of every path that was forwarded and the positions where
a state was kept; position, anchor, cost and gap follow by comparing lists, the segment by counting
tokens. The reply afterwards must cost what was said, in rows that the runner counted.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import LocalModel, Miss, Segment, Session, Store
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML
from freetoken_runtime import EngineConfig

ONE_THREAD = EngineConfig(dtype="float32", threads=1)
OPENER = "<|im_end|>\n<|im_start|>assistant\n"
OPENERS = {"user": OPENER, "tool_result": OPENER, "thinking": "\n</think>\n\n"}
FAMILIES = ("llama", "qwen3_next")
SYSTEM = "You are helpful. Answer in one sentence."
ARGUMENTS = {"city": "Oslo"}
FORGETFUL = CHATML.replace(
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and not messages[loop.index:] %}",
)


def tool(name: str, description: str) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


WEATHER, CLOCK = tool("get_weather", "The weather."), tool("get_time", "The time.")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def ends(session: Session) -> list[int]:
    return list(accumulate(s.frame_tokens + s.num_tokens for s in session.path()))


class World:
    """A model, a store, and what has been computed in it, as plain lists."""

    def __init__(self, folder: Path, tmp_path: Path, *, cuttable: bool) -> None:
        self.folder, self.tmp_path, self.cuttable = folder, tmp_path, cuttable
        self.model = LocalModel.load(folder, config=ONE_THREAD)
        self.store = Store(":memory:")
        self.computed: list[tuple[list[int], set[int]]] = []

    def close(self) -> None:
        """The store lets the model finish its writes."""
        self.store.close()
        self.model.close()

    def on_disk(self) -> None:
        """Go on in a folder."""
        self.store.close()
        self.store = Store(self.tmp_path / "store")

    def restart(self, model: LocalModel) -> Session:
        """Everything is on disk; another process goes on with `model`."""
        self.close()
        self.model, self.store = model, Store(self.tmp_path / "store")
        return self.store.open("s", model)

    def warm(self, session: Session) -> None:
        asyncio.run(session.warm())
        self.computed.append((session.ids(), {*ends(session)}))

    def talk(self, **options: Any) -> Session:
        """A conversation with every kind of segment, forwarded as a whole."""
        tools = options.pop("tools", [WEATHER])
        session = self.store.create("s", self.model, system=SYSTEM, tools=tools, **options)
        session.append("user", "How is the weather in Oslo?")
        session.append("thinking", "I should look it up.")
        call = session.append_call("get_weather", ARGUMENTS)
        session.append_result(call, "sunny, 21 degrees, no wind")
        session.append("assistant", "It is sunny: bring sunglasses.")
        session.append("user", "Thanks. And tomorrow?")
        self.warm(session)
        return session

    def squeeze(self, enough: Callable[[], bool]) -> None:
        """Take memory away until that is so, then give it back."""
        stats = self.model.stats()
        fixed = stats.weights_bytes + stats.working_bytes
        for step in range(400):
            self.model.set_budget(ram_bytes=fixed + int(stats.state_bytes * 0.97**step))
            if enough():
                break
        self.model.set_budget(ram_bytes=stats.ram_budget_bytes)

    def expects(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Position, anchor and rows to forward, of a path that is not known as a whole with the
        state at its end."""
        known = [(common(path, ids), anchors) for path, anchors in self.computed]
        rows = max((shared for shared, _ in known), default=0)
        limit = min(rows, len(ids) - 1)
        at = limit
        if not self.cuttable:
            states = (p for shared, anchors in known for p in anchors if p <= min(shared, limit))
            at = max(states, default=0)
        return limit, at, len(ids) - at

    def head_ids(self, session: Session) -> list[int]:
        """What the next request forwards."""
        opener = OPENERS.get(session.path()[-1].kind, "")
        return session.ids() + list(self.model.tokenizer.encode_frame(opener))

    def check(
        self,
        session: Session,
        cause: str,
        segment: Segment | None,
        change: str | None = None,
        was: Segment | None = None,
    ) -> Miss:
        """The plan says this, and it is what happens."""
        ids = self.head_ids(session)
        position, anchor, tokens = self.expects(ids)
        plan = session.plan()
        miss = plan.miss
        assert miss is not None
        assert (miss.cause, miss.change) == (cause, change)
        assert (miss.position, miss.anchor or 0, miss.tokens) == (position, anchor, tokens)
        assert miss.gap == position - anchor
        assert (plan.input_tokens, plan.prefill_tokens) == (len(ids), tokens)
        assert (miss.segment and miss.segment.id) == (segment and segment.id)
        assert (miss.was and miss.was.id) == (was and was.id)
        self._check_place(session, miss)
        self._check_paid(session, miss)
        return miss

    def _check_place(self, session: Session, miss: Miss) -> None:
        """The segment holds the position, where the miss says."""
        place = next((i for i, end in enumerate(ends(session)) if miss.position < end), None)
        if place is None:
            assert (miss.segment, miss.part) == (None, "opener")
            return
        named = session.path()[place]
        assert miss.segment is not None and miss.segment.id == named.id
        content = ends(session)[place] - named.num_tokens
        assert miss.part == ("frame" if miss.position < content else "content")
        assert named.id in miss.explain()

    def _check_paid(self, session: Session, miss: Miss) -> None:
        rows = self.model.stats().forward_rows
        if session.path()[-1].kind in OPENERS:
            reply = session.generate_sync(max_tokens=1)
            usage = reply.usage
        else:
            usage = asyncio.run(session.warm())
        assert self.model.stats().forward_rows - rows == usage.prefill_tokens == miss.tokens
        assert usage.miss == miss


@pytest.fixture(params=FAMILIES)
def world(
    request: pytest.FixtureRequest, folder_of: Callable[[str], Path], tmp_path: Path
) -> Iterator[World]:
    made = World(folder_of(request.param), tmp_path, cuttable=request.param == "llama")
    yield made
    made.close()


def spoil(store: Path, needle: bytes) -> None:
    """Flip one bit in every place where the store's files hold these bytes."""
    found = 0
    for file in store.rglob("data.mdb"):
        data = bytearray(file.read_bytes())
        at = data.find(needle)
        while at >= 0:
            data[at + 7] ^= 0x10
            found += 1
            at = data.find(needle, at + 1)
        file.write_bytes(data)
    assert found, "the block was not found in the store's files"


def only(session: Session, kind: str) -> Segment:
    return session.find(kind=kind)[0]


# -- edits


def test_an_edited_system_text(world: World) -> None:
    session = world.talk()
    old = only(session, "system")
    session.set_system(SYSTEM.replace("one sentence", "three words"))
    world.check(session, "different_ids", only(session, "system"), "edited", old)


def test_tools_added(world: World) -> None:
    session = world.talk(tools=())
    user = only(session, "user")
    session.set_tools([WEATHER])
    world.check(session, "different_ids", only(session, "tools"), "inserted", user)


def test_one_more_tool(world: World) -> None:
    session = world.talk()
    old = only(session, "tools")
    session.set_tools([WEATHER, CLOCK])
    world.check(session, "different_ids", only(session, "tools"), "edited", old)


def test_a_changed_tool_schema(world: World) -> None:
    session = world.talk()
    old = only(session, "tools")
    session.set_tools([tool("get_weather", "The weather of a city.")])
    world.check(session, "different_ids", only(session, "tools"), "edited", old)


def test_a_changed_thought(world: World) -> None:
    session = world.talk()
    old = only(session, "thinking")
    edit = session.replace(old, "I should ask the tool.")
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_dropped_thought(world: World) -> None:
    session = world.talk()
    old, call = only(session, "thinking"), only(session, "tool_call")
    session.delete(old)
    world.check(session, "different_ids", call, "removed", old)


def test_changed_arguments_of_a_call(world: World) -> None:
    session = world.talk()
    old = only(session, "tool_call")
    edit = session.replace(old, arguments={"city": "Bergen"})
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_replaced_tool_result(world: World) -> None:
    session = world.talk()
    old = only(session, "tool_result")
    edit = session.replace(old, "snow")
    world.check(session, "different_ids", edit.added[0], "edited", old)


def test_a_deleted_call_with_its_result(world: World) -> None:
    session = world.talk()
    call, text = only(session, "tool_call"), only(session, "text")
    session.delete(call)
    world.check(session, "different_ids", text, "removed", call)


def test_an_inserted_message(world: World) -> None:
    session = world.talk()
    last = session.path()[-1]
    edit = session.insert(before=last, kind="user", content="By the way:")
    world.check(session, "different_ids", edit.added[0], "inserted", last)


def test_several_edits_in_a_batch(world: World) -> None:
    """The first of them counts."""
    session = world.talk()
    old, result = only(session, "thinking"), only(session, "tool_result")
    with session.batch():
        session.replace(result, "snow")
        session.replace(old, "Hm.")
    world.check(session, "different_ids", only(session, "thinking"), "edited", old)


def test_a_turn_that_makes_the_template_drop_thoughts(world: World) -> None:
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


def test_a_rewind_between_anchors(world: World) -> None:
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


def test_a_fork_at_an_earlier_turn(world: World) -> None:
    session = world.talk()
    last = session.path()[-1]
    fork = session.fork(before=last, name="other")
    added = fork.append("user", "What was the question?")
    world.check(fork, "different_ids", added, "diverged", last)


def test_another_question_after_a_rewind(world: World) -> None:
    session = world.talk()
    last = session.path()[-1]
    session.rewind(turns=1)
    added = session.append("user", "What was the question?")
    world.check(session, "different_ids", added, "diverged", last)


def test_an_undone_edit(world: World) -> None:
    """Back on the known path: only the generation opener is new."""
    session = world.talk()
    session.replace(only(session, "thinking"), "Hm.")
    session.undo()
    miss = world.check(session, "never_computed", None)
    assert miss.part == "opener" and miss.explain().startswith("the generation opener")


def test_a_reopened_branch_knows_what_stood_there(world: World) -> None:
    """The plan's neighbours come from the stored tree."""
    world.on_disk()
    session = world.talk()
    old = only(session, "thinking")
    session.replace(old, "I should ask the tool.")
    reopened = world.restart(LocalModel.load(world.folder, config=ONE_THREAD))
    world.check(reopened, "different_ids", only(reopened, "thinking"), "edited", old)


# -- what is not there


def test_a_new_conversation(world: World) -> None:
    session = world.store.create("s", world.model, system=SYSTEM, tools=[WEATHER])
    session.append("user", "Hi")
    world.check(session, "never_computed", only(session, "system"))


def test_a_new_message(world: World) -> None:
    session = world.talk()
    session.append("assistant", "I do not know.")
    world.warm(session)
    added = session.append("user", "Pity.")
    miss = world.check(session, "never_computed", added)
    assert miss.gap == 0


def test_a_session_that_shares_a_preamble(world: World) -> None:
    """What stands in the other session is not this one's to show."""
    world.talk()
    other = world.store.create("other", world.model, system=SYSTEM, tools=[WEATHER])
    added = other.append("user", "Quite another question")
    world.check(other, "different_ids", added)


def test_a_purged_segment(world: World) -> None:
    session = world.talk()
    old = only(session, "tool_result")
    [new] = session.replace(old, "snow").added
    at = session.path().index(new)
    session.plan()
    asyncio.run(session.purge(old))
    start = ends(session)[at] - new.num_tokens
    [(ids, states)] = world.computed
    states = {p for p in states if p <= start}
    kept = start if world.cuttable else max(states)
    world.computed = [(ids[:kept], states)]
    world.check(session, "never_computed", new)


def test_evicted_states(world: World) -> None:
    session = world.talk()
    world.squeeze(lambda: world.model.stats().evicted_paths > 0)
    world.computed = []
    world.check(session, "evicted", only(session, "system"))


def test_a_thinned_anchor(world: World) -> None:
    """Which states are left is asked of the engine; the best of those that went is named."""
    session = world.store.create("s", world.model, system=SYSTEM)
    for number in range(30):
        session.append("user", f"question {number}")
        session.append("assistant", f"answer {number}")
    world.warm(session)
    [(ids, states)] = world.computed
    if not world.cuttable:
        world.squeeze(lambda: len(world.model.anchors(ids)) < len(states) * 2 // 3)
    left = states & set(world.model.anchors(ids))
    gone = sorted(states - left)
    assert gone or world.cuttable
    at = next((i for i, end in enumerate(ends(session)) if end in gone), 4)
    old = session.path()[at + 1]
    [new] = session.replace(old, "# changed").added
    world.computed = [(ids, left)]
    miss = world.check(session, "different_ids", new, "edited", old)
    below = [end for end in gone if end <= miss.position]
    assert miss.dropped == (None if world.cuttable else max(below))
    assert world.cuttable or f"one at {miss.dropped} gave way" in miss.explain()


def test_reopened_without_warm(world: World) -> None:
    """C37: the last sampled id was never forwarded."""
    world.on_disk()
    session = world.store.create("s", world.model, system=SYSTEM)
    session.append("user", "Hi")
    prompt = world.head_ids(session)
    session.generate_sync(force=world.model.tokenizer.encode_frame("Hello there"), max_tokens=11)
    forwarded = session.ids()[:-1]
    world.computed.append((forwarded, {*ends(session)[:2], len(prompt), len(forwarded)}))
    text = only(session, "text")
    reopened = world.restart(LocalModel.load(world.folder, config=ONE_THREAD))
    reopened.append("user", "And you?")
    miss = world.check(reopened, "never_computed", text)
    assert (miss.part, miss.gap) == ("content", 0)


def test_a_damaged_state_on_disk(world: World) -> None:
    """Found when it is read: the plan promised it, the usage says what became of it."""
    world.on_disk()
    world.talk()
    [resident] = world.model.engine._index
    rows = resident.sequence.view().copy_rows(64, 128)["k0"].tobytes()
    world.restart(LocalModel.load(world.folder, config=ONE_THREAD))
    world.close()
    spoil(world.tmp_path / "store", rows[:400])
    session = world.restart(LocalModel.load(world.folder, config=ONE_THREAD))
    plan = session.plan()
    assert plan.reused_tokens > 64
    [(_, states)] = world.computed
    kept = 64 if world.cuttable else max(p for p in states if p <= 64)
    usage = session.generate_sync(max_tokens=1).usage
    assert (usage.reused_tokens, usage.prefill_tokens) == (kept, plan.input_tokens - kept)
    assert usage.changed is not None and usage.miss is not None
    miss = usage.miss
    assert (miss.cause, miss.tokens, miss.anchor) == ("damaged", usage.prefill_tokens, kept)
    held = next(i for i, end in enumerate(ends(session)) if miss.position < end)
    assert miss.segment is not None and miss.segment.id == session.path()[held].id


# -- another model


def test_another_quantisation(world: World) -> None:
    world.on_disk()
    world.talk()
    session = world.restart(
        LocalModel.load(world.folder, config=EngineConfig(quant="int8", threads=1))
    )
    world.computed = []
    world.check(session, "fingerprint:quantisation", only(session, "system"))


def test_other_weights(world: World) -> None:
    """C40: the same folder name, one tensor perturbed."""
    import torch
    from safetensors.torch import load_file, save_file

    world.on_disk()
    world.talk()
    folder = Path(shutil.copytree(world.folder, world.tmp_path / world.folder.name))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor(1e-3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    session = world.restart(LocalModel.load(folder, config=ONE_THREAD))
    world.computed = []
    world.check(session, "fingerprint:weights", only(session, "system"))


def test_another_rope_setting(world: World) -> None:
    world.on_disk()
    world.talk()
    folder = Path(shutil.copytree(world.folder, world.tmp_path / world.folder.name))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    session = world.restart(LocalModel.load(folder, config=ONE_THREAD))
    world.computed = []
    world.check(session, "fingerprint:rope", only(session, "system"))


def test_another_templates_rerender(world: World) -> None:
    """The same weights under a template that writes users otherwise."""
    session = world.talk()
    other = CHATML.replace(
        "message.role + '\\n' + message.content", "message.role + ': ' + message.content"
    )
    assert other != CHATML
    tokenizer = world.model.tokenizer
    format = ChatFormat.learn(other, tokenizer)
    model = LocalModel("other", tokenizer, format, world.model.engine)
    copied = session.rerender(model, "copy")
    miss = world.check(copied, "different_ids", only(copied, "user"))
    assert miss.part == "frame"


def test_a_path_beyond_the_context(world: World) -> None:
    session = world.talk()
    limit = world.model.context_limit
    long = session.append("user", "x" * limit)
    plan = session.plan()
    assert plan.miss is not None and plan.miss.segment is not None
    said = (plan.miss.cause, plan.miss.segment.id, plan.miss.position, plan.miss.tokens)
    assert said == ("context_overflow", long.id, limit, plan.input_tokens - limit)


def test_no_weights(world: World) -> None:
    with LocalModel.load(world.folder, weights=False) as model:
        session = world.store.create("s", model, system=SYSTEM)
        session.append("user", "Hi")
        plan = session.plan()
        assert plan.miss is not None and plan.miss.segment is not None
        said = (plan.miss.cause, plan.miss.segment.kind, plan.miss.tokens)
        assert said == ("no_weights", "system", plan.input_tokens)

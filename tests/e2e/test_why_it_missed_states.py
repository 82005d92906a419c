# SPDX-License-Identifier: Apache-2.0
"""Why it missed: scripted losses and other models, each with the segment, the cause and the cost
that it must name. The oracle of all numbers is `freetoken_agent.proving.miss_oracle`.
"""

import asyncio
import json
import shutil
from pathlib import Path

from freetoken_agent import LocalModel, Segment, Session
from freetoken_agent.proving.miss_oracle import SYSTEM, WEATHER, MissOracle, ends
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML
from freetoken_runtime import EngineConfig

ONE_THREAD = EngineConfig(dtype="float32", threads=1)


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


# -- what is not there


def test_a_new_conversation(world: MissOracle) -> None:
    session = world.store.create("s", world.model, system=SYSTEM, tools=[WEATHER])
    session.append("user", "Hi")
    world.check(session, "never_computed", only(session, "system"))


def test_a_new_message(world: MissOracle) -> None:
    session = world.talk()
    session.append("assistant", "I do not know.")
    world.warm(session)
    added = session.append("user", "Pity.")
    miss = world.check(session, "never_computed", added)
    assert miss.gap == 0


def test_a_session_that_shares_a_preamble(world: MissOracle) -> None:
    """What stands in the other session is not this one's to show."""
    world.talk()
    other = world.store.create("other", world.model, system=SYSTEM, tools=[WEATHER])
    added = other.append("user", "Quite another question")
    world.check(other, "different_ids", added)


def test_a_purged_segment(world: MissOracle) -> None:
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


def test_evicted_states(world: MissOracle) -> None:
    session = world.talk()
    world.squeeze(lambda: world.model.stats().evicted_paths > 0)
    world.computed = []
    world.check(session, "evicted", only(session, "system"))


def test_a_thinned_anchor(world: MissOracle) -> None:
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


def test_reopened_without_warm(world: MissOracle) -> None:
    """C37: the last sampled id was never forwarded."""
    world.on_disk()
    session = world.store.create("s", world.model, system=SYSTEM)
    session.append("user", "Hi")
    prompt = world.head_ids(session)
    session.generate_sync(force=world.model.tokenizer.encode_frame("Hello there"), max_tokens=11)
    forwarded = session.ids()[:-1]
    world.computed.append((forwarded, {*ends(session)[:2], len(prompt), len(forwarded)}))
    text = only(session, "text")
    reopened = world.restart()
    reopened.append("user", "And you?")
    miss = world.check(reopened, "never_computed", text)
    assert (miss.part, miss.gap) == ("content", 0)


def test_a_damaged_state_on_disk(world: MissOracle) -> None:
    """Found when it is read: the plan promised it, the usage says what became of it."""
    world.on_disk()
    world.talk()
    [resident] = world.model.engine._index
    rows = resident.sequence.view().copy_rows(64, 128)["k0"].tobytes()
    world.restart()
    world.close()
    spoil(world.tmp_path / "store", rows[:400])
    session = world.restart()
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


def test_another_quantisation(world: MissOracle) -> None:
    world.on_disk()
    world.talk()
    session = world.restart(
        LocalModel.load(world.folder, config=EngineConfig(quant="int8", threads=1))
    )
    world.computed = []
    world.check(session, "fingerprint:quantisation", only(session, "system"))


def test_other_weights(world: MissOracle) -> None:
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


def test_another_rope_setting(world: MissOracle) -> None:
    world.on_disk()
    world.talk()
    folder = Path(shutil.copytree(world.folder, world.tmp_path / world.folder.name))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    session = world.restart(LocalModel.load(folder, config=ONE_THREAD))
    world.computed = []
    world.check(session, "fingerprint:rope", only(session, "system"))


def test_another_templates_rerender(world: MissOracle) -> None:
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


def test_a_path_beyond_the_context(world: MissOracle) -> None:
    session = world.talk()
    limit = world.model.context_limit
    long = session.append("user", "x" * limit)
    plan = session.plan()
    assert plan.miss is not None and plan.miss.segment is not None
    said = (plan.miss.cause, plan.miss.segment.id, plan.miss.position, plan.miss.tokens)
    assert said == ("context_overflow", long.id, limit, plan.input_tokens - limit)


def test_no_weights(world: MissOracle) -> None:
    with LocalModel.load(world.folder, weights=False) as model:
        session = world.store.create("s", model, system=SYSTEM)
        session.append("user", "Hi")
        plan = session.plan()
        assert plan.miss is not None and plan.miss.segment is not None
        said = (plan.miss.cause, plan.miss.segment.kind, plan.miss.tokens)
        assert said == ("no_weights", "system", plan.input_tokens)

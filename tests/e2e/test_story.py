# SPDX-License-Identifier: Apache-2.0
"""The whole path on SmolLM2: chat, edit a tool result, drop a thought, restart; GOLD throughout."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import LocalModel, Segment, Session, Store
from freetoken_agent.proving.proofs import Gold

pytestmark = pytest.mark.smollm2

LISTING = "\n".join(
    f"-rw-r--r-- 1 app app {97 * n:6} Jan {n:2} 10:00 file{n}.txt" for n in range(30)
)

REOPEN = """
import asyncio, json, sys
from freetoken_agent import LocalModel, Store
from freetoken_runtime import EngineConfig

folder, message = sys.argv[1:]
with LocalModel.load("smollm2", config=EngineConfig(dtype="float32", threads=1)) as model:
    with Store(folder) as store:
        session = store.open("story", model)
        before = session.ids()
        session.append("user", message)
        plan = session.plan()
        reply = asyncio.run(session.reply(max_tokens=8))
        print(json.dumps({
            "before": before, "after": session.ids(), "text": reply.text,
            "plan": plan.model_dump(), "usage": reply.usage.model_dump(),
        }))
"""


def in_new_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", REOPEN, *arguments]
    child = subprocess.run(command, capture_output=True, timeout=240, text=True)
    assert child.returncode == 0, child.stderr
    told: dict[str, Any] = json.loads(child.stdout)
    return told


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def tool_round(session: Session, thought: str, result: str) -> Segment:
    session.append("thinking", thought)
    call = session.append_call("bash", {"cmd": "ls", "cwd": "/srv/app"})
    return session.append_result(call, result)


async def test_chat_edit_a_tool_result_and_reopen_in_a_new_process(
    smollm2: LocalModel, smollm2_gold: Gold, tmp_path: Path
) -> None:
    """Oracles: a count by hand of the ids the edit leaves in common, cold prefills, and a second
    process that has only the store. Rows: P is counted by the runner (engine stats)."""
    with Store(tmp_path / "store") as store:
        session = store.create("story", smollm2, system="You are helpful. The code is ZX-41.")
        session.append("user", "List /srv/app")
        result = tool_round(session, "I should look first.", LISTING)
        first = await session.reply(max_tokens=16)
        usage = first.usage
        assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens
        forwarded = session.ids()[:-1]  # all but the last sampled id

        edit = session.replace(result, LISTING.replace("file7", "secret"))
        assert [s.replaces for s in edit.added] == [result.id]
        session.append("user", "And now?")
        plan = session.plan()
        head = session.ids()
        assert plan.reused_tokens == common(forwarded, head)
        assert plan.source == "ram"
        rows = smollm2.stats().forward_rows
        second = await session.reply(max_tokens=16)
        assert second.usage.prefill_tokens == plan.prefill_tokens
        assert second.usage.reused_tokens == plan.reused_tokens
        rows_forwarded = smollm2.stats().forward_rows - rows
        assert rows_forwarded == plan.prefill_tokens + second.usage.output_tokens - 1
        smollm2_gold.check(smollm2.engine, session.ids(), num_tokens=0)
        await session.warm()
        await store.flush()
        ids = session.ids()

    message = "What is the code?"
    told = await asyncio.to_thread(in_new_process, str(tmp_path / "store"), message)
    assert told["before"] == ids
    assert told["plan"]["source"] == "disk"
    assert told["plan"]["reused_tokens"] == len(ids)  # warm() has kept the last row's state
    assert told["usage"]["prefill_tokens"] == told["plan"]["prefill_tokens"]
    with Store(tmp_path / "store") as store:
        session = store.open("story", smollm2)
        assert session.ids() == told["after"]
        twin = session.fork(before=session.path()[-1])
        want = await twin.reply(max_tokens=8)
        assert want.text == told["text"]
        smollm2_gold.check(smollm2.engine, session.ids())


async def test_c05_dropping_a_thought_costs_what_follows_it(
    smollm2: LocalModel, smollm2_gold: Gold
) -> None:
    """Oracle: a count by hand of the ids after the thought's place, the plan, and GOLD. Case C5 on
    fixture F2."""
    with Store(":memory:") as store:
        session = store.create("c5", smollm2)
        session.append("user", "List /srv/app")
        for turn in range(3):
            thought = " ".join(f"step {turn}.{n}" for n in range(8))
            tool_round(session, thought, LISTING)
        answer = " ".join(f"word{n}" for n in range(500))
        session.append("assistant", answer)
        session.append("user", "thanks")
        await session.warm()
        before = session.ids()
        third = session.find(kind="thinking")[2]
        start = _start(session, third)
        edit = session.delete(third)
        assert [s.id for s in edit.removed] == [third.id]
        after = session.ids()
        plan = session.plan()
        assert start - third.frame_tokens <= plan.reused_tokens == common(before, after)
        assert plan == edit.plan
        reply = await session.reply(max_tokens=4)
        assert reply.usage.prefill_tokens == plan.prefill_tokens
        smollm2_gold.check(smollm2.engine, after)


def _start(session: Session, segment: Segment) -> int:
    """Position of a segment's first id."""
    start = 0
    for other in session.path():
        start += other.frame_tokens
        if other.id == segment.id:
            return start
        start += other.num_tokens
    raise AssertionError(f"{segment.id} is not on the path")

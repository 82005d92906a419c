# SPDX-License-Identifier: Apache-2.0
"""A process that is killed after a flush, and what the next one finds. Case C37."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import LocalModel, Store
from freetoken_agent.proving.proofs import Gold

CHILD = """
import asyncio, json, os, signal, sys
from freetoken_agent import LocalModel, Store
from freetoken_runtime import EngineConfig

async def main(folder, model_folder, warm):
    model = LocalModel.load(model_folder, config=EngineConfig(dtype="float32", threads=1))
    store = Store(folder)
    session = store.create("s", model, system="You are helpful. " * 12)
    session.append("user", "Hi " * 20)
    await session.reply(force=list(b"Hello! " * 20), max_tokens=200)
    if warm:
        await session.warm()
    await store.flush()
    print(json.dumps({"ids": session.ids()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "warm"))
"""


def killed_child(folder: Path, model: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, str(folder), str(model), mode]
    child = subprocess.run(command, capture_output=True, timeout=120, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    told: dict[str, Any] = json.loads(child.stdout)
    return told


@pytest.mark.parametrize(("mode", "extra"), [("warm", 0), ("cold", 1)])
def test_c37_ten_new_ids_after_a_kill(
    mode: str, extra: int, tiny: LocalModel, tiny_folder: Path, tiny_gold: Gold, tmp_path: Path
) -> None:
    """Oracle: counting. P = 10 after a warm(), else 11 (the last sampled id); GOLD."""
    told = killed_child(tmp_path / "store", tiny_folder, mode)
    with Store(tmp_path / "store") as store:
        session = store.open("s", tiny)
        assert session.ids() == told["ids"]
        longer = [*told["ids"], *range(100, 110)]
        plan = tiny.plan(longer)
        assert (plan.source, plan.prefill_tokens) == ("disk", 10 + extra)
        before = tiny.stats().forward_rows
        assert tiny.warm(longer).prefill_tokens == 10 + extra
        assert tiny.stats().forward_rows - before == 10 + extra
        tiny_gold.check(tiny.engine, longer)


def test_c37_an_edit_in_the_middle_after_a_kill(
    tiny: LocalModel, tiny_folder: Path, tiny_gold: Gold, tmp_path: Path
) -> None:
    """Oracle: counting the common ids: every layer can be sliced, so P = what follows; GOLD."""
    told = killed_child(tmp_path / "store", tiny_folder, "cold")
    with Store(tmp_path / "store") as store:
        session = store.open("s", tiny)
        [user] = session.find(kind="user")
        session.replace(user, user.text[:33] + "X" + user.text[34:])
        edited = session.ids()
        pairs = zip(told["ids"], edited, strict=False)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        plan = tiny.plan(edited)
        assert (plan.source, plan.reused_tokens) == ("disk", first)
        before = tiny.stats().forward_rows
        tiny.warm(edited)
        assert tiny.stats().forward_rows - before == plan.prefill_tokens == len(edited) - first
        tiny_gold.check(tiny.engine, edited)

# SPDX-License-Identifier: Apache-2.0
"""A conversation that outlives its process: the second run continues where the first stopped."""

import asyncio

from freetoken_agent import LocalModel, Store


def run(question: str) -> None:
    """What a process would do: load, open or create, ask, leave."""
    with LocalModel.load("smollm2") as model, Store("diary-store") as store:
        s = store.create("diary", model, system="You are a friendly diary.", exist_ok=True)
        s.append("user", question)
        plan = s.plan()
        print(f"{len(s.path())} segments, {plan.input_tokens} tokens")
        print(f"  reuse {plan.reused_tokens} ({plan.source}), forward {plan.prefill_tokens}")
        print(f"  {s.generate_sync(max_tokens=30, repetition_penalty=1.1).text.strip()}")
        asyncio.run(store.flush())  # or let the store write behind; edits are on disk anyway


run("Today I saw a heron by the river.")
run("What did I see today?")

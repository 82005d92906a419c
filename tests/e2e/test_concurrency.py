# SPDX-License-Identifier: Apache-2.0
"""Several generations on one engine at once: each is what it would be alone."""

import asyncio

import pytest

from freetoken_agent import LocalModel, Reply, Store
from freetoken_agent.proving.proofs import Gold


async def five_branches(model: LocalModel, gold: Gold, num_tokens: int) -> None:
    with Store(":memory:") as store:
        session = store.create("s", model, system="You are helpful.")
        session.append("user", "Count to ten, please.")
        await session.reply(max_tokens=num_tokens)
        shared = len(session.ids())
        branches = [session.fork(name=f"b{i}") for i in range(5)]
        for index, branch in enumerate(branches):
            branch.append("user", f"And now say {index} in {index + 2} words.")
        replies: list[Reply] = await asyncio.gather(
            *(branch.reply(max_tokens=num_tokens) for branch in branches)
        )
        for branch, reply in zip(branches, replies, strict=True):
            usage = reply.usage
            assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens
            assert usage.reused_tokens >= shared - 1, "the common prefix was forwarded again"
            ids = branch.ids()
            start = usage.input_tokens
            gold.check_tokens(model.engine, ids[:start], ids[start:])
            gold.check(model.engine, ids, num_tokens=0)


async def test_five_branches_generate_concurrently(tiny: LocalModel, tiny_gold: Gold) -> None:
    """Oracle: cold prefills and greedy decoding of each branch alone, in another engine."""
    await five_branches(tiny, tiny_gold, 64)


@pytest.mark.smollm2
async def test_five_branches_of_smollm2_generate_concurrently(
    smollm2: LocalModel, smollm2_gold: Gold
) -> None:
    """As above."""
    await five_branches(smollm2, smollm2_gold, 24)

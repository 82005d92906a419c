# SPDX-License-Identifier: Apache-2.0
"""Two agents answer one question on two forks, at the same time; the better answer stays. What the
forks share is computed once and copied never."""

import asyncio

from freetoken_agent import Agent, LocalModel, Result, Session, Store

BRIEF = (
    "You are a copywriter for a small tea house by the sea. Guests come for the view and stay for "
    "the cakes. You write one plain sentence, you never use an exclamation mark, and you name "
    "one thing that a guest can see, smell or taste."
)
calm = Agent(
    name="calm",
    instructions=BRIEF,
    sampling={"max_tokens": 30, "temperature": 0.3, "seed": 1, "repetition_penalty": 1.1},
)
bold = calm.replace(name="bold", sampling={**calm.sampling, "temperature": 0.8})


def words(result: Result[str]) -> int:
    """The measure by which an answer wins; yours may be a test, a judge, or a person."""
    return len(set((result.output or "").lower().split()))


async def compare(session: Session, question: str) -> Result[str]:
    """Ask both agents, keep the better branch, and delete the other one."""
    paid = await session.warm()  # the shared part
    print(f"shared: {paid.prefill_tokens} tokens forwarded")
    agents = (calm, bold)
    runs = [agent.run(question, session=session.fork(name=agent.name)) for agent in agents]
    results = await asyncio.gather(*runs)
    for agent, result in zip(agents, results, strict=True):
        usage = result.usage  # of the question, too, only what the other fork has not forwarded
        print(f"{agent.name}: {(result.output or '').strip()}")
        print(f"  reused {usage.reused_tokens} tokens, forwarded {usage.prefill_tokens}")
        assert usage.reused_tokens >= paid.prefill_tokens > usage.prefill_tokens
    best, worst = sorted(results, key=words, reverse=True)
    session.delete_branch(worst.session.branch)
    return best


with LocalModel.load("smollm2") as model, Store(":memory:") as store:  # or a folder
    tea = store.create("tea", model, system=BRIEF)
    best = asyncio.run(compare(tea, "Write the line for the new cinnamon cake."))
    print("kept:", best.session.branch)
    assert {branch.name for branch in tea.branches()} == {"main", best.session.branch}

    best.session.append("user", "Shorter.")  # the winner goes on where it stopped
    plan = best.session.plan()
    print(f"to go on: reuse {plan.reused_tokens} tokens, forward {plan.prefill_tokens}")

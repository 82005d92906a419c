# SPDX-License-Identifier: Apache-2.0
"""Correct what a tool returned, and pay only for what follows it."""

import sys

from freetoken_agent import LocalModel, Store

folder = sys.argv[1] if len(sys.argv) > 1 else "agent-store"

with LocalModel.load("smollm2") as model, Store(folder) as store:
    s = store.create("trip", model, system="You are a helpful travel assistant.")
    s.append("user", "I fly to Oslo tomorrow. What should I pack?")
    call = s.append_call("get_weather", {"city": "Oslo"})
    result = s.append_result(call, "Oslo tomorrow: sunny, 24 degrees.")
    print("before:", s.generate_sync(max_tokens=40).text)

    plan = s.replace(result, "Oslo tomorrow: snow, -8 degrees.", dry_run=True).plan
    print(f"the edit would reuse {plan.reused_tokens} tokens, forward {plan.prefill_tokens}")

    with s.batch("correct the weather"):
        new = s.replace(result, "Oslo tomorrow: snow, -8 degrees.").added[0]
        s.rewind(to=new)  # drop the old answer
    reply = s.generate_sync(max_tokens=40)
    print("after: ", reply.text)
    print(f"reused {reply.usage.reused_tokens}, forwarded {reply.usage.prefill_tokens}")
    s.undo(2)  # the old result and the old answer are back

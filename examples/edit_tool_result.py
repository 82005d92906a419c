# SPDX-License-Identifier: Apache-2.0
"""Correct what a tool returned, and pay only for what follows it."""

from freetoken_agent import LocalModel, Store

SUNNY, SNOW = '{"forecast": "sunny, 24 degrees"}', '{"forecast": "heavy snow, -8 degrees"}'

with LocalModel.load("smollm2") as model, Store("travel-store") as store:
    s = store.create("oslo", model, system="You are a helpful travel assistant.")
    s.append("user", "I fly to Oslo tomorrow. What should I pack?")
    call = s.append_call("get_weather", {"city": "Oslo"})
    result = s.append_result(call, SUNNY)
    print("before:", s.generate_sync(max_tokens=40, repetition_penalty=1.1).text)

    s.rewind(to=result)  # drop the answer
    plan = s.replace(result, SNOW, dry_run=True).plan  # the price, before it is paid
    s.replace(result, SNOW)
    reply = s.generate_sync(max_tokens=40, repetition_penalty=1.1)
    print("after: ", reply.text)

    usage = reply.usage
    print(f"planned: reuse {plan.reused_tokens} tokens, forward {plan.prefill_tokens}")
    print(f"paid:    reused {usage.reused_tokens} tokens, forwarded {usage.prefill_tokens}")
    s.undo(3)  # the second answer, the edit, the rewind: the first answer is back

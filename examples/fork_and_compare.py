# SPDX-License-Identifier: Apache-2.0
"""Two continuations of one conversation: the shared part is computed once and copied never."""

from freetoken_agent import LocalModel, Store

with LocalModel.load("smollm2") as model, Store("fork-store") as store:
    s = store.create("idea", model, system="You are a helpful writing assistant.")
    s.append("user", "Name a colour.")
    s.generate_sync(max_tokens=20)

    brave = s.fork(name="brave")
    s.append("user", "Write one calm sentence about it.")
    brave.append("user", "Write one wild sentence about it.")

    for branch in (s, brave):
        reply = branch.generate_sync(max_tokens=30, repetition_penalty=1.1)
        print(f"{branch.branch}: {reply.text.strip()}")
        print(f"  reused {reply.usage.reused_tokens}, forwarded {reply.usage.prefill_tokens}")

    difference = s.diff(brave)
    print(f"{difference.common_segments} segments in common")
    print([(branch.name, branch.num_segments) for branch in s.branches()])

# SPDX-License-Identifier: Apache-2.0
"""The engine without chat: bring your own ids, change one in the middle, see what is reused."""

from freetoken_agent.catalog import resolve
from freetoken_runtime import Engine, EngineConfig, SamplingParams

with Engine.load(resolve("smollm2"), EngineConfig(quant="int4")) as engine:
    ids = list(range(1000, 1400))
    generation = engine.generate(ids, SamplingParams(max_tokens=8), anchors=[200])
    print([token.id for token in generation], generation.usage)

    edited = [*ids[:200], 7, *ids[201:]]
    print(engine.plan(edited))
    print(engine.generate(edited, SamplingParams(max_tokens=1)).plan.reused_tokens, "reused")

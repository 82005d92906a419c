# SPDX-License-Identifier: Apache-2.0
"""Calls and values that real and random models write under a grammar, held against jsonschema."""

import json
import random
from typing import Any

import jsonschema
import pytest

from freetoken_agent import LocalModel, Store

TEXT = {"type": "string", "maxLength": 24}
NAMES = (
    "weather hotel flight train bus taxi museum concert dinner recipe note timer alarm mail call "
    "search translate convert draw play"
).split()
TASKS = (
    "Tell me about {0} in {1}.",
    "I need {0} for {1}, please.",
    "Can you look for {0}? I am in {1}.",
    "{1}: {0}!",
    "What is the best {0} near {1}?",
)
PLACES = "Oslo Paris Łódź 東京 Lima Cairo Quito Köln Malmö Perth".split()


def tools() -> list[dict[str, Any]]:
    """Twenty tools with arguments of several kinds."""
    rng = random.Random(0)
    made = []
    for name in NAMES:
        properties: dict[str, Any] = {"place": {"type": "string", "maxLength": 64}}
        if rng.random() < 0.6:
            properties["count"] = {"type": "integer", "minimum": 0, "maximum": 999}
        if rng.random() < 0.5:
            properties["kind"] = {"enum": ["cheap", "good", "best"]}
        if rng.random() < 0.3:
            properties["tags"] = {"type": "array", "items": TEXT, "maxItems": 2}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": ["place"],
            "additionalProperties": False,
        }
        function = {"name": name, "description": f"Find: {name}.", "parameters": parameters}
        made.append({"type": "function", "function": function})
    return made


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "count", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_every_demanded_call_is_valid(smollm2: LocalModel, count: int) -> None:
    """Oracle: jsonschema, on SmolLM2 with twenty tools; which tool it chooses is not judged."""
    offered = tools()
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in offered}
    rng = random.Random(1)
    with Store(":memory:") as store:
        base = store.create("base", smollm2, system="You call tools.", tools=offered)
        for _ in range(count):
            session = base.fork()
            task = rng.choice(TASKS).format(rng.choice(NAMES), rng.choice(PLACES))
            session.append("user", task)
            reply = session.generate_sync(
                tool_choice="required", parallel_tool_calls=False, max_tokens=256
            )
            [call] = reply.calls
            assert reply.finish_reason == "tool_calls", task
            jsonschema.validate(dict(call.arguments or {}), schemas[call.tool or ""])


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of bounded values: nested, enumerated, united, in several scripts."""
    kinds = ["string", "integer", "boolean", "enum", "null", "number"]
    if depth < 3:
        kinds += ["object", "array", "union"]
    kind = rng.choice(kinds)
    match kind:
        case "string":
            return TEXT
        case "integer":
            return {"type": "integer", "minimum": -99, "maximum": 9999}
        case "number":
            return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100}
        case "enum":
            return {"enum": rng.sample(["a", "ö", "東", "🙂", 1, None, True, "two words"], 3)}
        case "array":
            return {"type": "array", "items": schema_of(rng, depth + 1), "maxItems": 3}
        case "union":
            return {"anyOf": [schema_of(rng, depth + 1), schema_of(rng, depth + 1)]}
        case "object":
            return object_of(rng, depth)
    return {"type": kind}


def object_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["name", "größe", "値", "x", "items", "is ok"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: schema_of(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def whole_schema(rng: random.Random) -> dict[str, Any]:
    """An object, every third time one with a definition that refers to itself."""
    schema = object_of(rng)
    if rng.random() < 0.33:
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        node = {
            "type": "object",
            "properties": {
                "label": TEXT,
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["label"],
            "additionalProperties": False,
        }
        schema["$defs"] = {"node": node}
    return schema


@pytest.mark.parametrize(
    "count", [6, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_random_weights_write_valid_values(tiny: LocalModel, count: int) -> None:
    """Oracle: jsonschema; 95 % of the values must be complete within 512 tokens."""
    finished = 0
    with Store(":memory:") as store:
        for number in range(count):
            schema = whole_schema(random.Random(number))
            session = store.create(f"s{number}", tiny)
            session.append("user", "write")
            reply = session.generate_sync(
                output_schema=schema,
                max_tokens=512,
                temperature=1.0,
                seed=number,
                thinking=False,  # nothing binds a thought
            )
            if reply.finish_reason == "stop":
                finished += 1
                jsonschema.validate(json.loads(reply.text), schema)
    assert finished >= 0.95 * count, finished

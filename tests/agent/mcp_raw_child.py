# SPDX-License-Identifier: Apache-2.0
"""An MCP server that does what it should not, for tests: `python mcp_raw_child.py FAULT`. It speaks
the protocol by hand, for the package's own server would not do this."""

import json
import sys
import time
from typing import Any

FAULT = sys.argv[1]
OBJECT = {"type": "object"}
ODD = {"not": {"type": "string"}, "contains": {"type": "integer"}}
SCHEMAS: dict[str, Any] = {
    "echo": {"type": "object", "properties": {"x": {"type": "integer"}, "y": ODD}},
    "mixed": OBJECT,
    "structured": OBJECT,
    "large": OBJECT,
    "refused": OBJECT,
    "mute": OBJECT,
    "protest": OBJECT,
    "a.b": OBJECT,
    "a/b": OBJECT,
    "2fa": OBJECT,
    "n" * 100: OBJECT,
    "n" * 101: OBJECT,
}
if FAULT == "schema":
    SCHEMAS["rows"] = {"type": "array"}
MIXED = [
    {"type": "text", "text": "one"},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "file:///x", "text": "two"}},
    {"type": "resource", "resource": {"uri": "file:///y", "blob": "AAAA"}},
    {"type": "resource_link", "uri": "file:///z", "name": "z"},
]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def listed(params: dict[str, Any]) -> dict[str, Any] | None:
    if FAULT == "no list":
        return None
    tools = [{"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()]
    if FAULT == "circle":
        return {"tools": tools[:1], "nextCursor": "again"}
    if FAULT == "pages":
        at = int(params.get("cursor") or 0)
        more = {"nextCursor": str(at + 2)} if at + 2 < len(tools) else {}
        return {"tools": tools[at : at + 2], **more}
    return {"tools": tools}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if FAULT == "garbage":
        say("calling " + name)
    if name == "mixed":
        return {"content": MIXED}
    if name == "structured":
        return {"content": [], "structuredContent": {"v": [1]}}
    if name == "large":
        return {"content": [{"type": "text", "text": "y" * 3_000_000}]}
    if name == "refused":
        return {"content": [{"type": "text", "text": "not today"}], "isError": True}
    if name == "protest":
        raise KeyError(name)
    if name == "mute":
        return {"content": [], "isError": True}
    return {"content": [{"type": "text", "text": f"{name} {json.dumps(arguments)}"}]}


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    params = message.get("params", {})
    match message["method"]:
        case "initialize":
            server = {"name": "raw", "version": "1"}
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": server,
            }
        case "tools/list":
            return listed(params)
        case "tools/call":
            return called(params["name"], params.get("arguments") or {})
    raise KeyError(message["method"])


if FAULT == "garbage":
    say("Server 1.0 is ready.")
    say('{"jsonrpc": "2.0", "neither": 1}')
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
    try:
        result = answer(asked)
    except KeyError:
        say(json.dumps({**reply, "error": {"code": -32601, "message": "not for you"}}))
        continue
    if result is not None:
        say(json.dumps({**reply, "result": result}))
if FAULT == "lingers":
    time.sleep(600)

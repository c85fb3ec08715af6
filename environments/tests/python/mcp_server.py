"""A server of the Model Context Protocol with the standard library alone: one JSON object a line."""

import json
import os
import sys

TOOLS = [
    {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}},
    {"name": "liar", "description": "Says that it takes nothing.", "inputSchema": {"type": "object"}},
    {"name": "die", "description": "Ends.", "inputSchema": {"type": "object"}},
]


def called(name, arguments):
    if name == "add":
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if name == "die":
        os._exit(1)
    return {"content": [{"type": "text", "text": "an argument is missing after all"}], "isError": True}


for line in sys.stdin:
    request = json.loads(line)
    method, params = request.get("method"), request.get("params") or {}
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if method == "initialize":
        answer["result"] = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
    elif method == "tools/list":
        answer["result"] = {"tools": TOOLS}
    elif method == "tools/call":
        answer["result"] = called(params["name"], params.get("arguments") or {})
    else:
        answer["error"] = {"code": -32601, "message": "there is no such method"}
    print(json.dumps(answer), flush=True)

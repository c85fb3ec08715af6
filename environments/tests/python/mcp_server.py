"""A server of the Model Context Protocol with the standard library alone: one JSON object a line."""

import json
import os
import sys
import time

TOOLS = [
    {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}},
    {"name": "liar", "description": "Says that it takes nothing.", "inputSchema": {"type": "object"}},
    {"name": "die", "description": "Ends.", "inputSchema": {"type": "object"}},
    {"name": "wait", "description": "Takes a while.", "inputSchema": {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}},
    {"name": "flood", "description": "Says too much.", "inputSchema": {"type": "object"}},
    {"name": "process", "description": "Names its process.", "inputSchema": {"type": "object"}},
]


def called(name, arguments):
    if name == "add":
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if name == "die":
        os._exit(1)
    if name == "wait":
        time.sleep(arguments["seconds"])
        return {"content": [{"type": "text", "text": "waited"}]}
    if name == "flood":
        return {"content": [{"type": "text", "text": "x" * (100 << 20)}]}
    if name == "process":
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    return {"content": [{"type": "text", "text": "an argument is missing after all"}], "isError": True}


def answered(request):
    """The answer to a message; None to a notification."""
    method, params = request.get("method"), request.get("params") or {}
    if "id" not in request:
        return None
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if method == "initialize":
        answer["result"] = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
    elif method == "tools/list":
        answer["result"] = {"tools": TOOLS}
    elif method == "tools/call":
        answer["result"] = called(params["name"], params.get("arguments") or {})
    else:
        answer["error"] = {"code": -32601, "message": "there is no such method"}
    return answer


if __name__ == "__main__":
    for line in sys.stdin:
        if (answer := answered(json.loads(line))) is not None:
            print(json.dumps(answer), flush=True)

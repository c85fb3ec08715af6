"""The same server at an address: a token, a session, answers as JSON (initialize) or as a stream of events (all others)."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mcp_server import answered


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    session = 0

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"content_length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self):
        self.reply(200)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("authorization") != "Bearer open sesame":
            return self.reply(401, b"no token")
        request = json.loads(body)
        first = request.get("method") == "initialize"
        if first:
            Handler.session += 1
        elif self.headers.get("mcp-session-id") != f"s{Handler.session}" or not self.headers.get("mcp-protocol-version"):
            return self.reply(404, b"no such session")
        params = request.get("params") or {}
        if params.get("name") == "die":
            Handler.session += 1
            return self.reply(500, b"it is dead")
        answer = answered(request)
        if answer is None:
            return self.reply(202)
        text = json.dumps(answer)
        if first:
            return self.reply(200, text.encode(), content_type="application/json", mcp_session_id=f"s{Handler.session}")
        note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "busy"}})
        events = f": begins\n\nevent: message\ndata: {note}\n\nevent: message\ndata: {text}\n\n"
        self.reply(200, events.encode(), content_type="text/event-stream")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()

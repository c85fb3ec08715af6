"""A collector of OpenTelemetry takes the timeline of a run: collect.py RLRUN RUN ARGUMENT...

Starts a collector, trains with RLRUN and `log.otlp`, and compares the traces, parsed by OpenTelemetry's own messages, with
`timeline.jsonl`.
"""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

received = []


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/json", self.path
        received.append(json.loads(body))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def parsed(request):
    """The request as a message. JSON of OTLP has ids in hexadecimal, that of other messages bytes in base64."""
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json_format.Parse(json.dumps(request), ExportTraceServiceRequest())


rlrun, run, *arguments = sys.argv[1:]
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    command = [rlrun, *arguments, "--run-dir", run, "--quiet", "--set", f"log.otlp={url}"]
    subprocess.run(command, check=True, timeout=600)
    server.shutdown()

spans = [
    span
    for request in map(parsed, received)
    for resource in request.resource_spans
    for scope in resource.scope_spans
    for span in scope.spans
]
lines = [json.loads(line) for line in open(os.path.join(run, "timeline.jsonl"))]
trajectories = sum(line["kind"] == "trajectory" for line in lines)
steps = {line["step"] for line in lines if line["kind"] == "forward_backward"}
roots = [span for span in spans if not span.parent_span_id]
names = [span.name for span in spans]
assert names.count("trajectory") == trajectories > 0, (names.count("trajectory"), trajectories)
assert {f"step {step}" for step in steps} <= set(names), steps
# The start of the run, and what its workers report once its last step is written.
outside = names.count("outside of steps")
assert outside > 0 and len(roots) == trajectories + len(steps) + outside, (len(roots), trajectories, outside)
assert len(spans) == len(lines) + len(steps) + outside + sum(names.count(n) for n in ("generate", "reward", "queue", "train"))
ids = {(span.trace_id, span.span_id) for span in spans}
assert len(ids) == len(spans) and all(len(t) == 16 and len(s) == 8 for t, s in ids)
for span in spans:
    assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
    assert not span.parent_span_id or (span.trace_id, span.parent_span_id) in ids
print(f"ok OpenTelemetry: {len(spans)} spans of {len(steps)} steps and {trajectories} trajectories")

"""The capture proxy of OpenEnv, unmodified, in front of `rlrun serve policy`: openenv_capture.py ADDRESS MODEL.

An agent calls the proxy with the client of OpenAI, streaming and not; the proxy calls the endpoint. Its rollout must be one that
can be trained on: token ids, log-probabilities and a mask, without a finding of its own validation.
"""

import socket
import sys

import httpx
import openai
from openenv.core.harness.capture.runner import CaptureServer

address, model = sys.argv[1], sys.argv[2]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
proxy = CaptureServer(llm_url=f"{address}/v1", model=model, port=port, capture_level="tokens")
proxy.start()
try:
    base = f"http://127.0.0.1:{port}"
    session = httpx.post(f"{base}/sessions", json={"purpose": "train"}, timeout=60).json()["session_id"]
    agent = openai.OpenAI(base_url=f"{base}/v1", api_key=session, max_retries=0)
    messages = [{"role": "user", "content": "2+3="}]
    first = agent.chat.completions.create(model=model, messages=messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "again"}]
    chunks = agent.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1], "the stream ends"
    document = httpx.get(f"{base}/sessions/{session}/rollout", timeout=60).json()
finally:
    proxy.stop()
assert not proxy.inference.param_fixes, proxy.inference.param_fixes
assert document["capture_level"] == "tokens" and document["trainable"], document
rows = [row for row in document["sequences"] if row["role"] == "agent"]
assert rows and all(len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"]) for row in rows), rows
trained = sum(sum(row["loss_mask"]) for row in rows)
assert trained > 0 and not any(finding for row in rows for finding in row["validation"]), rows
print(f"ok OpenEnv's capture: {len(rows)} rows, {trained} tokens to train on")

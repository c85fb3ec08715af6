"""Stores a group in a served buffer, leases it for training, and acknowledges it.

    rlrun serve buffer --dir /tmp/buffer --batch-groups 1 &
    python3 examples/buffer/append_lease_ack.py http://127.0.0.1:8700

Needs only Python. With a token file, the second argument is a token of the role admin.
"""

import json
import sys
import urllib.request
import uuid

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8700"
HEADERS = {"content-type": "application/json"}
if len(sys.argv) > 2:
    HEADERS["authorization"] = f"Bearer {sys.argv[2]}"


def ask(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), HEADERS, method="POST")
    with urllib.request.urlopen(request, timeout=40) as answer:
        return json.load(answer)


def trajectory(prompt, completion, logprobs, reward):
    """A trajectory whose `completion` was sampled with `logprobs`; only the completion is trained on."""
    return {
        "token_ids": prompt + completion,
        "loss_mask": [False] * len(prompt) + [True] * len(completion),
        "behavior_logprobs": [0.0] * len(prompt) + logprobs,
        "policy_version": 0,
        "reward": reward,
    }


answers = [trajectory([5, 6], [17], [-0.1], 1.0), trajectory([5, 6], [18], [-2.5], 0.0)]
group = {"key": str(uuid.uuid4()), "trajectories": answers}
print(ask("/v1/groups", {"groups": [group]})["results"])
# The same key again, as after a lost answer: the group is not stored twice.
print(ask("/v1/groups", {"groups": [group]})["results"])

request = {"consumer": "example", "groups": 1, "wait_ms": 10_000, "hold_ms": 60_000}
lease = ask("/v1/leases", request)["lease"]
print("train on", [group["id"] for group in lease["groups"]], "for the step from version", lease["step"])
print(ask(f"/v1/leases/{lease['id']}/ack", {}))

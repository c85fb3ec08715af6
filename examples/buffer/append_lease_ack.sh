#!/usr/bin/env bash
# Stores a group in a served buffer, leases it for training, and acknowledges it.
#
#     rlrun serve buffer --dir /tmp/buffer --batch-groups 1 &
#     examples/buffer/append_lease_ack.sh http://127.0.0.1:8700
#
# Needs curl. With a token file, TOKEN names a token of the role admin.
set -euo pipefail
url="${1:-http://127.0.0.1:8700}"

ask() {
    curl --silent --show-error --fail-with-body --max-time 40 --request "$1" "$url$2" \
        ${TOKEN:+--header "authorization: Bearer $TOKEN"} --header 'content-type: application/json' --data "$3"
    echo
}

# Two completions of version 0 for one prompt. The first token is the prompt, the other was sampled. Sent again with the
# same key, as after a lost answer, the group is not stored a second time.
key="example-$$-$(date +%s)"
group='{
    "key": "'"$key"'",
    "task": {"id": 1, "prompt": "1+1="},
    "trajectories": [
        {"token_ids": [5, 17], "loss_mask": [false, true], "behavior_logprobs": [0, -0.1],
         "policy_version": 0, "text": "2", "reward": 1},
        {"token_ids": [5, 18], "loss_mask": [false, true], "behavior_logprobs": [0, -2.5],
         "policy_version": 0, "text": "3", "reward": 0}
    ]
}'
ask POST /v1/groups '{"groups": ['"$group"']}'
ask POST /v1/groups '{"groups": ['"$group"']}'

# Waits up to ten seconds for one group. The lease holds for a minute, longer if it is extended.
lease="$(ask POST /v1/leases '{"consumer": "example", "groups": 1, "wait_ms": 10000, "hold_ms": 60000}')"
echo "$lease"

# Acknowledges the lease: its groups are not leased again.
id="$(sed -n 's/^{"lease":{"id":\([0-9]*\).*/\1/p' <<<"$lease")"
ask POST "/v1/leases/$id/ack" '{}'

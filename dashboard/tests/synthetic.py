"""Files of a run that this script makes: timeline, tokens and status, in the forms of docs/run_directory.md.

    synthetic.py RUN

Adds them to a run directory, for its steps with samples. Numbers are made of counters, so that a reader of the page can be
compared with them.
"""

import json
import math
import pathlib
import sys

HOSTILE = '<script>window.broken = 1</script><img src=x onerror="window.broken = 1">'


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def timeline(run, steps, start=0.0):
    """A trainer that waits for a quarter of each second, two samplers, a reward, weights, a watchdog, and trajectories."""
    out = []
    for step in range(1, steps + 1):
        at = start + step - 1.0
        span = lambda lane, kind, begin, end, **more: out.append({"lane": lane, "kind": kind, "start": at + begin, "end": at + end, "step": step, **more})
        span("trainer", "wait_for_batch", 0, 0.25)
        span("trainer", "forward_backward", 0.25, 0.85)
        span("trainer", "weight_sync", 0.85, 0.9)
        if step % 5 == 0:
            span("trainer", "save_checkpoint", 0.9, 0.96)
            span("trainer", "new kind", 0.96, 1.0, unknown={"a": [1]})
        for sampler in range(2):
            span(f"sampler {sampler}", "sample", 0.02, 0.85, version=step - 1)
            span(f"sampler {sampler}", "apply_weights", 0.85, 0.9, version=step)
            span(f"sampler {sampler}", "wait", 0.9, 1.0, note="a slot")
        for call in range(40):
            span("reward math", "score", call * 0.02, call * 0.02 + 0.004, count=8)
        span("weights", "push", 0.86, 0.89, version=step, bytes=454584)
        for index in range(16):
            lag = (step + index) % 6
            one = {"lane": "trajectory", "kind": "trajectory", "group": step * 2 + index // 8, "index": index % 8, "step": step, "lag": lag, "versions": [max(0, step - lag - 1), step - 1],
                   "start": at - 0.6 - lag * 0.1, "leased": at + 0.25, "end": at + 0.85}
            if index != 3:
                one |= {"sampled": at - 0.3, "scored": at - 0.25, "stored": at - 0.24, "sampler": f"sampler {index % 2}"}
            out.append(one)
    stalled = start + steps - 0.5
    out.append({"lane": "watchdog", "kind": "stall", "start": stalled, "end": stalled + 0.3, "note": f"the trainer waits for a batch: sampler 1 holds every slot {HOSTILE}"})
    write_lines(run / "timeline.jsonl", out)
    with open(run / "timeline.jsonl", "a") as file:
        file.write('no json\n{"lane":"torn')


def tokens_of(trajectory, group, index):
    """The rows of a trajectory: its completion in pieces behind a prompt that is not trained on."""
    text = trajectory["completion"]
    pieces = [text[at:at + 3] for at in range(0, len(text), 3)] or [""]
    texts = ["<s>", "prompt\n", *pieces]
    count = len(texts)
    mask = [0, 0] + [1] * len(pieces)
    of = lambda f: [f(at) if mask[at] else None for at in range(count)]
    return {"group": group, "index": index, "branch": 0, "token_ids": [7 * at + 1 for at in range(count)], "texts": texts, "loss_mask": mask,
            "behavior_logprobs": of(lambda at: -0.1 * (at % 7) - 0.01), "trainer_logprobs": of(lambda at: -0.1 * (at % 7) - 0.01 + 0.05 * math.sin(at)),
            "advantages": of(lambda at: trajectory.get("advantage", 0.5)), "versions": [{"version": 4, "len": count // 2}, {"version": 5, "len": count - count // 2}]}


def tokens(run):
    """Tokens of every step with samples; samples get the fields index and advantage."""
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        if "tokens" in path.name:
            continue
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        rows = []
        for group in groups:
            rewards = [one["reward"] for one in group["trajectories"] if isinstance(one.get("reward"), (int, float))]
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            for index, one in enumerate(group["trajectories"]):
                one |= {"index": index, "advantage": one["reward"] - mean if isinstance(one.get("reward"), (int, float)) else None}
                rows.append(tokens_of(one, group["group"], index))
        write_lines(path, groups)
        write_lines(path.with_name(f"{path.stem}_tokens.jsonl"), rows)


def repeat_task(run):
    """The last step has a group of the task of the first group of the first step, with other texts."""
    paths = [path for path in sorted((run / "samples").glob("step_*.jsonl")) if "tokens" not in path.name]
    if len(paths) < 2:
        return
    group = json.loads(paths[0].read_text().splitlines()[0])
    for one in group["trajectories"]:
        one["completion"] = f"First {one['completion']} and then <b>more</b>\n"
    with open(paths[-1], "a") as file:
        file.write(json.dumps(group | {"group": 999999}) + "\n")


def status(run):
    states = ["admitted", "claimed", "finalized", "leased"]
    groups = [{"id": 100 + at, "state": states[at % 4], "policy_version": 110 + at % 5, "tokens": 100 * at, "bytes": 2000 * at, "reward": None if at % 4 < 2 else at / 40, "uses": 0, "age_ms": 250 * at} for at in range(40)]
    (run / "status.json").write_text(json.dumps({
        "time_s": 12.3, "step": 120,
        "buffer": {"capacity": 64, "admitted": 10, "claimed": 10, "finalized": 10, "leased": 10, "quarantined": 1, "dropped_stale": 4, "expired": 2, "evicted": 3, "groups": groups,
                   "leases": [{"id": 4, "consumer": f"trainer {HOSTILE}", "step": 120, "groups": [103, 107], "expires_in_ms": 1500, "expired": False}, {"id": 3, "consumer": "other", "step": 119, "groups": [], "expires_in_ms": None, "expired": True}]},
        "weights": {"version": 120, "bytes": 454584, "publish_s": 0.004, "receivers": [{"name": f"sampler {at}", "version": 120 - at, "lag": at, "bytes": 454584, "apply_s": 0.002 * (at + 1), "stall_s": 0.001 * at} for at in range(3)]},
        "roles": ["trainer waits for a batch since 0.2 s", f"sampler 0 decodes 64 sequences {HOSTILE}"], "bottleneck": "sampling: the trainer waits 38 % of the time"}))


def add_to(run):
    repeat_task(run)
    tokens(run)
    timeline(run, 40)
    status(run)


if __name__ == "__main__":
    add_to(pathlib.Path(sys.argv[1]))

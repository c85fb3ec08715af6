"""TensorBoard's, W&B's and Trackio's own readers read what a run wrote: check.py RUN."""

import glob
import json
import math
import os
import subprocess
import sys

from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.util import tensor_util

run = sys.argv[1]
lines = [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl"))]
written = {}
for line in lines:
    for name, value in line.items():
        if name not in ("step", "bottleneck") and value is not None:
            written.setdefault(name, {})[line["step"]] = value

reader = plugin_event_multiplexer.EventMultiplexer(tensor_size_guidance={"scalars": 10**6, "histograms": 10**4, "text": 10**4})
reader.AddRunsFromDirectory(os.path.join(run, "tensorboard"))
reader.Reload()
[name] = reader.Runs()
tags = reader.Runs()[name]["tensors"]
plugins = {tag: reader.SummaryMetadata(name, tag).plugin_data.plugin_name for tag in tags}
scalars = {tag for tag, plugin in plugins.items() if plugin == "scalars"}
assert set(written) <= scalars, set(written) - scalars
for tag, values in written.items():
    read = {event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in reader.Tensors(name, tag)}
    read = {step: value for step, value in read.items() if not math.isnan(value)}
    assert set(read) == set(values), (tag, sorted(read), sorted(values))
    assert all(math.isclose(read[step], values[step], rel_tol=1e-6, abs_tol=1e-30) for step in values), tag
steps = [line["step"] for line in lines if line["step"] > 0]
for tag in ("distribution/completion_length", "distribution/reward", "distribution/staleness"):
    assert plugins[tag] == "histograms", plugins
    assert [event.step for event in reader.Tensors(name, tag)] == steps, tag
# All sampled tokens that passes were made of; a step without an update has none.
ratios = {event.step: tensor_util.make_ndarray(event.tensor_proto) for event in reader.Tensors(name, "distribution/importance_ratio")}
assert plugins["distribution/importance_ratio"] == "histograms" and ratios and set(ratios) <= set(steps), plugins
for line in (line for line in lines if line["step"] in ratios):
    buckets = ratios[line["step"]]
    assert (buckets[:-1, 1] == buckets[1:, 0]).all() and (buckets[:, 0] < buckets[:, 1]).all(), buckets
    tokens = line["trainer/tokens_per_s"] * line["time/forward_backward"]
    assert math.isclose(buckets[:, 2].sum(), tokens, rel_tol=1e-6), (line["step"], buckets, tokens)
text = tensor_util.make_ndarray(reader.Tensors(name, "samples")[-1].tensor_proto)[0].decode()
assert plugins["samples"] == "text" and text.startswith("**prompt**"), text
print(f"ok TensorBoard: {len(scalars)} scalars of {len(steps)} steps, 4 histograms, samples")

for directory in glob.glob(os.path.join(run, "wandb", "offline-run-*")):
    wandb = os.path.join(os.path.dirname(sys.executable), "wandb")
    shown = subprocess.run([wandb, "leet", "inspect", "--summary", directory], capture_output=True, text=True, timeout=120, check=True)
    for expected in ("finished", "reward/mean", os.path.basename(run)):
        assert expected in shown.stdout, shown.stdout
    print(f"ok W&B: {os.path.basename(directory)}")

from trackio.sqlite_storage import SQLiteStorage

name = os.path.basename(run)
logs = SQLiteStorage.get_logs("rlrun", name)
read = {(log["step"], key): value for log in logs for key, value in log.items() if key not in ("step", "timestamp")}
for tag, values in written.items():
    for step, value in values.items():
        assert math.isclose(read[step, tag], value, rel_tol=1e-12, abs_tol=1e-30), (step, tag)
traces = SQLiteStorage.get_traces("rlrun", name)
assert traces and traces[0]["messages"][1]["role"] == "assistant", traces[:1]
assert SQLiteStorage.get_run_config("rlrun", name)["trainer"]["steps"] == lines[-1]["step"]
print(f"ok Trackio: {len(logs)} lines, {len(traces)} samples")

"""A real vLLM samples for a run: vllm.py RLRUN VLLM SCRATCH.

The run starts the engine itself. While it trains, the engine is paused by another program, and then killed with all its
processes; every step is trained all the same, and the policy learns. Then a worker brings the engine to a run, and then a run with
LoRA pushes its adapter alone.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

rlrun, vllm, scratch = sys.argv[1:]
recipe = "recipes/grpo_math.toml"
steps = 40
base, run = os.path.join(scratch, "vllm-base"), os.path.join(scratch, "vllm-run")

# Heads of 32, which vLLM's kernels for the processor have.
subprocess.run([rlrun, recipe, "--run-dir", base + "-run", "--quiet", "--set", "model.random.num_heads=2",
                "--set", "model.random.num_kv_heads=2", "--set", "trainer.steps=1", "--set", "data.arithmetic.eval_tasks=16"],
               check=True)
subprocess.run([rlrun, "export", base + "-run", "--out", base], check=True)
# vLLM's kernels for the processor keep a packed copy of a tied head, which no reload replaces; the probes refuse that. The model
# gets a head of its own.
with open(os.path.join(base, "config.json")) as file:
    config = json.load(file)
config["tie_word_embeddings"] = False
with open(os.path.join(base, "config.json"), "w") as file:
    json.dump(config, file)
[weights] = [os.path.join(base, name) for name in os.listdir(base) if name.endswith(".safetensors")]
with open(weights, "rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header, data = json.loads(file.read(size)), file.read()
embedding = header["model.embed_tokens.weight"]
start, end = embedding["data_offsets"]
header["lm_head.weight"] = {**embedding, "data_offsets": [len(data), len(data) + end - start]}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(weights, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text + data + data[start:end])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"


def program_of(name, options):
    """A script that starts the engine."""
    path = os.path.join(scratch, name)
    with open(path, "w") as file:
        file.write(f"""#!/bin/sh
export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
exec {vllm} serve {base} --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 96 --enforce-eager \\
  --logprobs-mode processed_logprobs --enable-scale-out --max-num-seqs 64 {options}
""")
    os.chmod(path, 0o755)
    return path


program = program_of("vllm.sh", "")


def lines():
    try:
        return [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl")) if line.endswith("\n")]
    except FileNotFoundError:
        return []


def until(what, condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert training.poll() is None, f"the run has ended before {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def processes(of):
    """The process `of` and those below it."""
    found = [of]
    for parent in found:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


arguments = {
    "model.path": base, "warmup.steps": 0, "trainer.steps": steps, "data.arithmetic.eval_tasks": 200, "eval.interval": 20,
    "rollout.engine": "vllm", "rollout.urls": [url], "rollout.command": [program], "log.schedule": "true",
}
sets = [part for key, value in arguments.items() for part in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")]
training = subprocess.Popen([rlrun, recipe, "--run-dir", run, *sets])
try:
    until("step 5", lambda: len(lines()) > 5, 600)
    urllib.request.urlopen(urllib.request.Request(f"{url}/pause?mode=keep", method="POST"), timeout=60).read()
    paused_at = lines()[-1]["step"]
    until("a step after the pause", lambda: lines()[-1]["step"] > paused_at + 3, 300)
    [shell] = [p for p in processes(training.pid) if program in open(f"/proc/{p}/cmdline").read()][:1]
    victims = [p for p in processes(shell) if "serve" in open(f"/proc/{p}/cmdline").read() or p != shell]
    for process in victims:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    killed_at = lines()[-1]["step"]
    until("a step after the kill", lambda: lines()[-1]["step"] > killed_at, 600)
    assert training.wait(timeout=900) == 0
finally:
    training.terminate()
    training.wait()

trained = [line for line in lines() if line["step"] > 0]
assert [line["step"] for line in trained] == list(range(1, steps + 1))
on_policy = [line for line in trained if line["staleness/max"] == 0]
assert on_policy and all(line["kl/mismatch"] < 1e-6 for line in on_policy), [line["kl/mismatch"] for line in on_policy]
accuracy = [line["eval/accuracy"] for line in lines() if "eval/accuracy" in line]
assert accuracy[-1] > accuracy[0] + 0.1, accuracy
log = open(os.path.join(run, "logs", "attempt_1.log")).read()
# A pause that comes while a version is pushed ends with the push.
for part in ("is left out until it answers again", "is started again"):
    assert part in log, log
groups = [line["group"] for step in range(1, steps + 1) for line in map(json.loads, open(f"{run}/samples/step_{step:06}.jsonl"))]
assert len(groups) == len(set(groups)), "a group was trained on twice"
time.sleep(1)
with socket.socket() as probe:
    assert probe.connect_ex(("127.0.0.1", port)) != 0, "the engine runs on after the run"
worst = max(line["kl/mismatch"] for line in on_policy)
print(f"ok vLLM: {steps} steps with a pause and a kill, accuracy {accuracy[0]:.3f} to {accuracy[-1]:.3f}, "
      f"kl/mismatch of the current version at most {worst:.1e}")

# Its training repeats without the engine.
replayed = subprocess.run([rlrun, "replay", run, "--quiet"], check=True, capture_output=True, text=True, timeout=900).stdout
assert "bit for bit" in replayed and "of an engine of another program were taken as recorded" in replayed, replayed
print(f"ok replay: {replayed.splitlines()[-1]}")

# A worker brings the engine: the run knows nothing of it, and shares no directory with it.
joined = run + "-joined"
arguments = {
    "model.path": base, "warmup.steps": 0, "trainer.steps": 10, "eval.interval": 0, "placement.processes": "true",
    "placement.rollout_workers": 0, "buffer.listen": "127.0.0.1:0", "buffer.credentials": os.path.join(scratch, "vllm-keys"),
}
sets = [part for key, value in arguments.items() for part in ("--set", f"{key}={value}")]
worker = [rlrun, "worker", "rollout", "--join", joined, "--engine", "vllm", "--engine-url", url]
children = []
try:
    for command in ([program], [rlrun, recipe, "--quiet", "--run-dir", joined, *sets], worker):
        children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if command[0] == program else None))
    engine, training, sampling = children
    assert training.wait(timeout=900) == 0 and sampling.wait(timeout=60) == 0
finally:
    for child in reversed(children):
        child.terminate()
        child.wait()
trained = [line for line in map(json.loads, open(os.path.join(joined, "metrics.jsonl"))) if line["step"] > 0]
assert len(trained) == 10
on_policy = [line for line in trained if line["staleness/max"] == 0]
assert on_policy and all(line["kl/mismatch"] < 1e-6 for line in on_policy), on_policy
print(f"ok vLLM of a worker: {len(trained)} steps")

# The adapter alone: the engine keeps the base model.
adapter = run + "-adapter"
lora = program_of("vllm-lora.sh", "--enable-lora --max-lora-rank 16")
arguments = {
    "model.path": base, "warmup.steps": 0, "trainer.steps": 20, "trainer.learning_rate": 1e-3, "eval.interval": 0, "lora.rank": 8,
    "lora.alpha": 16, "rollout.engine": "vllm", "rollout.urls": [url], "rollout.command": [lora], "rollout.push_adapter": "true",
}
sets = [part for key, value in arguments.items() for part in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")]
subprocess.run([rlrun, recipe, "--quiet", "--run-dir", adapter, *sets], check=True, timeout=900)
trained = [line for line in map(json.loads, open(os.path.join(adapter, "metrics.jsonl"))) if line["step"] > 0]
on_policy = [line for line in trained if line["staleness/max"] == 0]
assert len(trained) == 20 and on_policy and all(line["kl/mismatch"] < 1e-6 for line in on_policy), on_policy
files = os.path.join(adapter, "engine_weights")
newest = os.path.join(files, max(os.listdir(files)))
assert sorted(os.listdir(newest)) == ["adapter_config.json", "adapter_model.safetensors"], os.listdir(newest)
size = os.path.getsize(os.path.join(newest, "adapter_model.safetensors"))
whole = os.path.getsize(weights)
print(f"ok vLLM with an adapter: {len(trained)} steps, {size} bytes a version, all weights have {whole}")

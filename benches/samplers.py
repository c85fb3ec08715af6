#!/usr/bin/env python3
"""Many samplers on one run: processor time of the run, bytes of weights, and a worker behind a slow link.

    cargo build --release --locked -p rlrun -p rlrun-bench
    benches/samplers.py lead DIR [--workers 1 8 64] [--rounds 3]   simulated workers, about a minute for each row and round
    benches/samplers.py real DIR                                   eight processes of `rlrun worker rollout`
    benches/samplers.py link DIR [--mbit 50]                       a worker in a network namespace; root, `ip` and `tc`

`lead` starts a run without a sampler of its own and lets `rlrun-bench samplers` join it: workers that speak the whole protocol
and sample random tokens, 128 groups at a time over all workers. `cpu` is the processor time of the run (controller, buffer, hub
and trainer) per trained token, from /proc; `bytes per version` is what the run sends; `all have it` is the time from the first
request for a version to the last worker that has it. Rows with `tree` have as many relays as workers.

`link` puts one of two workers behind a token bucket in both directions and trains at several learning rates and formats of
weights. The other worker is on the host of the run. It fails if a group was trained on beyond the bound, or the run stopped.

Every row is also one line of DIR/samplers.jsonl. What is started is ended, and the namespace is removed.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TICKS = os.sysconf("SC_CLK_TCK")
# Longest time for a run to be ready, to advance and to end, seconds.
READY, ADVANCE, END = 300, 300, 60
# Steps that are not counted: workers join, memory is mapped.
WARM_UP = 5
# Trajectories of a batch of recipes/grpo_math.toml.
TRAJECTORIES = 16 * 8
# Of the model of `link`: 13 million weights.
SIZES = ["hidden_size=512", "intermediate_size=1408", "num_layers=4", "num_heads=8", "num_kv_heads=8"]
NAMESPACE, INSIDE, OUTSIDE = "rlrun-samplers", "10.213.0.2", "10.213.0.1"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lead", "real", "link"])
    parser.add_argument("dir")
    parser.add_argument("--bin", default=os.path.join(ROOT, "target", "release"), help="directory of both programs")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--longest-pause-ms", type=int, default=500, help="of a simulated worker without a slot")
    parser.add_argument("--mbit", type=float, default=50)
    parser.add_argument("--rates", nargs="+", default=["1e-6", "1e-5"], help="learning rates of `link`")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


class Run:
    """A run without samplers of its own, which workers join at `url`."""

    def __init__(self, args, name, host, sets, recipe=os.path.join(ROOT, "recipes", "grpo_math.toml")):
        self.directory = os.path.join(args.dir, name)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.tokens = os.path.join(args.dir, "tokens")
        with open(self.tokens, "w") as file:
            file.write(f"writer {os.urandom(16).hex()}\n")
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        self.url = f"http://{host}:{port}"
        sets = [f"buffer.listen={host}:{port}", "placement.processes=true", "placement.rollout_workers=0",
                f"buffer.token_file={json.dumps(self.tokens)}",
                "warmup.steps=20", "eval.interval=0", "checkpoint.interval=0", "log.samples=0",
                f"trainer.steps={args.steps}", "data.arithmetic.eval_tasks=20", *sets, *args.sets]
        command = [os.path.join(args.bin, "rlrun"), recipe, "--run-dir", self.directory, "--quiet"]
        self.process = start(command + [part for value in sets for part in ("--set", value)])
        self.samples = []

    def wait_for_workers(self):
        """Waits until workers may join."""
        wait(READY, lambda: self.members() is not None, self.process)

    def members(self):
        try:
            with open(self.tokens) as file:
                headers = {"authorization": f"Bearer {file.read().split()[-1]}"}
            ask = urllib.request.Request(f"{self.url}/v1/run/workers", headers=headers)
            with urllib.request.urlopen(ask, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def steps(self):
        try:
            with open(os.path.join(self.directory, "metrics.jsonl")) as file:
                lines = [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []
        return [line for line in lines if line["step"] > 0]

    def follow(self, look=lambda: None):
        """Waits for the end of the run; notes its processor time and looks whenever a step is complete."""
        known, since = 0, time.monotonic()
        while self.process.poll() is None:
            count = len(self.steps())
            cpu = processor_seconds(self.process.pid)
            if count > known and cpu is not None:
                known, since = count, time.monotonic()
                self.samples.append((count, cpu, since))
                look()
            if time.monotonic() - since > ADVANCE:
                raise SystemExit(f"{self.directory}: no step for {ADVANCE} s")
            time.sleep(0.05)
        if self.process.returncode != 0:
            raise SystemExit(f"{self.directory}: status {self.process.returncode}")

    def window(self):
        """First and last counted step, processor seconds and seconds between them."""
        counted = [sample for sample in self.samples if sample[0] >= WARM_UP]
        (first, before, begun), (last, after, ended) = counted[0], counted[-1]
        return first, last, after - before, ended - begun


def start(command, **kwargs):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, **kwargs)


def end(processes):
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(timeout=END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(limit, condition, process):
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"{process.args}: status {process.poll()} while something was awaited")
        time.sleep(0.05)


def processor_seconds(root):
    """Of a process and its children, seconds; `None` if one has just ended."""
    total, todo = 0, [root]
    try:
        while todo:
            pid = todo.pop()
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    todo += [int(child) for child in file.read().split()]
    except OSError:
        return None
    return total / TICKS


def learnable(args):
    """A recipe whose reward tells the answers of an untrained model apart, so that every step changes the weights."""
    path = os.path.join(args.dir, "learnable.toml")
    with open(path, "w") as file:
        file.write(f"extends = {json.dumps(os.path.join(ROOT, 'recipes', 'grpo_math.toml'))}\n"
                   "[[rewards]]\nkind = \"regex\"\npattern = \"[02468]$\"\n[eval.correct]\nreward = \"regex\"\n")
    return path


def trained_tokens(steps):
    return sum(step["completions/mean_length"] * TRAJECTORIES for step in steps)


def write(args, row):
    print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()), flush=True)
    with open(os.path.join(args.dir, "samplers.jsonl"), "a") as file:
        file.write(json.dumps(row) + "\n")


def measured(run):
    """What the files of a run say of it."""
    first, last, cpu, seconds = run.window()
    steps = run.steps()
    counted = steps[first:last]
    sent = steps[last - 1]["weights/sent_bytes"] - steps[first - 1]["weights/sent_bytes"]
    return {
        "steps": last - first,
        "cpu_us_per_token": 1e6 * cpu / trained_tokens(counted),
        "tokens_per_s": trained_tokens(counted) / seconds,
        "cores": cpu / seconds,
        "bytes_per_version": sent / (last - first),
        "push_bytes": statistics.median(step["weights/bytes"] for step in counted),
        "relay_failures": int(steps[last - 1]["weights/relay_failures"]),
        "staleness_max": max(step["staleness/max"] for step in steps),
    }


def lead(args):
    for round_ in range(args.rounds):
        for workers in args.workers:
            for tree in (False, True):
                if tree and workers == 1:
                    continue
                name = f"lead_{workers}{'_tree' if tree else ''}_{round_}"
                sets = ["weights.dtype=bf16", "trainer.learning_rate=1e-6"]
                run = Run(args, name, "127.0.0.1", sets)
                load = None
                try:
                    run.wait_for_workers()
                    command = [os.path.join(args.bin, "rlrun-bench"), "samplers", "--join", run.url, "--token-file",
                               run.tokens, "--workers",
                               str(workers), "--relays", str(workers if tree else 0), "--running",
                               str(max(1, 128 // workers)), "--longest-pause-ms", str(args.longest_pause_ms)]
                    load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                    run.follow()
                    said = json.loads(load.communicate(timeout=END)[0])
                finally:
                    end([run.process] + ([load] if load else []))
                seen = {name: said[name] for name in ("all_have_it_s", "requests_for_slots", "versions")}
                write(args, {"workers": workers, "tree": tree, "round": round_, **measured(run), **seen})


def real(args):
    for round_ in range(args.rounds):
        for tree in (False, True):
            run = Run(args, f"real_{'tree_' if tree else ''}{round_}", "127.0.0.1",
                      ["weights.dtype=bf16", "weights.transport=http", "trainer.learning_rate=1e-6"], learnable(args))
            workers = []
            try:
                run.wait_for_workers()
                relay = ["--relay", "127.0.0.1:0"] if tree else []
                for index in range(8):
                    workers.append(start([os.path.join(args.bin, "rlrun"), "worker", "rollout", "--join", run.url,
                                          "--token-file", run.tokens, "--name", f"worker {index}", "--threads", "1",
                                          *relay],
                                         stderr=subprocess.DEVNULL))
                run.follow()
            finally:
                end([run.process, *workers])
            write(args, {"workers": 8, "real": True, "tree": tree, "round": round_, **measured(run)})


def network(*command, check=True):
    subprocess.run(["ip", *command], check=check, stderr=None if check else subprocess.DEVNULL)


def make_link(mbit):
    """A namespace that is reached through a token bucket."""
    remove_link()
    network("netns", "add", NAMESPACE)
    network("link", "add", "rlrun-out", "type", "veth", "peer", "name", "rlrun-in", "netns", NAMESPACE)
    inside = ["netns", "exec", NAMESPACE]
    network("addr", "add", f"{OUTSIDE}/24", "dev", "rlrun-out")
    network("link", "set", "rlrun-out", "up")
    network(*inside, "ip", "addr", "add", f"{INSIDE}/24", "dev", "rlrun-in")
    network(*inside, "ip", "link", "set", "rlrun-in", "up")
    network(*inside, "ip", "link", "set", "lo", "up")
    bucket = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "rlrun-out", *bucket], check=True)
    network(*inside, "tc", "qdisc", "add", "dev", "rlrun-in", *bucket)


def remove_link():
    # The pair of devices ends with it.
    network("netns", "del", NAMESPACE, check=False)


def link(args):
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        print(f"SKIPPED the slow link: {'it needs root' if not missing else 'there is no ' + ' and no '.join(missing)}")
        return
    make_link(args.mbit)
    bound = 2
    try:
        for dtype in ("f32", "bf16"):
            for rate in args.rates:
                sets = [f"weights.dtype={dtype}", f"trainer.learning_rate={rate}", "weights.transport=http",
                        f"buffer.max_staleness={bound}", "buffer.insecure=true",
                        "buffer.on_stale=drop", *(f"model.random.{size}" for size in SIZES)]
                one_link(args, dtype, rate, sets, bound)
    finally:
        remove_link()


def one_link(args, dtype, rate, sets, bound):
    run = Run(args, f"link_{dtype}_{rate}", OUTSIDE, sets, learnable(args))
    workers, sampled = [], {}
    try:
        time.sleep(1)
        for name, inside in (("near", []), ("behind the link", ["ip", "netns", "exec", NAMESPACE])):
            workers.append(start([*inside, os.path.join(args.bin, "rlrun"), "worker", "rollout", "--join", run.url,
                                  "--token-file", run.tokens, "--name", name, "--threads", "1"],
                                 stderr=subprocess.DEVNULL))
        run.follow(lambda: sampled.update({member["name"]: member["sampled_tokens"] for member in run.members() or []}))
    finally:
        end([run.process, *workers])
    steps, sampled = run.steps(), sampled.get("behind the link", 0)
    # A full push comes every `weights.full_every` versions.
    pushes = [step["weights/bytes"] for step in steps[1:] if step.get("weights/density", 1.0) > 0]
    row = {
        "dtype": dtype,
        "learning_rate": rate,
        "mbit": args.mbit,
        "steps": len(steps),
        "push_bytes": statistics.median(pushes),
        "push_s_on_link": statistics.median(pushes) * 8e-6 / args.mbit,
        "density": statistics.median(step.get("weights/density", 1.0) for step in steps[1:]),
        "sampled_behind_the_link": sampled,
        "received_bytes_last": steps[-1]["weights/received_bytes"],
        "apply_s": statistics.median(step["weights/apply_s"] for step in steps[1:]),
        "subscribers": int(max(step["weights/subscribers"] for step in steps)),
        "dropped_stale": sum(step.get("buffer/dropped_stale", 0) for step in steps),
        "staleness_max": max(step["staleness/max"] for step in steps),
        "step_s": statistics.median(step["time/step"] for step in steps),
    }
    write(args, row)
    if row["staleness_max"] > bound or len(steps) != args.steps:
        sys.exit(f"the bound is {bound}, and {args.steps} steps were to be trained: {row}")


def main():
    args = arguments()
    os.makedirs(args.dir, exist_ok=True)
    args.dir = os.path.abspath(args.dir)
    {"lead": lead, "real": real, "link": link}[args.what](args)


if __name__ == "__main__":
    main()

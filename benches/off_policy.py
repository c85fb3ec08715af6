#!/usr/bin/env python3
"""The off-policy study: staleness against algorithm, several seeds each.

    cargo build --release --workspace
    benches/off_policy.py run DIR [--seeds 5]     eight minutes on two cores
    benches/off_policy.py table DIR

Every seed warms one model up; all arms start from it, with recipes/off_policy.toml. What is compared is the mean reward
over all steps, which falls when learning is slow and when it breaks, and the accuracy at the end. Runs are asynchronous, so
they differ a little when they are repeated; the table gives mean and standard deviation over seeds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STALENESS = [0, 1, 2, 4, 8, 16]
ARMS = {
    "PPO, anchored at the sampler": [],
    "recomputed, uncorrected": ["algorithm.correction=none"],
    "decoupled PPO": ["algorithm.correction=token_truncate"],
    "decoupled PPO, sequence mask": ["algorithm.proximal=recompute"],
    "AIPO": ["algorithm.kind=aipo"],
    "CISPO": ["algorithm.kind=cispo"],
    "TB": ["algorithm.kind=tb"],
    "REINFORCE": ["algorithm.kind=reinforce"],
    "REINFORCE, uncorrected": ["algorithm.kind=reinforce", "algorithm.correction=none"],
}


def rlrun(recipe, run_dir, sets):
    binary = os.path.join(ROOT, "target", "release", "rlrun")
    command = [binary, os.path.join(ROOT, "recipes", recipe), "--run-dir", run_dir, "--quiet"]
    for value in sets:
        command += ["--set", value]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def name(arm, staleness, seed):
    return "%s_%d_%d" % (arm.replace(" ", "_").replace(",", ""), staleness, seed)


def run(directory, seeds):
    for seed in range(seeds):
        base = os.path.join(directory, "base_%d" % seed)
        if not os.path.exists(base):
            sets = ["seed=%d" % seed, "trainer.steps=1", "checkpoint.interval=1", "eval.interval=0"]
            rlrun("grpo_math.toml", base, sets)
        model = os.path.join(base, "checkpoints", "step_000000", "model")
        common = ["seed=%d" % seed, "model.path=%s" % json.dumps(model), "warmup.steps=0"]
        for staleness in STALENESS:
            for arm, sets in ARMS.items():
                run_dir = os.path.join(directory, name(arm, staleness, seed))
                if not os.path.exists(run_dir):
                    rlrun("off_policy.toml", run_dir, common + ["buffer.max_staleness=%d" % staleness] + sets)
        print("seed %d done" % seed, flush=True)


def measured(run_dir):
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if "reward/mean" in line]
    last = steps[len(steps) // 2 :]
    return (
        statistics.mean(line["reward/mean"] for line in steps),
        steps[-1]["eval/accuracy"],
        statistics.mean(line["staleness/mean"] for line in last),
    )


def table(directory):
    seeds = [seed for seed in range(100) if os.path.exists(os.path.join(directory, name("TB", 16, seed)))]
    if not seeds:
        sys.exit("%s holds no complete seed; run `benches/off_policy.py run %s` first" % (directory, directory))
    for what, index in (("mean reward over the run", 0), ("accuracy at the end", 1), ("staleness", 2)):
        print("\n%s, %d seeds\n" % (what, len(seeds)))
        print("| arm | " + " | ".join(str(staleness) for staleness in STALENESS) + " |")
        print("|---" * (1 + len(STALENESS)) + "|")
        for arm in ARMS:
            cells = []
            for staleness in STALENESS:
                of = [measured(os.path.join(directory, name(arm, staleness, seed)))[index] for seed in seeds]
                spread = statistics.stdev(of) if len(of) > 1 else 0.0
                cells.append("%.2f +- %.2f" % (statistics.mean(of), spread))
            print("| %s | %s |" % (arm, " | ".join(cells)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "table"])
    parser.add_argument("directory")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    os.makedirs(arguments.directory, exist_ok=True)
    if arguments.verb == "run":
        run(arguments.directory, arguments.seeds)
    table(arguments.directory)


if __name__ == "__main__":
    main()

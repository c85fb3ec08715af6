"""The choice of `rlrun plan --search` on this machine against a sweep of the same settings. ../docs/planning.md has the results.

  python benches/planner.py --data DIR --rlrun rlrun --rlrun-bench rlrun-bench

The model is trained for a few steps; then the learning rate is 1e-12, so that lengths and the share of trained groups are the
same in all runs. The search is calibrated from `rlrun-bench` and one synchronous run. Every setting of the grid runs once in each
round, in random order. At last the choice runs in turns with each of the fastest settings.
"""
import argparse, itertools, json, random, shutil, subprocess, tomllib
from pathlib import Path
from statistics import median

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "grpo_math.toml"
SAME = {"model.path": "model", "warmup.steps": 0, "trainer.learning_rate": 1e-12}
QUIET = {"eval.interval": 0, "checkpoint.interval": 0}
STARTING = 10  # steps that are left out
FASTEST = 3    # settings that run in turns with the choice


def output(a, *command):
    return subprocess.run([str(part) for part in command], cwd=a.data, check=True, stdout=subprocess.PIPE, text=True).stdout


def sets(values):
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def steps_per_s(a, name, values):
    """Runs the recipe in the directory `name`."""
    shutil.rmtree(a.data / name, ignore_errors=True)
    output(a, a.rlrun, RECIPE, "--run-dir", name, "--quiet", *sets({**QUIET, **values}))
    rows = [json.loads(line) for line in open(a.data / name / "metrics.jsonl")]
    times = [row["time_s"] for row in rows if row.get("step", 0) > STARTING]
    return (len(times) - 1) / (times[-1] - times[0])


def setting(a, staleness, running):
    values = {**SAME, "trainer.steps": a.steps, "buffer.max_staleness": staleness, "rollout.max_running": running}
    # A name that was used before costs the file system a search.
    a.runs += 1
    name = f"run{a.runs}"
    speed = steps_per_s(a, name, values)
    shutil.rmtree(a.data / name)
    return speed


def choice(a):
    """Trains the model, measures it, and returns the staleness and the running sequences that the search chooses."""
    steps_per_s(a, "start", {"trainer.steps": 70, "buffer.max_staleness": 0})
    shutil.rmtree(a.data / "model", ignore_errors=True)
    output(a, a.rlrun, "export", "start", "--out", "model")
    steps_per_s(a, "synchronous", {**SAME, "trainer.steps": a.steps, "buffer.max_staleness": 0})
    lines = ""
    for threads in (a.threads, max(1, a.threads // 2)):
        own = ["--model", "model", "--threads", threads, "--json"]
        lines += output(a, a.rlrun_bench, "generate", *own, "--sweep", "--prompt", 8, "--new", 16)
        for length in (16, 48):
            lines += output(a, a.rlrun_bench, "train", *own, "--length", length, "--repeats", 15)
    (a.data / "bench.jsonl").write_text(lines)
    (a.data / "fast.toml").unlink(missing_ok=True)
    print(output(a, a.rlrun, "plan", RECIPE, *sets({"model.path": "model", "warmup.steps": 0}), "--search", "--calibration",
                 "bench.jsonl", "--calibration", "synchronous", "--write", "fast.toml"))
    found = tomllib.loads((a.data / "fast.toml").read_text())
    return found["buffer"]["max_staleness"], found["rollout"]["max_running"]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", type=Path, required=True, help="folder of runs and results")
    ap.add_argument("--rlrun", default="rlrun"), ap.add_argument("--rlrun-bench", default="rlrun-bench")
    ap.add_argument("--threads", type=int, default=2), ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--rounds", type=int, default=3), ap.add_argument("--pairs", type=int, default=11)
    a = ap.parse_args()
    a.data.mkdir(parents=True, exist_ok=True)
    a.runs = 0
    chosen, grid, speeds = choice(a), list(itertools.product([0, 1, 2, 4, 8], [32, 64, 128, 256, 512])), {}
    for _ in range(a.rounds):
        random.shuffle(grid)
        for one in grid:
            speeds.setdefault(one, []).append(setting(a, *one))
    order = sorted(grid, key=lambda one: -median(speeds[one]))
    for one in order:
        print(f"staleness {one[0]}, {one[1]} running: {median(speeds[one]):.1f} steps/s", flush=True)
    for other in [one for one in order if one != chosen][:FASTEST]:
        pairs = []
        for turn in range(a.pairs):
            first, second = (chosen, other) if turn % 2 == 0 else (other, chosen)
            speed = {first: setting(a, *first), second: setting(a, *second)}
            pairs.append(speed[chosen] / speed[other])
        print(f"the choice {chosen} against {other}: {median(pairs):.3f}, median of {a.pairs} pairs", flush=True)


if __name__ == "__main__":
    main()

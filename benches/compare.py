"""rlrun against its peers, alternating, on the same models and tasks. README.md beside this file explains it.

  python benches/compare.py prepare --data DIR     write models, tasks and warm-ups, once
  python benches/compare.py run --data DIR         measure, append to DIR/comparison.jsonl, print the tables
  python benches/compare.py table --data DIR       print the tables again

In every round every contender of a contest runs once, so that a machine whose speed drifts drifts for all of them. A run
during which other processes took more than --max-other of the processors is disturbed: it is written down, repeated up to
--tries times, and never counted.
"""
import argparse, json, os, subprocess, sys, time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import Meter, busy_seconds

QUIET_SECONDS = 3


def contests(a):
    """(contest, model, unit, [(contender, command, metric or None for rlrun)])"""
    d, py, t = Path(a.data), [sys.executable], str(a.threads)
    peer = lambda script, *args: py + [str(HERE / "peers" / script), *map(str, args)]
    ours = lambda *args: [a.rlrun_bench, *map(str, args), "--threads", t, "--json"]
    for model in a.models.split(","):
        path, large = d / model, model == "mid"
        gen = ["--batch", 64, "--prompt", 16, "--new", 64, "--repeats", 1 if large else 3]
        rows = [("rlrun", ours("generate", "--model", path, *gen), None)]
        for engine in ["lean", "hf"] if large else ["lean", "lean-compile", "hf"]:
            rows.append((f"torch {engine}", peer("gen_bench.py", "--model", path, "--engine", engine, *gen), "gen_tok_s"))
        if os.environ.get("LLAMA_BATCHED_BENCH"):
            for dtype in ("f32", "f16"):
                command = peer("llama_bench.py", "--gguf", d / f"{model}-{dtype}.gguf", "--threads", t, *gen)
                rows.append((f"llama.cpp {dtype}", command, "gen_tok_s"))
        yield "generate", model, "tokens/s", rows
        sequences, length, micro = (8, 128, 8) if large else (256, 64, 32)
        shape = ["--sequences", sequences, "--length", length, "--microbatch-tokens", micro * length]
        rows = [("rlrun", ours("train", "--model", path, *shape, "--repeats", 2 if large else 3), None)]
        for engine in ["lean", "hf"] if large else ["lean", "lean-compile", "hf"]:
            command = peer("train_bench.py", "--model", path, "--engine", engine, "--seq", length, "--batch", sequences,
                           "--micro", micro, "--steps", 2 if large else 3)
            rows.append((f"torch {engine}", command, "train_tok_s"))
        yield "train", model, "tokens/s", rows
    tasks, test = d / "task/add_train.jsonl", d / "task/add_test.jsonl"
    for contest, model, forced in (("loop", "tiny_sftn", 0), ("loop forced", "tiny_sft", 64)):
        path, rows = d / model, []
        own = ["--force-length", forced] if forced else []
        for name, staleness in (("rlrun", 0), ("rlrun async", 4)):
            command = ours("loop", "--model", path, "--tasks", tasks, "--steps", a.steps, "--staleness", staleness, *own)
            rows.append((name, command, None))
        theirs = ["--model", path, "--train", tasks, "--test", test, "--steps", a.steps, "--lr", 1e-4, "--eval-every", 10 ** 6]
        theirs += ["--force-len", forced] if forced else []
        rows.append(("torch lean", peer("torch_grpo.py", *theirs), "step_ms"))
        if forced:
            rows.append(("torch lean-compile", peer("torch_grpo.py", *theirs, "--compile"), "step_ms"))
        rows.append(("TRL", peer("trl_grpo.py", *theirs), "step_ms"))
        yield contest, model, "ms/step", rows


def wait_until_quiet(limit, longest):
    """Waits until other processes were idle for some seconds; False if they were not in time."""
    start, quiet = time.monotonic(), 0
    while quiet < QUIET_SECONDS:
        if time.monotonic() - start > longest:
            return False
        before = busy_seconds()
        time.sleep(1)
        quiet = quiet + 1 if (busy_seconds() - before) / os.cpu_count() <= limit else 0
    return True


def measure(command, metric, unit, a):
    """One run: value, peak memory in MiB, share of the processors that others took, the lines it printed."""
    env = {**os.environ, "PEERS_THREADS": str(a.threads), "TRANSFORMERS_VERBOSITY": "error"}
    meter = Meter()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    other = meter.other()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if metric is None:
        value = 1e3 * lines[0]["seconds"] if unit == "ms/step" else lines[0]["tokens_per_s"]
        memory = lines[0]["memory_mib"]
    else:
        value = next(line["value"] for line in lines if line["metric"] == metric)
        memory = next((line["value"] for line in lines if line["metric"] == "peak_rss"), None)
        memory = memory or next((line["peak_rss_mb"] for line in lines if "peak_rss_mb" in line), None)
    return value, memory, other, lines


def run(a):
    with open(Path(a.data) / "comparison.jsonl", "a") as out:
        chosen = [c for c in contests(a) if not a.only or c[0] in a.only.split(",")]
        for turn in range(a.rounds):
            for contest, model, unit, rows in chosen:
                for contender, command, metric in rows:
                    for attempt in range(a.tries):
                        quiet = wait_until_quiet(a.max_other, a.max_wait)
                        value, memory, other, lines = measure(command, metric, unit, a)
                        row = {"contest": contest, "model": model, "contender": contender, "round": turn, "value": value,
                               "unit": unit, "memory_mib": memory, "threads": a.threads, "other_cpu": other,
                               "counted": other <= a.max_other, "lines": lines}
                        out.write(json.dumps(row) + "\n")
                        out.flush()
                        note = "" if row["counted"] else f" DISTURBED: others took {other:.0%} of the processors"
                        print(f"{contest} {model} {contender}: {value:.5g} {unit}{note}", file=sys.stderr, flush=True)
                        if row["counted"] or not quiet:  # a machine that never gets quiet is no reason to try on and on
                            break


def table(a):
    rows = [json.loads(line) for line in open(Path(a.data) / "comparison.jsonl")]
    groups = {}
    for row in rows:
        groups.setdefault((row["contest"], row["model"], row["unit"]), {}).setdefault(row["contender"], []).append(row)
    for (contest, model, unit), contenders in groups.items():
        print(f"\n{contest}, {model}\n\n| contender | {unit} | min-max | runs | disturbed | rlrun is faster by | peak MiB |")
        print("|---|---|---|---|---|---|---|")
        counted = {name: [r for r in runs if r["counted"]] for name, runs in contenders.items()}
        mid = {name: median(r["value"] for r in runs) for name, runs in counted.items() if runs}
        for name, runs in contenders.items():
            good = counted[name]
            cells = [name, "-", "-", str(len(good)), str(len(runs) - len(good)), "-", "-"]
            if good:
                values, memory = [r["value"] for r in good], [r["memory_mib"] for r in good if r["memory_mib"]]
                cells[1:3] = [f"{mid[name]:.5g}", f"{min(values):.5g}-{max(values):.5g}"]
                if "rlrun" in mid:
                    ratio = mid[name] / mid["rlrun"] if unit == "ms/step" else mid["rlrun"] / mid[name]
                    cells[5] = f"{ratio:.2f}x"
                cells[6] = f"{median(memory):.0f}" if memory else "-"
            print("| " + " | ".join(cells) + " |")


def prepare(a):
    d = Path(a.data)
    d.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PEERS_THREADS": "1"}  # one thread: repeatable
    script = lambda name, *args: subprocess.run([sys.executable, str(HERE / "peers" / name), *map(str, args)], env=env, check=True)
    for model in a.models.split(","):
        if not (d / model / "config.json").exists():
            script("make_tiny_model.py", "--preset", model, "--out", d / model)
        for dtype in ("f32", "f16"):
            if not (d / f"{model}-{dtype}.gguf").exists():
                script("make_gguf.py", "--model", d / model, "--dtype", dtype, "--out", d / f"{model}-{dtype}.gguf")
    script("make_task.py", "--task", "add", "--out", d / "task")
    files = ["--train", d / "task/add_train.jsonl", "--test", d / "task/add_test.jsonl"]
    # From little to a good share right, then a model that knows but has a habit of being off by one.
    for start, end, more in (("tiny", "tiny_sft", ["--stop", 0.28]), ("tiny", "tiny_know", ["--stop", 0.97, "--eval-every", 50]),
                             ("tiny_know", "tiny_sftn", ["--noise", 0.55, "--stop-below", 0.42, "--lr", 2e-4, "--eval-every", 5])):
        if not (d / end / "config.json").exists():
            script("sft.py", "--model", d / start, *files, "--out", d / end, *more)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["prepare", "run", "table"])
    ap.add_argument("--data", required=True, help="folder of models, tasks and results")
    ap.add_argument("--rlrun-bench", default=str(HERE.parent / "target/release/rlrun-bench"), help="the binary that measures")
    ap.add_argument("--models", default="tiny,small", help="of tiny, small and mid")
    ap.add_argument("--only", help="contests, comma-separated: generate, train, loop, loop forced")
    ap.add_argument("--rounds", type=int, default=3), ap.add_argument("--tries", type=int, default=3)
    ap.add_argument("--threads", type=int, default=os.cpu_count()), ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--max-other", type=float, default=0.08, help="share of the processors that others may take")
    ap.add_argument("--max-wait", type=float, default=600, help="longest wait for a quiet machine, seconds")
    a = ap.parse_args()
    if a.what == "prepare":
        prepare(a)
    if a.what == "run":
        run(a)
    if a.what != "prepare":
        table(a)


if __name__ == "__main__":
    main()

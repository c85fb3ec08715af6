"""rlrun against its peers, alternating, on the same models and tasks. README.md beside this file explains it.

  python benches/compare.py prepare --data DIR     write models, tasks and warm-ups, once
  python benches/compare.py tune --data DIR        find the micro-batch of TRL for smollm2, once
  python benches/compare.py run --data DIR         measure, append to DIR/comparison.jsonl, print the tables
  python benches/compare.py table --data DIR       print the tables again

In every round every contender of a contest runs once, so that a machine whose speed drifts drifts for all of them. A run
during which other processes took more than --max-other of the processors is disturbed: it is written down, repeated up to
--tries times, and never counted.
"""
import argparse, json, os, subprocess, sys, time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import Meter, busy_seconds

QUIET_SECONDS = 3


@dataclass
class Shape:
    """What is measured with a model: sequences and tokens of each, repeats, and the engines of PyTorch."""
    generate: tuple = (64, 16, 64, 3)    # sequences, prompt, new tokens, repeats
    train: tuple = (256, 64, 32, 3)      # sequences, length, sequences per micro-batch, steps
    engines: tuple = (("lean",), ("lean-compile",), ("hf",))


SHAPES = {"tiny": Shape(), "small": Shape(),
          "mid": Shape((64, 16, 64, 1), (8, 128, 8, 2), (("lean",), ("hf",))),
          "smollm2": Shape((32, 32, 32, 2), (16, 96, 16, 2), (("lean",), ("lean-compile",), ("hf",), ("hf", "--dtype", "bf16")))}
SYSTEM = "Answer with the number only."
MICRO = (8, 16, 32, 64, 128)             # completions per pass that `tune` tries


def peer(script, *args):
    return [sys.executable, str(HERE / "peers" / script), *map(str, args)]


def models_alone(a):
    """The contests `generate` and `train`."""
    d = Path(a.data)
    ours = lambda *args: [a.rlrun_bench, *map(str, args), "--threads", str(a.threads), "--json"]
    torch = lambda engine: "torch " + " ".join(engine).replace("--dtype ", "")
    for model in a.models.split(","):
        path, shape = d / model, SHAPES[model]
        batch, prompt, new, repeats = shape.generate
        gen = ["--batch", batch, "--prompt", prompt, "--new", new, "--repeats", repeats]
        rows = [("rlrun", ours("generate", "--model", path, *gen), None),
                ("rlrun int8", ours("generate", "--model", path, *gen, "--quantization", "int8"), None)]
        for engine in shape.engines:
            rows.append((torch(engine), peer("gen_bench.py", "--model", path, *gen, "--engine", *engine), "gen_tok_s"))
        if os.environ.get("LLAMA_BATCHED_BENCH") and model != "smollm2":
            for dtype in ("f32", "f16"):
                command = peer("llama_bench.py", "--gguf", d / f"{model}-{dtype}.gguf", "--threads", a.threads, *gen)
                rows.append((f"llama.cpp {dtype}", command, "gen_tok_s"))
        yield "generate", model, "tokens/s", rows
        sequences, length, micro, steps = shape.train
        tokens = ["--sequences", sequences, "--length", length, "--microbatch-tokens", micro * length]
        rows = [("rlrun", ours("train", "--model", path, *tokens, "--repeats", steps), None)]
        for engine in shape.engines:
            command = peer("train_bench.py", "--model", path, "--seq", length, "--batch", sequences, "--micro", micro,
                           "--steps", steps, "--engine", *engine)
            rows.append((torch(engine), command, "train_tok_s"))
        yield "train", model, "tokens/s", rows


def loops(a):
    """The contests of whole GRPO steps."""
    d, models = Path(a.data), a.models.split(",")
    ours = lambda *args: [a.rlrun_bench, "loop", *map(str, args), "--threads", str(a.threads), "--json"]
    for contest, model, forced in (("loop", "tiny_sftn", 0), ("loop forced", "tiny_sft", 64)) if "tiny" in models else ():
        files, own = data_files(d, "add"), ["--force-length", forced] if forced else []
        own += ["--model", d / model, "--tasks", files[1], "--steps", a.steps]
        rows = [("rlrun", ours(*own, "--staleness", 0), None), ("rlrun async", ours(*own, "--staleness", 4), None)]
        theirs = ["--model", d / model, *files, "--steps", a.steps, "--lr", 1e-4, "--eval-every", 10 ** 6]
        theirs += ["--force-len", forced] if forced else []
        rows.append(("torch lean", peer("torch_grpo.py", *theirs), "step_ms"))
        if forced:
            rows.append(("torch lean-compile", peer("torch_grpo.py", *theirs, "--compile"), "step_ms"))
        rows.append(("TRL", peer("trl_grpo.py", *theirs), "step_ms"))
        yield contest, model, "ms/step", rows
    if "smollm2" in models:
        sets = ["data.chat=true", f"data.system_prompt={SYSTEM}", 'rewards=[{kind="math"}]', "trainer.learning_rate=2e-5",
                "trainer.microbatch_tokens=2048"]
        own = ["--model", d / "smollm2", "--tasks", data_files(d, "words")[1], "--prompts", 16, "--group", 8, "--max-new", 24,
               "--steps", min(a.steps, 12), *(word for value in sets for word in ("--set", value))]
        rows = [("rlrun", ours(*own, "--staleness", 0), None), ("rlrun async", ours(*own, "--staleness", 2), None)]
        tuned = d / "tuned.json"
        micro = json.load(open(tuned))["micro"] if tuned.exists() else MICRO[-1]
        rows.append(("TRL", trl_words(a, micro, min(a.steps, 4)), "step_ms"))
        yield "loop", "smollm2", "ms/step", rows


def data_files(d, task):
    return ["--train", d / f"task/{task}_train.jsonl", "--test", d / f"task/{task}_test.jsonl"]


def trl_words(a, micro, steps):
    d = Path(a.data)
    return peer("trl_grpo.py", "--model", d / "smollm2", *data_files(d, "words"), "--prompts", 16, "--group", 8, "--max-new", 24,
                "--lr", 2e-5, "--system", SYSTEM, "--steps", steps, "--micro", micro, "--eval-every", 10 ** 6)


def contests(a):
    """(contest, model, unit, [(contender, command, metric or None for rlrun)])"""
    yield from models_alone(a)
    yield from loops(a)


def tune(a):
    """Writes down the micro-batch with which TRL is fastest."""
    took = {}
    for micro in MICRO:
        took[micro], memory, other, _ = measure(trl_words(a, micro, 3), "step_ms", "ms/step", a)
        print(f"TRL, {micro} completions per pass: {took[micro]:.0f} ms/step, {memory:.0f} MiB, others took {other:.0%}", flush=True)
    (Path(a.data) / "tuned.json").write_text(json.dumps({"micro": min(took, key=took.get), "ms_per_step": took}) + "\n")


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
    groups, short = {}, []
    for row in rows:
        groups.setdefault((row["contest"], row["model"], row["unit"]), {}).setdefault(row["contender"], []).append(row)
    for (contest, model, unit), contenders in groups.items():
        print(f"\n{contest}, {model}\n\n| contender | {unit} | min-max | runs | disturbed | rlrun is faster by | peak MiB |")
        print("|---|---|---|---|---|---|---|")
        counted = {name: [r for r in runs if r["counted"]] for name, runs in contenders.items()}
        mid = {name: median(r["value"] for r in runs) for name, runs in counted.items() if runs}
        peak = {name: median(memory) for name, runs in counted.items() if (memory := [r["memory_mib"] for r in runs if r["memory_mib"]])}
        faster = lambda one, other: mid[other] / mid[one] if unit == "ms/step" else mid[one] / mid[other]
        for name, runs in contenders.items():
            good = counted[name]
            cells = [name, "-", "-", str(len(good)), str(len(runs) - len(good)), "-", f"{peak[name]:.0f}" if name in peak else "-"]
            if good:
                values = [r["value"] for r in good]
                cells[1:3] = [f"{mid[name]:.5g}", f"{min(values):.5g}-{max(values):.5g}"]
                if "rlrun" in mid:
                    cells[5] = f"{faster('rlrun', name):.2f}x"
            print("| " + " | ".join(cells) + " |")
        peers = [name for name in mid if not name.startswith("rlrun")]
        best = max(peers, key=lambda name: faster(name, peers[0]), default=None)
        for name in (name for name in mid if best and name.startswith("rlrun")):
            memory = " / ".join(f"{peak[one]:.0f}" if one in peak else "-" for one in (name, best))
            short.append(f"| {contest}, {model} | {unit} | {name} {mid[name]:.5g} | {best} {mid[best]:.5g} | {faster(name, best):.2f} | {memory} |")
    print("\n| measure | unit | rlrun | best peer | ratio | peak MiB |\n|---|---|---|---|---|---|\n" + "\n".join(short))


def prepare(a):
    d = Path(a.data)
    d.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PEERS_THREADS": "1"}  # one thread: repeatable
    script = lambda name, *args: subprocess.run([sys.executable, str(HERE / "peers" / name), *map(str, args)], env=env, check=True)
    models = a.models.split(",")
    if "smollm2" in models:
        if not (d / "smollm2/config.json").exists():
            script("make_smollm2.py", "--out", d / "smollm2", *(["--gguf", a.gguf] if a.gguf else []))
        script("make_task.py", "--task", "words", "--out", d / "task")
    for model in models:
        if model == "smollm2":
            continue
        if not (d / model / "config.json").exists():
            script("make_tiny_model.py", "--preset", model, "--out", d / model)
        for dtype in ("f32", "f16"):
            if not (d / f"{model}-{dtype}.gguf").exists():
                script("make_gguf.py", "--model", d / model, "--dtype", dtype, "--out", d / f"{model}-{dtype}.gguf")
    if "tiny" not in models:
        return
    script("make_task.py", "--task", "add", "--out", d / "task")
    files = ["--train", d / "task/add_train.jsonl", "--test", d / "task/add_test.jsonl"]
    # From little to a good share right, then a model that knows but has a habit of being off by one.
    for start, end, more in (("tiny", "tiny_sft", ["--stop", 0.28]), ("tiny", "tiny_know", ["--stop", 0.97, "--eval-every", 50]),
                             ("tiny_know", "tiny_sftn", ["--noise", 0.55, "--stop-below", 0.42, "--lr", 2e-4, "--eval-every", 5])):
        if not (d / end / "config.json").exists():
            script("sft.py", "--model", d / start, *files, "--out", d / end, *more)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["prepare", "tune", "run", "table"])
    ap.add_argument("--data", required=True, help="folder of models, tasks and results")
    ap.add_argument("--rlrun-bench", default=str(HERE.parent / "target/release/rlrun-bench"), help="the binary that measures")
    ap.add_argument("--models", default="tiny,small", help="of tiny, small, mid and smollm2")
    ap.add_argument("--gguf", help="prepare: file of smollm2, if its package is not installed")
    ap.add_argument("--only", help="contests, comma-separated: generate, train, loop, loop forced")
    ap.add_argument("--rounds", type=int, default=3), ap.add_argument("--tries", type=int, default=3)
    ap.add_argument("--threads", type=int, default=os.cpu_count()), ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--max-other", type=float, default=0.08, help="share of the processors that others may take")
    ap.add_argument("--max-wait", type=float, default=600, help="longest wait for a quiet machine, seconds")
    a = ap.parse_args()
    if a.what == "prepare":
        prepare(a)
    if a.what == "tune":
        tune(a)
    if a.what == "run":
        run(a)
    if a.what in ("run", "table"):
        table(a)


if __name__ == "__main__":
    main()

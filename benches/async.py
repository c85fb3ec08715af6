#!/usr/bin/env python3
"""Asynchronous against synchronous training at equal resources, as in AReaL (arXiv 2505.24298, table 1 and figure 5c).

    cargo build --release --workspace
    benches/async.py run DIR [--seeds 3]     about half an hour on two cores
    benches/async.py table DIR
    benches/async.py questions DIR --model MODEL [--seeds 3] [--staleness 0,2] [--steps 40]   the same with a real language
                                             model, 40 minutes a seed
    benches/async.py table DIR --of questions
    benches/async.py anchors DIR [--seeds 5]  about an hour: what keeps the policy from collapsing under staleness

Tasks are numbers to count down from, so that the length of an answer follows from its prompt: log-normal, median 60 tokens,
up to 450. A model learns them from demonstrations of which half leave a number out (benches/async_sft.toml); GRPO then
sharpens it (benches/async.toml). The reward is 1 for the right answer and 0 otherwise, and comes from a server that takes its
time, log-normal too: median 0.2 s, up to 5 s, as sandboxes and judges do. It sleeps, so that it takes no core from anybody.

Arms differ in `buffer.max_staleness` alone; 0 is synchronous. They are run in turns, seed by seed, in the order of the table
and back, so that whatever else the machine does meets all of them. `instant` arms have a server that answers at once: what is
left of the difference then comes from generation alone. All runs start from the same model; a seed gives the order of tasks
and the random numbers of the sampler.

`questions` trains SmolLM2-135M-Instruct (MODEL, a directory) on the questions of recipes/grpo_smollm.toml, 8 x 8 completions a
step, with a server that takes a median of 2 s and up to 40 s. Its table also says how long a step of the synchronous run takes,
and how long its processor time would take on cores that never wait: no schedule of the same work is faster than that.

`anchors` runs the same training without the server (`kind = "exact"`), for each policy that can anchor the clip, with each
bound on staleness; at 0 all arms are the same run.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Name, staleness, median of the server's time in seconds.
ARMS = [
    ("synchronous", 0, 0.2),
    ("staleness 1", 1, 0.2),
    ("staleness 2", 2, 0.2),
    ("staleness 4", 4, 0.2),
    ("staleness 8", 8, 0.2),
    ("synchronous, instant", 0, 0.0),
    ("staleness 4, instant", 4, 0.0),
]
# Arms of `anchors`.
ANCHORS = {
    "sampler (default)": [],
    "recomputed, sequence mask": ["algorithm.proximal=recompute"],
    "recomputed, weight up to 2": ["algorithm.correction=token_truncate"],
    "sampler, upper bound alone": ["algorithm.clip_eps_low=1.0"],
    "sampler, lower bound alone": ["algorithm.clip_eps_high=1e9"],
    "sampler, no bounds": ["algorithm.clip_eps_low=1.0", "algorithm.clip_eps_high=1e9"],
}
STALENESS = [0, 1, 2, 4, 8, 16]
LONGEST, SIGMA, REWARD_SIGMA = 140, 0.8, 1.0


@dataclasses.dataclass(frozen=True)
class Study:
    """Arms (name, staleness, median of the server's time in seconds), and what they have in common."""

    arms: list
    # Longest time of the server, seconds.
    longest_reward_s: float
    # Whether a response is right, by the label.
    is_right: object
    # Reward that the table looks for in the means of five steps.
    wanted: float
    # First steps that are left out of the means, because they fill the pipeline.
    warm: int
    # Rewards beside the server's, as in a recipe.
    rewards: str = ""


STUDIES = {
    "run": Study(ARMS, 5.0, lambda response, label: response.strip() == label.strip(), 0.9, 5),
    "questions": Study(
        [("synchronous" if s == 0 else "staleness %d" % s, s, 2.0) for s in (0, 1, 2, 4, 8)],
        40.0,
        lambda response, label: re.findall(r"\d+", response)[-1:] == [label.strip()],
        0.3,
        3,
        '[[rewards]]\nkind = "length"\ncache = 4\nweight = 0.3\n',
    ),
}


def count_down(number, without=None):
    return " ".join(str(n) for n in range(number - 1, -1, -1) if n != without)


def write_tasks(path, count, seed, demonstrations):
    rng = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(count):
            number = max(2, min(LONGEST, round(rng.lognormvariate(3.1, SIGMA))))
            row = {"prompt": "%d:" % number, "answer": count_down(number)}
            if demonstrations:
                without = rng.randrange(number) if rng.random() < 0.5 else None
                row["completion"] = count_down(number, without)
            file.write(json.dumps(row) + "\n")


class Server:
    """Judges answers after a time that follows from prompt and answer alone, so that it is the same in every arm."""

    def __init__(self, study):
        self.study = study
        self.median = 0.0
        self.port = None
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.serve(ready)), daemon=True).start()
        ready.wait()

    async def serve(self, ready):
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def connection(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))
                rng = random.Random(hashlib.sha256((body["prompt"] + body["response"]).encode()).digest())
                if self.median > 0.0:
                    seconds = self.median * rng.lognormvariate(0.0, REWARD_SIGMA)
                    await asyncio.sleep(min(seconds, self.study.longest_reward_s))
                answer = b"1.0" if self.study.is_right(body["response"], body["label"]) else b"0.0"
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n" + answer
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def rlrun(binary, recipe, run_dir, sets):
    """Runs the recipe; returns its processor time in seconds."""
    command = [binary, recipe, "--run-dir", run_dir, "--quiet"]
    for value in sets:
        command += ["--set", value]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def recipe_with(directory, port, base, rewards):
    """The recipe `base` with the server's address."""
    path = os.path.join(directory, "async.toml")
    with open(path, "w") as file:
        file.write("extends = %s\n" % json.dumps(os.path.join(ROOT, base)))
        file.write('[[rewards]]\nkind = "http"\ndialect = "slime"\nconcurrency = 4096\ntimeout_s = 60\n')
        file.write('url = "http://127.0.0.1:%d"\n' % port)
        file.write(rewards)
    return path


def place(directory, arm, seed):
    return os.path.join(directory, "%s_%d" % (arm.replace(" ", "_").replace(",", ""), seed))


def last_checkpoint(run_dir):
    checkpoints = os.path.join(run_dir, "checkpoints")
    return os.path.join(checkpoints, max(os.listdir(checkpoints)), "model")


def prepare(directory, binary):
    """Task files, and the model that all runs start from."""
    files = {name: os.path.join(directory, name + ".jsonl") for name in ("sft", "train", "eval")}
    write_tasks(files["sft"], 20000, 1, True)
    write_tasks(files["train"], 4000, 2, False)
    write_tasks(files["eval"], 100, 3, True)
    given = lambda name: "data.%s=%s" % ("eval" if name == "eval" else "train", json.dumps(files[name]))
    base = os.path.join(directory, "base")
    if not os.path.exists(base):
        recipe = os.path.join(ROOT, "benches", "async_sft.toml")
        rlrun(binary, recipe, base, [given("sft"), given("eval")])
    return ["model.path=%s" % json.dumps(last_checkpoint(base)), given("train")]


def questions(model, steps):
    """What `questions` changes in recipes/grpo_smollm.toml."""
    sets = ["model.path=%s" % json.dumps(os.path.abspath(model)), "rollout.group_size=8", "buffer.batch_groups=8"]
    return sets + ["trainer.steps=%d" % steps, "eval.interval=0", "checkpoint.interval=0", "log.samples=0"]


def run(directory, seeds, binary, study, base, common, bounds=None):
    """Runs the arms of `study`, those with a bound on staleness in `bounds` if it is given."""
    server = Server(study)
    for seed in range(seeds):
        for arm, staleness, median in study.arms[:: -1 if seed % 2 else 1]:
            run_dir = place(directory, arm, seed)
            if os.path.exists(run_dir) or (bounds is not None and staleness not in bounds):
                continue
            server.median = median
            sets = ["seed=%d" % seed, "buffer.max_staleness=%d" % staleness] + common
            seconds = rlrun(binary, recipe_with(directory, server.port, base, study.rewards), run_dir, sets)
            with open(os.path.join(run_dir, "processor_s"), "w") as file:
                file.write("%f" % seconds)
        print("seed %d done" % seed, flush=True)


def anchored(directory, arm, staleness, seed):
    # Without staleness every anchor is the policy before the step.
    arm = arm if staleness > 0 else "sampler (default)"
    return place(directory, "anchor %s staleness %d" % (arm.replace("(", "").replace(")", ""), staleness), seed)


def run_anchors(directory, seeds, binary):
    common = prepare(directory, binary)
    recipe = os.path.join(directory, "exact.toml")
    with open(recipe, "w") as file:
        file.write("extends = %s\n" % json.dumps(os.path.join(ROOT, "benches", "async.toml")))
        file.write('[[rewards]]\nkind = "exact"\n')
    for seed in range(seeds):
        for staleness in STALENESS:
            for arm, sets in ANCHORS.items():
                run_dir = anchored(directory, arm, staleness, seed)
                if not os.path.exists(run_dir):
                    given = ["seed=%d" % seed, "buffer.max_staleness=%d" % staleness]
                    rlrun(binary, recipe, run_dir, given + common + sets)
        print("seed %d done" % seed, flush=True)


def table_of_anchors(directory, seeds):
    print("\nreward of the last 10 steps, and share of completions at the length limit: mean +- deviation of %d seeds\n" % seeds)
    print("| clip anchored at | " + " | ".join(map(str, STALENESS)) + " |")
    print("|---" * (1 + len(STALENESS)) + "|")
    for arm in ANCHORS:
        cells = []
        for staleness in STALENESS:
            ends = [ended(anchored(directory, arm, staleness, seed)) for seed in range(seeds)]
            reward, cut = zip(*ends)
            deviation = statistics.stdev(reward) if seeds > 1 else 0.0
            cells.append("%.2f +- %.2f, %.0f %%" % (statistics.mean(reward), deviation, 100 * statistics.mean(cut)))
        print("| %s | %s |" % (arm, " | ".join(cells)))


def ended(run_dir):
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        last = [line for line in map(json.loads, file) if "reward/mean" in line][-10:]
    return tuple(statistics.mean(line[name] for line in last) for name in ("reward/mean", "completions/clipped_ratio"))


def processor_s(run_dir):
    """Processor time of a run, seconds."""
    with open(os.path.join(run_dir, "processor_s")) as file:
        return float(file.read())


def measured(run_dir, study):
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        steps = [line for line in map(json.loads, file) if "reward/mean" in line]
    warm = steps[study.warm :]
    seconds = sum(line["time/step"] for line in warm)
    trained = sum(line["trainer/tokens_per_s"] * line["time/forward_backward"] for line in warm)
    last = statistics.mean(line["reward/mean"] for line in steps[-10:])
    wanted = study.wanted
    smooth = lambda i: statistics.mean(line["reward/mean"] for line in steps[max(0, i - 4) : i + 1])
    reached = next((steps[i]["time_s"] for i in range(len(steps)) if smooth(i) >= wanted), None)
    mean = lambda name: sum(line[name] * line["time/step"] for line in warm) / seconds
    return {
        "steps/s": len(warm) / seconds,
        "tokens/s": trained / seconds,
        "sampler idle": mean("rollout/idle_ratio"),
        "trainer idle": mean("trainer/idle_ratio"),
        "staleness": mean("staleness/mean"),
        "reward, last 10 steps": last,
        "reward, all steps": statistics.mean(line["reward/mean"] for line in steps),
        "s to reward %.1f" % wanted: reached if reached is not None else float("inf"),
        "longest answer": max(line["completions/max_length"] for line in steps),
        "reward/s": last * len(warm) / seconds,
        "mean answer": statistics.mean(line["completions/mean_length"] for line in steps),
    }


def table(directory, study):
    arms = [arm for arm, _, _ in study.arms]
    complete = lambda seed: all(os.path.exists(place(directory, arm, seed)) for arm in arms)
    seeds = [seed for seed in range(100) if complete(seed)]
    if not seeds:
        sys.exit("%s holds no complete seed" % directory)
    results = {arm: [measured(place(directory, arm, seed), study) for seed in seeds] for arm in arms}
    columns = ["steps/s", "tokens/s", "sampler idle", "trainer idle", "staleness", "reward, last 10 steps"]
    columns += ["reward, all steps", "reward/s", "s to reward %.1f" % study.wanted, "mean answer", "longest answer"]
    print("\nmedian (smallest to largest) of %d seeds; ratio: tokens/s over the synchronous run of the same seed\n" % len(seeds))
    print("| arm | ratio | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for arm, _, median in study.arms:
        against = results["synchronous" if median > 0.0 else "synchronous, instant"]
        ratios = [mine["tokens/s"] / sync["tokens/s"] for mine, sync in zip(results[arm], against)]
        cells = [spread(ratios)] + [spread([one[column] for one in results[arm]]) for column in columns]
        print("| %s | %s |" % (arm, " | ".join(cells)))
    for arm in arms[:1]:
        runs = [place(directory, arm, seed) for seed in seeds]
        bounds = [lasted(run_dir) * os.cpu_count() / processor_s(run_dir) for run_dir in runs]
        print("\nmost that any schedule of the work of `%s` gains on %d cores: %s" % (arm, os.cpu_count(), spread(bounds)))


def lasted(run_dir):
    """Time of all steps of a run, seconds."""
    with open(os.path.join(run_dir, "metrics.jsonl")) as file:
        return sum(line.get("time/step", 0.0) for line in map(json.loads, file))


def spread(values):
    show = lambda value: "%.0f" % value if value >= 100 else "%.2f" % value
    return "%s (%s to %s)" % (show(statistics.median(values)), show(min(values)), show(max(values)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "questions", "table", "anchors"])
    parser.add_argument("directory")
    parser.add_argument("--seeds", type=int, help="3, of `anchors` 5")
    parser.add_argument("--model", help="directory of SmolLM2-135M-Instruct, of `questions`")
    bounds = lambda text: [int(bound) for bound in text.split(",")]
    parser.add_argument("--staleness", type=bounds, help="arms of `questions` to run, by their bound; all by default")
    parser.add_argument("--steps", type=int, default=40, help="steps of each arm of `questions`")
    parser.add_argument("--of", choices=sorted(STUDIES), default="run", help="what `table` shows")
    parser.add_argument("--binary", default=os.path.join(ROOT, "target", "release", "rlrun"))
    arguments = parser.parse_args()
    directory, binary, verb = os.path.abspath(arguments.directory), arguments.binary, arguments.verb
    os.makedirs(directory, exist_ok=True)
    if verb == "anchors":
        run_anchors(directory, arguments.seeds or 5, binary)
        return table_of_anchors(directory, arguments.seeds or 5)
    study = STUDIES[arguments.of if verb == "table" else verb]
    if verb == "run":
        run(directory, arguments.seeds or 3, binary, study, "benches/async.toml", prepare(directory, binary))
    elif verb == "questions":
        if arguments.model is None:
            parser.error("`questions` needs --model")
        run(directory, arguments.seeds or 3, binary, study, "recipes/grpo_smollm.toml", questions(arguments.model, arguments.steps), arguments.staleness)
    table(directory, study)


if __name__ == "__main__":
    main()

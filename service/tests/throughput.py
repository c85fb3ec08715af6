"""Passes and updates through the service against the same steps in a process: throughput.py RLRUN RLRUN_BENCH MODEL_DIR [RANK].

Both train the same number of random sequences of the same length, in turns, three times; prints tokens per second, medians, and
the ratio. Below nine tenths it makes three more rounds and compares the medians of the three fastest of each: other programs of the
machine only slow a round down. RANK trains an adapter; without it all weights.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))

from rlrun.training import Client  # noqa: E402

SEQUENCES, LENGTH, STEPS, ROUNDS = 8, 128, 4, 3
# A pass of the service is summed from so many leaves, as a step of a run is.
LEAVES = 4


def in_process(bench, model, rank):
    """Tokens per second of the steps of the learner."""
    lora = ["--lora-rank", rank] if rank else []
    command = [bench, "train", "--model", model, "--sequences", SEQUENCES, "--length", LENGTH, "--repeats", STEPS,
               "--microbatch-tokens", SEQUENCES * LENGTH // LEAVES, *lora]  # fmt: skip
    done = subprocess.run([*map(str, command), "--json"], check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    return row["tokens_per_s"]


def served(rlrun, model, rank, state):
    """Tokens per second from the first pass that is sent to the last update that ended; one step comes before."""
    command = [rlrun, "serve", "training", "--model", f"model={model}", "--dir", state, "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().removeprefix("listening on ").strip()
        draw = random.Random(0)
        rows = [[draw.randrange(5, 200) for _ in range(LENGTH + 1)] for _ in range(SEQUENCES)]
        data = [{"tokens": row[:-1], "target_tokens": row[1:], "weights": [1.0 / LENGTH] * LENGTH} for row in rows]
        with Client(url) as client:
            trained = client.model("model", rank=int(rank) if rank else None, seed=1)
            steps = lambda n: [(trained.forward_backward(data, "cross_entropy"), trained.optim_step(1e-6)) for _ in range(n)]
            steps(1)[0][1].result(600)
            start = time.monotonic()
            for passed, stepped in steps(STEPS):
                passed.result(600), stepped.result(600)
            return SEQUENCES * LENGTH * STEPS / (time.monotonic() - start)
    finally:
        server.terminate()
        server.wait()


def main(rlrun, bench, model, rank=None):
    rates = {"in a process": [], "served": []}
    what = f"adapter of rank {rank}" if rank else "all weights"
    with tempfile.TemporaryDirectory() as state:
        for _ in range(2):
            for _ in range(ROUNDS):
                rates["in a process"].append(in_process(bench, model, rank))
                rates["served"].append(served(rlrun, model, rank, state))
            medians = {name: statistics.median(sorted(of)[-ROUNDS:]) for name, of in rates.items()}
            ratio = medians["served"] / medians["in a process"]
            shown = ", ".join(f"{rate:.0f} tokens/s {name}" for name, rate in medians.items())
            print(f"{what}: {shown}, ratio {ratio:.2f}")
            if ratio >= 0.9:
                return
    raise AssertionError(rates)


main(*sys.argv[1:])

"""What tests in Python see of a run: the files of its directory, and waiting for them with a deadline."""

import json
import os
import sys
import time

# Longest wait, seconds.
LIMIT = 600.0


def wait(what, holds, show=lambda: ""):
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > LIMIT:
            sys.exit("%s has not come in %.0f s\n%s" % (what, LIMIT, show()))
        time.sleep(0.1)


def text_of(path):
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def lines(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def steps(run):
    return [line for line in lines(os.path.join(run, "metrics.jsonl")) if line["step"] > 0]

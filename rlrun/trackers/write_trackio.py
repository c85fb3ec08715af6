"""Writes a run into Trackio's database of a project: write_trackio.py RUN PROJECT DIRECTORY.

The tables are those of trackio 0.43; a run of the same name there is replaced.
"""

import datetime
import hashlib
import json
import math
import os
import re
import sqlite3
import sys
import tomllib

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT,
  space_id TEXT);
CREATE TABLE IF NOT EXISTS configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL,
  config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id));
CREATE TABLE IF NOT EXISTS system_metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
  timestamp TEXT NOT NULL, run_name TEXT NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT);
CREATE TABLE IF NOT EXISTS alerts (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
  run_name TEXT NOT NULL, title TEXT NOT NULL, text TEXT, level TEXT NOT NULL DEFAULT 'warn', step INTEGER,
  alert_id TEXT);
CREATE TABLE IF NOT EXISTS traces (id TEXT PRIMARY KEY, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
  run_name TEXT NOT NULL, step INTEGER NOT NULL, key TEXT NOT NULL, trace_index INTEGER, messages TEXT NOT NULL,
  metadata TEXT NOT NULL, search_text TEXT NOT NULL, log_id TEXT, space_id TEXT, spans TEXT NOT NULL DEFAULT '[]');
"""
MAX_TRACES = 100_000


def lines(path):
    """The objects of a file of JSON lines; torn and broken lines are left out."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except FileNotFoundError:
        return


def main(run, project, directory):
    name = os.path.basename(os.path.abspath(run))
    run_id = hashlib.sha256(os.path.abspath(run).encode()).hexdigest()[:32]
    metrics = os.path.join(run, "metrics.jsonl")
    if not os.path.exists(metrics):
        sys.exit(f"{run} has no metrics.jsonl")
    steps = list(lines(metrics))
    last = max((line["time_s"] for line in steps if isinstance(line.get("time_s"), (int, float))), default=0)
    origin = os.path.getmtime(metrics) - last

    def at(seconds):
        return datetime.datetime.fromtimestamp(origin + seconds, datetime.timezone.utc).isoformat()

    times = {line["step"]: line.get("time_s") or 0 for line in steps if isinstance(line.get("step"), (int, float))}
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, re.sub(r"[^A-Za-z0-9_-]", "", project) + ".db")
    database = sqlite3.connect(path, timeout=30)
    with database:
        database.executescript(TABLES)
        for table in ("metrics", "configs", "traces"):
            database.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))
        rows = []
        for line in steps:
            if not isinstance(line.get("step"), (int, float)):
                continue
            values = {k: v for k, v in line.items() if k != "step" and isinstance(v, (int, float)) and math.isfinite(v)}
            rows.append((run_id, at(line.get("time_s") or 0), name, int(line["step"]), json.dumps(values)))
        database.executemany(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)", rows)
        try:
            with open(os.path.join(run, "resolved.toml"), "rb") as file:
                config = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError):
            config = {}
        config.update(_Username=None, _Created=at(0), _Group=None)
        database.execute(
            "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?)",
            (run_id, name, json.dumps(config, default=str), at(0)))
        traces = 0
        samples = os.path.join(run, "samples")
        for file in sorted(os.listdir(samples) if os.path.isdir(samples) else []):
            named = re.fullmatch(r"step_(\d+)\.jsonl", file)
            if not named:
                continue
            step = int(named[1])
            for group in lines(os.path.join(samples, file)):
                for index, one in enumerate(group.get("trajectories") or []):
                    if traces == MAX_TRACES:
                        break
                    prompt, completion = str(group.get("prompt")), str(one.get("completion"))
                    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
                    known = {key: one.get(key) for key in ("reward", "advantage", "stop", "tokens")}
                    metadata = {"group": group.get("group"), "answer": group.get("answer"), **known}
                    trace = hashlib.sha256(f"{run_id} {step} {group.get('group')} {index}".encode()).hexdigest()[:32]
                    database.execute(
                        "INSERT INTO traces (id, run_id, timestamp, run_name, step, key, trace_index, messages, metadata, "
                        "search_text, spans) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '[]')",
                        (trace, run_id, at(times.get(step, 0)), name, step, "samples", index, json.dumps(messages),
                         json.dumps(metadata), f"{prompt}\n{completion}"))
                    traces += 1
    database.close()
    print(f"wrote {len(rows)} steps and {traces} samples of {name} to {path}")


main(*sys.argv[1:])

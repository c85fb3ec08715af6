"""Writes one dataset in every format that `datasets` writes, and its rows as rlrun is to read them, into a directory.

With datasets 5.2: python3 write_datasets.py DIR
"""

import datetime
import json
import pathlib
import sys

import datasets

HERE = pathlib.Path(sys.argv[1])
FLAT = [
    {"question": 'a "quoted", line\nof \u00e9\u4e2d', "answer": 7, "share": 0.1, "right": True},
    {"question": "plain", "answer": -3, "share": 2.5, "right": False},
]
NESTED = [
    {"messages": [{"role": "user", "content": "2+2"}], "numbers": [[1], []], "made": {"by": None, "n": 1}},
    {"messages": [], "numbers": [], "made": {"by": "hand", "n": 2}},
]
WHEN = datetime.datetime(2024, 2, 29, 12, 30)


def write(name, rows):
    (HERE / f"{name}.expected").write_text("".join(json.dumps(row) + "\n" for row in rows))


flat = datasets.Dataset.from_list(FLAT)
flat.to_csv(HERE / "flat.csv")
write("flat.csv", [{name: str(value) for name, value in row.items()} for row in FLAT])
full = datasets.Dataset.from_list([{**flat, **nested} for flat, nested in zip(FLAT, NESTED)])
rows = full.to_list()
full.to_json(HERE / "full.jsonl")
full.to_json(HERE / "full.json", lines=False)
full.to_parquet(HERE / "full.parquet")
full.save_to_disk(HERE / "full_saved")
for name in ["full.jsonl", "full.json", "full.parquet", "full_saved"]:
    write(name, rows)
timed = full.add_column("when", [WHEN] * len(rows))
timed = datasets.DatasetDict({"train": timed, "test": timed.select([1])})
timed.save_to_disk(HERE / "splits")
write("splits", [{**row, "when": f"{WHEN:%Y-%m-%d %H:%M:%S.%f} +00:00"} for row in rows])

"""Makes docs/run.svg and docs/curve.svg: `python docs/pictures.py RLRUN`, with pyte and matplotlib installed.

The first is the terminal of one run of the default recipe, 100 columns wide; the second its held-out accuracy over three seeds.
"""

import html
import json
import os
import pathlib
import pty
import subprocess
import sys
import tempfile

import matplotlib
import pyte

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"
from matplotlib import pyplot

DOCS = pathlib.Path(__file__).parent
COLUMNS, LINES = 100, 200
RECIPE = DOCS.parent / "recipes/grpo_math.toml"
COLORS = {"green": "#7ec699", "red": "#e06c75", "yellow": "#e5c07b", "blue": "#61afef", "cyan": "#56b6c2", "default": "#dcdfe4"}


def run(rlrun: str, seed: int, folder: pathlib.Path) -> pyte.Screen:
    """One run in a terminal of its own; returns what the terminal shows at the end."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    command = [rlrun, str(RECIPE.resolve()), "--set", f"seed={seed}", "--run-dir", folder.name, "--width", str(COLUMNS)]
    environment = dict(os.environ, TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder.parent)
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        stream.feed(data)
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed")
    return screen


def terminal(screen: pyte.Screen, skip: range) -> str:
    """The screen as SVG, without the lines of `skip`, for which an ellipsis stands."""
    rows = [screen.buffer[y] for y in range(LINES)]
    texts = ["".join(row[x].data for x in range(COLUMNS)).rstrip() for row in rows]
    last = max(index for index, text in enumerate(texts) if text)
    body, y = [], 0
    for index in range(last + 1):
        if index in skip:
            if index == skip[0]:
                y += 1
                body.append(f'<text x="12" y="{y * 17 + 14}" fill="#7f848e">...</text>')
            continue
        y += 1
        spans = "".join(
            f'<tspan fill="{COLORS.get(rows[index][x].fg, COLORS["default"])}"'
            f'{" font-weight=" + chr(34) + "bold" + chr(34) if rows[index][x].bold else ""}>'
            f"{html.escape(rows[index][x].data)}</tspan>"
            for x in range(len(texts[index]))
        )
        body.append(f'<text x="12" y="{y * 17 + 14}" xml:space="preserve">{merge(spans)}</text>')
    width, height = COLUMNS * 8 + 24, (y + 1) * 17 + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">'
        f'<rect width="{width}" height="{height}" rx="6" fill="#1e2127"/>' + "".join(body) + "</svg>\n"
    )


def merge(spans: str) -> str:
    """Joins neighbouring spans of one style."""
    pieces = [piece for piece in spans.split("</tspan>") if piece]
    merged: list[list[str]] = []
    for piece in pieces:
        style, text = piece.split(">", 1)
        if merged and merged[-1][0] == style:
            merged[-1][1] += text
        else:
            merged.append([style, text])
    return "".join(f"{style}>{text}</tspan>" for style, text in merged)


def curve(folders: list[pathlib.Path]) -> None:
    """Held-out accuracy over steps, one line per seed."""
    figure, axes = pyplot.subplots(figsize=(8, 3))
    for seed, folder in enumerate(folders):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        points = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
        axes.plot(*zip(*points), marker="o", markersize=3, label=f"seed {seed}")
    axes.set(xlabel="training step", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(DOCS / "curve.svg", bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [pathlib.Path(scratch) / f"grpo_math_{seed}" for seed in range(3)]
        screens = [run(str(pathlib.Path(sys.argv[1]).resolve()), seed, folder) for seed, folder in enumerate(folders)]
        texts = ["".join(cell.data for cell in (screens[0].buffer[y][x] for x in range(COLUMNS))) for y in range(LINES)]
        steps = [index for index, text in enumerate(texts) if text.split()[:1] and text.split()[0].isdigit()]
        skip = range(steps[12], steps[-6]) if len(steps) > 24 else range(0)
        (DOCS / "run.svg").write_text(terminal(screens[0], skip))
        curve(folders)


main()

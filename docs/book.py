#!/usr/bin/env python3
"""The book: its source from the documents of the repository and from the program, its links, and its blocks of code.

    docs/book.py links                           checks every relative link and anchor of all documents
    docs/book.py build --rlrun PATH --out DIR    writes the source of the book to DIR/src; builds DIR/html if mdbook is there
    docs/book.py blocks --rlrun PATH             runs the blocks of docs/*.md: `sh` blocks in their order, and `rlrun check` for
                                                 each `toml` block whose first line names a file; `--full` with all steps,
                                                 otherwise with few

Invariant: a chapter is a document of the repository or an output of the program; nothing of the book is written twice. Blocks that
are not run are `text`. A comment `<!-- sh ... -->` is run and not shown: it makes what the blocks after it need.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
REPOSITORY = "https://github.com/rlrun/rlrun"
# Chapters that `rlrun explain --markdown` prints; `http` is made of the OpenAPI document.
GENERATED = ["keys", "metrics", "peers", "algorithms", "rewards", "http"]
# The end of a link, whose text may be on the line before.
LINK = re.compile(r"\]\(([^()\s]+)\)")
# Seconds that the blocks of one document may take.
LIMIT_S = 600
# Steps of a run of the blocks, without `--full`, and what else makes a run of the default recipe short.
STEPS = 2
SHORT = {"RLRUN__WARMUP__STEPS": "20", "RLRUN__EVAL__TASKS": "20"}


def documents():
    """All documents of the repository, tracked or new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def parts(text):
    """Lines with whether they are code: of a fence, or indented after an empty line."""
    fence, before_empty, indented = None, True, False
    for line in text.splitlines(keepends=True):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            yield line, True
            if mark and line.strip().startswith(fence):
                fence = None
            continue
        if mark:
            fence = mark[1]
            yield line, True
            continue
        indented = line.startswith("    ") and (before_empty or indented) and not re.match(r"\s*[-*]|\s*\d+\. ", line)
        before_empty = not line.strip()
        yield line, indented


def outside_of_code(text, change):
    """`text` with `change` applied to what is neither a block of code nor between backticks."""
    written = []
    for line, code in parts(text):
        pieces = [line] if code else re.split(r"(`+[^`]*`+)", line)
        written += [piece if code or piece.startswith("`") else change(piece) for piece in pieces]
    return "".join(written)


def links(text):
    """The targets of all links outside of code."""
    found = []
    outside_of_code(text, lambda piece: found.extend(LINK.findall(piece)) or piece)
    return found


def anchors(text):
    """The anchors of all headings, as GitHub and mdbook make them."""
    found = set()
    for line, code in parts(text):
        heading = re.match(r"#+ (.*)", line)
        if code or not heading:
            continue
        words = LINK.sub("", heading[1].strip())
        slug = "".join(c for c in words.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        number = 0
        while (name := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(name)
    return found


def generated(path):
    """Whether the program writes this chapter."""
    return path.parent == REFERENCE and path.stem in GENERATED


def broken(path, text):
    """What is wrong with the links of a document."""
    for target in links(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if generated(other):
            continue
        if not other.exists():
            yield f"{target}: there is no {other}"
        elif anchor and other.suffix == ".md":
            there = anchors(text if other == path else other.read_text())
            if anchor not in there:
                yield f"{target}: {other.name} has no heading #{anchor}"


def check_links():
    """Fails if a link of a document leads nowhere."""
    found, count = [], 0
    for path in documents():
        text = path.read_text()
        count += len(links(text))
        found += [f"{path.relative_to(ROOT)}: {problem}" for problem in broken(path, text)]
    chapters = {path for path, _ in summary()}
    left_out = [path.name for path in DOCS.glob("*.md") if path not in chapters and path.name != "SUMMARY.md"]
    found += [f"docs/{name} is no chapter: add it to docs/SUMMARY.md" for name in left_out]
    found += missing_routes()
    if found:
        sys.exit("\n".join(found))
    print(f"ok {count} links of {len(documents())} documents")


def missing_routes():
    """Routes of the servers without an OpenAPI document that no document lists."""
    pages = {"endpoint": ["endpoint.md", "agents.md"], "dashboard": ["live_page.md"]}
    for crate, names in pages.items():
        text = "".join((DOCS / name).read_text() for name in names)
        sources = [path.read_text() for path in (ROOT / crate / "src").rglob("*.rs")]
        routes = {route for source in sources for route in re.findall(r'\.route\(\s*"([^"]+)"', source)}
        if not routes:
            yield f"{crate} has no route; did their form change?"
        for route in sorted(routes):
            if route.removesuffix("/{*name}") not in text:
                yield f"the route {route} of {crate} is in none of {', '.join(names)}"


def summary():
    """The chapters of the book: their documents, and the names that they have in the book."""
    for target in links((DOCS / "SUMMARY.md").read_text()):
        path = (DOCS / target).resolve()
        if path.is_relative_to(DOCS):
            yield path, str(path.relative_to(DOCS))
        elif path == ROOT / "README.md":
            yield path, "introduction.md"
        else:
            name = path.parent.name if path.name == "README.md" else path.stem.lower()
            yield path, f"{name}.md"


def build(rlrun, out):
    """Writes the source of the book, and builds it if mdbook is installed."""
    source, chapters = out / "src", dict(summary())
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    shutil.copy(DOCS / "book.toml", out)
    texts = {}
    for path, name in chapters.items():
        texts[name] = reference(rlrun, path.stem) if generated(path) else moved(path, path.read_text(), name, chapters, source)
    texts["SUMMARY.md"] = moved(DOCS / "SUMMARY.md", (DOCS / "SUMMARY.md").read_text(), "SUMMARY.md", chapters, source)
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    found = [f"{name}: {problem}" for name, text in texts.items() for problem in broken(source / name, text)]
    if found:
        sys.exit("\n".join(found))
    print(f"ok {len(chapters)} chapters in {source}")
    if mdbook := shutil.which("mdbook"):
        subprocess.run([mdbook, "build", out], check=True)
    else:
        print("no mdbook: the pages are not built (cargo install mdbook)")


def moved(path, text, name, chapters, source):
    """`text` of the document `path` with the links that it needs as the chapter `name`."""
    here = pathlib.PurePath(name).parent

    def link(match):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", match[1]) or not target:
            return match[0]
        other = (path.parent / target).resolve()
        anchor = f"#{anchor}" if anchor else ""
        if other in chapters:
            return f"]({os.path.relpath(chapters[other], here)}{anchor})"
        if other.suffix in (".svg", ".png"):
            shutil.copy(other, source)
            return f"]({os.path.relpath(other.name, here)})"
        kind = "tree" if other.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{other.relative_to(ROOT)}{anchor})"

    return outside_of_code(text, lambda piece: LINK.sub(link, piece))


def reference(rlrun, name):
    """A chapter that is made from the program."""
    if name == "http":
        return http_chapter(rlrun)
    return subprocess.run([rlrun, "explain", "--markdown", name], check=True, capture_output=True, text=True).stdout


def http_chapter(rlrun):
    """The routes of the buffer from its OpenAPI document, and where those of the other servers are."""
    with tempfile.TemporaryDirectory() as directory:
        command = [rlrun, "serve", "buffer", "--dir", directory, "--listen", "127.0.0.1:0", "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = server.stdout.readline().strip().removeprefix("listening on ")
                with urllib.request.urlopen(f"{address}/openapi.json", timeout=30) as answer:
                    document = json.load(answer)
            finally:
                server.send_signal(signal.SIGTERM)
    text = "# HTTP API\n\n| server | routes |\n|---|---|\n"
    text += "| `rlrun serve buffer`, and a run with `buffer.listen` | below; [the buffer](../buffer.md) explains them |\n"
    text += "| `rlrun serve policy`, and a run with `[endpoint]` | [the policy](../endpoint.md#routes), [agents](../agents.md) |\n"
    text += "| `rlrun serve training` | [training as a service](../training_service.md#routes) |\n"
    text += "| `rlrun serve islands` | [slow links](../slow_links.md#routes) |\n"
    text += "| `rlrun view` | [the live page](../live_page.md#api) |\n\n## The buffer\n\n"
    text += "The server itself has this description at `/openapi.json`, with all fields, and at `/docs` for people.\n"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in ("get", "put", "post", "delete", "patch"):
                continue
            about = operation.get("description") or operation.get("summary") or ""
            text += f"\n### `{method.upper()} {path}`\n\n{about.replace('<', '&lt;')}\n"
            for parameter in operation.get("parameters", []):
                needed = ", required" if parameter.get("required") else ""
                said = parameter.get("description", "").replace("<", "&lt;")
                text += f"\n- `{parameter['name']}` ({parameter['in']}{needed}): {said}"
            body = operation.get("requestBody", {}).get("content", {})
            kinds = {media.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1] for media in body.values()} - {""}
            text += f"\n- body: `{'`, `'.join(sorted(kinds))}`" if kinds else ""
            answers = ", ".join(f"`{status}`" for status in sorted(operation.get("responses", {})))
            text += f"\n- answers: {answers}\n"
    return text


def blocks_of(text):
    """Language and content of every fenced block and hidden block, in their order."""
    pattern = r"^```(\w+)\n(.*?)^```$|^<!-- (sh)\n(.*?)^-->$"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        yield match[1] or match[3], match[2] or match[4]


def shortened(script):
    """`script` with few steps wherever it sets their number, and the variables for few steps where it does not."""
    # A run that is resumed has twice as many: each of the two parts makes some.
    script = re.sub(r"trainer\.steps=(\d+)", lambda match: f"trainer.steps={min(int(match[1]), 2 * STEPS)}", script)
    # Other recipes have no warm-up.
    return script, {"RLRUN__TRAINER__STEPS": str(STEPS)} | (SHORT if "grpo_math.toml" in script else {})


def run_blocks(rlrun, full):
    """Runs the blocks of every document in a directory of its own."""
    total = 0
    for path in sorted(DOCS.glob("*.md")):
        script, files = ["set -euo pipefail"], {}
        for language, content in blocks_of(path.read_text()):
            named = re.match(r"# ([\w.-]+\.(?:toml|py))\n", content)
            if language == "sh":
                script.append(content)
            elif named and language in ("toml", "python"):
                files[named[1]] = content
                if language == "toml":
                    script.append(f"rlrun check {named[1]}")
        if len(script) == 1:
            continue
        total += len(script) - 1
        with tempfile.TemporaryDirectory() as directory:
            for name in ("recipes", "examples"):
                os.symlink(ROOT / name, pathlib.Path(directory) / name)
            for name, content in files.items():
                (pathlib.Path(directory) / name).write_text(content)
            environment = os.environ | {"PATH": f"{pathlib.Path(rlrun).resolve().parent}:{os.environ['PATH']}"}
            text = "\n".join(script)
            if not full:
                text, short = shortened(text)
                environment |= short
            command = ["bash", "-c", text]
            done = subprocess.run(command, cwd=directory, env=environment, timeout=LIMIT_S, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{path.name}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        print(f"ok {path.name}: {len(script) - 1} blocks", flush=True)
    if total == 0:
        sys.exit("no block was found; did the form of the documents change?")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["links", "build", "blocks"])
    parser.add_argument("--rlrun", default=str(ROOT / "target/release/rlrun"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/book")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if args.what == "links":
        check_links()
    elif args.what == "build":
        build(args.rlrun, args.out.resolve())
    else:
        run_blocks(args.rlrun, args.full)


if __name__ == "__main__":
    main()

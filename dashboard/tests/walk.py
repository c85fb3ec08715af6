"""Walks every view of `rlrun view` in Chromium, and compares what it shows with the files of the runs.

    walk.py RLRUN OUT RUN...
    walk.py report FILE OUT RUN...

RLRUN is the program, OUT a directory for screenshots, each RUN a run directory; the second form walks FILE, a report of
these runs. Needs the Python package playwright and a Chromium (`chromium` on the path, or one that playwright installed).
Fails on an error in the console of the browser, on a number that differs from its file, on a text of a model that is not
shown as text, on a page wider than a phone, and on a report that loads anything.
"""

import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect, sync_playwright

import synthetic

VIEWS = ["overview", "samples", "timeline", "buffer", "recipe", "events", "about"]
SIZES = {"wide": (1440, 900), "phone": (360, 740)}
HOSTILE = synthetic.HOSTILE


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def readable(path):
    """The lines that are JSON: a writer may have been cut off."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            pass


def steps_of(run):
    """Files of samples by their steps."""
    return {int(path.stem.split("_")[1]): path for path in sorted((run / "samples").glob("step_*.jsonl")) if "tokens" not in path.name}


def in_url(name):
    return name.replace("<", "%3C").replace(">", "%3E")


def number(text):
    return float(text.replace(",", "").replace("%", "").replace("+", ""))


def last_values(run):
    """The last value of every metric, by its name."""
    last = {}
    for line in lines(run / "metrics.jsonl"):
        last.update({k: v for k, v in line.items() if k not in ("step", "time_s") and not isinstance(v, str)})
    return last


def hostile_run(directory):
    """A run whose texts and names pretend to be markup."""
    run = directory / "hostile<b>"
    (run / "samples").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step":1,"time_s":1,"reward/mean":0.5,"<img src=x>":2,"bottleneck":"<b>bold</b>"}\n')
    (run / "events.jsonl").write_text(json.dumps({"event": "start", "fields": {"text": HOSTILE}}) + "\n")
    (run / "resolved.toml").write_text(f"name = {json.dumps(HOSTILE)}  # {HOSTILE}\n[trainer]\nsteps = 3  # --set\n")
    turns = [{"tokens": 1, "stop": "stop_token", "reward": None}] * 2
    trajectories = [{"completion": HOSTILE, "reward": 1.0, "components": [{"name": HOSTILE, "value": 1.0}]},
                    {"completion": f"{HOSTILE}\n[user] {HOSTILE}\n{HOSTILE}", "reward": 0.0, "turns": turns}]
    group = {"group": 1, "task": 1, "prompt": HOSTILE, "answer": HOSTILE, "trajectories": trajectories}
    (run / "samples" / "step_000001.jsonl").write_text(json.dumps(group) + "\n")
    synthetic.add_to(run)
    return run


def synthetic_run(directory, run):
    """A copy of a run, with files of the newest form."""
    copy = directory / "synthetic"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "model", "*.redb"))
    synthetic.add_to(copy)
    return copy


class Walk:
    def __init__(self, browser, url, runs, out):
        # A file has no path behind its name.
        self.url, self.is_report = url, url.startswith("file:")
        self.page_url = url if self.is_report else f"{url}/"
        self.runs, self.out, self.problems = runs, out, []
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}") or dialog.dismiss())

    def open(self, view, **more):
        state = "&".join(f"{key}={value}" for key, value in {"view": view, **more}.items())
        self.page.goto("about:blank")
        self.page.goto(f"{self.page_url}#{state}")
        self.page.wait_for_selector(f"body[data-ready={view}]")
        self.page.wait_for_timeout(200)
        alert = self.page.locator("#problem")
        assert alert.is_hidden(), alert.text_content()

    def overview(self):
        self.open("overview")
        for run in self.runs:
            last = last_values(run)
            cells = self.page.evaluate(
                "name => [...document.querySelectorAll('.metrics td')].filter(cell => cell.dataset.run === name)"
                ".map(cell => [cell.dataset.metric, cell.dataset.value, cell.textContent])", run.name)
            assert {name for name, _, _ in cells} >= set(last), f"{run.name}: metrics are missing"
            for name, value, shown in cells:
                if name not in last:
                    continue
                want = last[name]
                assert (value == "null" and want is None) or float(value) == want, f"{run.name} {name}: {value} is not {want}"
                if want is not None:
                    assert math.isclose(float(shown.replace(",", "")), want, rel_tol=1e-3), f"{name}: {shown} is not {want}"
            self.curves(run)
        panels = self.page.locator("figure.panel").count()
        assert panels == self.page.locator("figure.panel canvas").count() > 0, "a panel has no curve"
        print(f"ok overview: {panels} panels")

    def curves(self, run):
        """The points of a curve are the values of the file."""
        for key in ("reward/mean", "time/step"):
            want = [(line["step"], line[key]) for line in lines(run / "metrics.jsonl") if line.get(key) is not None]
            answer = self.page.evaluate("JSON.parse(document.getElementById('report').textContent).curves.step") if self.is_report else self.page.evaluate(
                "async ([key, run]) => (await fetch(`api/metrics?${new URLSearchParams({keys: key, run, pixels: 4000})}`)).json()", [key, run.name])
            if not want:
                continue
            curve = answer[run.name][key]
            assert [step for step, _ in want] == curve["x"], f"{run.name} {key}"
            assert all(math.isclose(value, y, rel_tol=1e-6) for (_, value), y in zip(want, curve["y"])), f"{run.name} {key}"

    def samples(self, run):
        files = steps_of(run)
        for step in {min(files), max(files)}:
            self.open("samples", run=in_url(run.name), step=step)
            groups = lines(files[step])
            assert self.page.locator("article.group").count() == min(len(groups), 16)
            first = groups[0]["trajectories"]
            shown = self.page.locator("article.group").first.locator("section.trajectory")
            assert shown.count() == len(first)
            for index, trajectory in enumerate(first):
                pre = shown.nth(index).locator("pre.completion, .message pre")
                text = "".join(pre.all_text_contents())
                plain = lambda value: "".join(value.split())
                without_roles = plain(trajectory["completion"].replace("[user]", ""))
                assert plain(text) == without_roles, f"{run.name} step {step}: {text!r} is not {trajectory['completion']!r}"
        print(f"ok samples of {run.name}")

    def recipe(self, run):
        self.open("recipe", run=in_url(run.name))
        values = [line for line in (run / "resolved.toml").read_text().splitlines() if " = " in line and line[0] != "#"]
        assert self.page.locator("table.values tr[data-key]").count() == len(values), run.name
        steps = next(line for line in values if line.startswith("steps = ") and "trainer" in self.section(run, line))
        row = self.page.locator("tr[data-key='trainer.steps'] td").first
        assert row.text_content() == steps.split(" = ")[1].split(" ")[0]
        print(f"ok recipe of {run.name}: {len(values)} values")

    @staticmethod
    def section(run, wanted):
        section = ""
        for line in (run / "resolved.toml").read_text().splitlines():
            section = line if line.startswith("[") else section
            if line == wanted and section == "[trainer]":
                return section
        return ""

    def events(self, run):
        self.open("events", run=in_url(run.name))
        rows = self.page.locator("section[aria-label=Events] tbody tr").count()
        assert rows == len(lines(run / "events.jsonl")), run.name
        remarks = [line["bottleneck"] for line in lines(run / "metrics.jsonl") if "bottleneck" in line]
        if remarks:
            assert self.page.locator("section[aria-label=Remarks] tbody td").first.text_content() == remarks[-1]
        print(f"ok events of {run.name}")

    def filters(self, run):
        """Groups that match by reward, stop reason and difference are those of the file."""
        files = steps_of(run)
        step = max(files)
        groups = lines(files[step])
        rewards = lambda group: {one["reward"] for one in group["trajectories"] if one.get("reward") is not None and not one.get("baseline")}
        stops = {one["stop"] for group in groups for one in group["trajectories"] if one.get("stop")}
        for asked, fits in [
            ({"differing": 1}, lambda group: len(rewards(group)) > 1),
            ({"from": 0.5}, lambda group: any(reward >= 0.5 for reward in rewards(group))),
            ({"to": 0.4}, lambda group: any(reward <= 0.4 for reward in rewards(group))),
            *(({"stop": stop}, lambda group, stop=stop: any(one.get("stop") == stop for one in group["trajectories"])) for stop in stops),
        ]:
            self.open("samples", run=in_url(run.name), step=step, **asked)
            want = [f"Group {group['group']}" for group in groups if fits(group)][:16]
            shown = self.page.locator("article.group").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
            assert shown == want, f"{run.name} {asked}: {shown} is not {want}"
        print(f"ok filters of {run.name}")

    def tokens(self, run):
        """The tokens of the first trajectory, their texts, and their numbers for every colour."""
        step = max(steps_of(run))
        row = lines(run / "samples" / f"step_{step:06}_tokens.jsonl")[0]
        self.open("samples", run=in_url(run.name), step=step)
        self.page.get_by_role("button", name=f"Tokens of trajectory {row['index'] + 1} of group {row['group']}", exact=True).click()
        panel = self.page.locator(".token-panel")
        expect(panel.locator(".curve canvas").first).to_be_visible()
        shown = panel.locator("[role=listbox]").first.locator("span").all_text_contents()
        assert [text.replace("⏎\n", "\n").replace("∅", "") for text in shown] == row["texts"][:2000], run.name
        at = next((at for at, mask in enumerate(row["loss_mask"]) if mask == 1 and row["trainer_logprobs"][at] is not None), None)
        assert panel.locator(".masked[role=option]").count() >= sum(mask == 0 for mask in row["loss_mask"][:2000])
        if at is None:
            return
        difference = row["trainer_logprobs"][at] - row["behavior_logprobs"][at]
        for column in ["behavior", "trainer", "ratio", "difference", "advantage", "version"]:
            panel.get_by_role("combobox").select_option(column)
            panel.locator(f"[data-at='{at}']").first.hover()
            text = panel.locator("output").first.text_content()
            for label, want in [("importance ratio", math.exp(difference)), ("log-probability of the trainer", row["trainer_logprobs"][at])]:
                value = number(text.split(f"{label} ")[1].split(", ")[0])
                assert math.isclose(value, want, rel_tol=1e-3, abs_tol=1e-6), f"{text} is not {label} {want}"
            assert f"column={column}" in self.page.url
        panel.locator("[role=listbox]").first.focus()
        self.page.keyboard.press("Home")
        assert panel.locator("output").first.text_content().startswith("token 0 ")
        panel.screenshot(path=self.out / f"tokens{'-report' if self.is_report else ''}.png")
        panel.get_by_role("button", name="close").click()
        expect(panel).to_have_count(0)
        print(f"ok tokens of {run.name}")

    def compare(self, run):
        """The same task at two steps: what is marked makes each text of the other."""
        files = steps_of(run)
        first, last = min(files), max(files)
        by_task = lambda step: {json.dumps(group["task"]): group for group in reversed(lines(files[step]))}
        early, late = by_task(first), by_task(last)
        shared = [task for task in late if task in early]
        assert shared, f"{run.name}: no task is at both steps"
        self.open("samples", run=in_url(run.name), step=last)
        self.page.get_by_role("button", name="same tasks at other steps").click()
        picker = self.page.get_by_label("Compare with the same tasks at step")
        picker.select_option(str(first))
        article = self.page.locator("article.group").first
        expect(article.locator(".pair").first).to_be_visible()
        task = article.locator("h2").text_content().removeprefix("task ")
        for index, pair in enumerate(article.locator(".pair").all()):
            before, after = pair.locator("pre").all_text_contents()
            assert before == early[task]["trajectories"][index]["completion"], run.name
            assert after == late[task]["trajectories"][index]["completion"], run.name
            same = lambda side: pair.locator("pre").nth(side).evaluate("pre => [...pre.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join('')")
            assert same(0) == same(1), f"{before!r} and {after!r}: what is not marked differs"
            assert before == after or pair.locator("ins, del").count() > 0
        self.page.screenshot(path=self.out / "compare.png")
        print(f"ok comparison of {run.name}")

    def timeline(self, run):
        """Lanes, waits and stalls are those of the file; zoom by drag, by keyboard and back."""
        self.open("timeline", run=in_url(run.name))
        spans = [line for line in readable(run / "timeline.jsonl") if isinstance(line, dict) and line.get("lane") != "trajectory"]
        rows = self.page.locator("#timeline table tr[data-lane]")
        shown = {row.get_attribute("data-lane"): number(row.locator("td").first.text_content()) for row in rows.all()}
        assert set(shown) == {span["lane"] for span in spans}, f"{run.name}: {shown}"
        steps = sorted({span["step"] for span in spans if span["lane"].startswith("trainer") and "step" in span})
        begin = min(span["start"] for span in spans if span["lane"].startswith("trainer") and span.get("step") == steps[max(0, len(steps) - 20)]) if len(steps) >= 20 else min(span["start"] for span in spans)
        end = max(span["end"] for span in spans)
        for lane, share in shown.items():
            waited = sum(max(0, min(span["end"], end) - max(span["start"], begin)) for span in spans if span["lane"] == lane and span["kind"].startswith("wait"))
            assert math.isclose(share, 100 * min(1, waited / (end - begin)), abs_tol=0.1), f"{run.name} {lane}: {share} is not {100 * waited / (end - begin)}"
        stalls = [span for span in spans if span["kind"] == "stall" and span["end"] >= begin]
        texts = self.page.locator("#timeline > .stalls li").all_text_contents()
        assert len(texts) == len(stalls) and all(stall.get("note", "") in text for stall, text in zip(stalls, texts)), texts
        causes = self.page.locator(".why tr[data-cause]")
        shares = [number(row.locator("td").first.text_content()) for row in causes.all()]
        assert shares and shares == sorted(shares, reverse=True) and 90 < sum(shares) < 101, f"{run.name}: {shares}"
        for label in ("Longest waits by name", "Stalls", "Recommendations"):
            expect(self.page.locator(f".why ul[aria-label='{label}'] li").first).not_to_be_empty()
        canvas = self.page.locator("#timeline canvas").first
        details = self.page.locator("#timeline output").first
        canvas.focus()
        self.page.keyboard.press("ArrowRight")
        expect(details).to_contain_text("trainer: ")
        self.page.keyboard.press("ArrowDown")
        expect(details).not_to_contain_text("trainer: ")
        box = canvas.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 45)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 45, steps=5)
        self.page.mouse.up()
        self.page.wait_for_function("location.hash.includes('window=')")
        expect(self.page.get_by_role("button", name="newest steps")).to_be_visible()
        self.page.screenshot(path=self.out / f"timeline-zoomed{'-report' if self.is_report else ''}.png")
        canvas.focus()
        self.page.keyboard.press("Escape")
        self.page.wait_for_function("!location.hash.includes('window=')")
        canvas.dblclick(position={"x": box["width"] * 0.6, "y": 45})
        colours = canvas.evaluate("canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size")
        assert colours > 5, f"the canvas has {colours} colours"
        print(f"ok timeline of {run.name}")

    def buffer(self, run):
        self.open("buffer", run=in_url(run.name))
        status = json.loads((run / "status.json").read_text())
        section = self.page.locator("#buffer")
        for state in ["admitted", "claimed", "finalized", "leased"]:
            if status["buffer"].get(state):
                assert section.locator(f".slots [data-state={state}]").text_content() == f"{state} {status['buffer'][state]}"
        for name, key in [("dropped as stale", "dropped_stale"), ("expired", "expired"), ("evicted", "evicted"), ("quarantined", "quarantined")]:
            if key in status["buffer"]:
                assert number(section.locator(f"[data-fact='{name}']").text_content()) == status["buffer"][key], name
        assert section.get_by_role("group", name="Groups").locator("tbody tr").count() == len(status["buffer"].get("groups", []))
        ages = [number(row.locator("td").last.text_content()) for row in section.get_by_role("group", name="Groups").locator("tbody tr").all()]
        wanted = [group["age_ms"] / 1000 for group in status["buffer"].get("groups", [])]
        assert all(math.isclose(age, want, rel_tol=1e-3) for age, want in zip(sorted(ages), sorted(wanted), strict=True)), f"{ages} are not {wanted}"
        assert section.get_by_role("group", name="Leases").locator("tbody tr").count() == len(status["buffer"].get("leases", []))
        receivers = section.get_by_role("group", name="Receivers").locator("tbody tr")
        for row, receiver in zip(receivers.all(), status["weights"]["receivers"], strict=True):
            cells = row.locator("th, td").all_text_contents()
            wanted = [receiver.get(key) for key in ("version", "lag", "bytes", "apply_s", "stall_s")]
            fits = lambda cell, want: cell == "–" if want is None else math.isclose(number(cell), want, rel_tol=1e-3)
            assert cells[0] == receiver["name"] and all(map(fits, cells[1:], wanted)), f"{cells} are not {wanted}"
        assert section.locator(".roles li").all_text_contents() == status.get("roles", [])
        print(f"ok buffer of {run.name}")

    def about(self, run):
        self.open("about", run=in_url(run.name))
        sums = {}
        for line in lines(run / "metrics.jsonl"):
            for name, value in line.items():
                if name.startswith("time/") and value is not None:
                    sums[name] = sums.get(name, 0) + value
        rows = self.page.locator("#about tr[data-timing]")
        assert {row.get_attribute("data-timing") for row in rows.all()} == set(sums)
        for row in rows.all():
            want = sums[row.get_attribute("data-timing")]
            assert math.isclose(number(row.locator("td").first.text_content()), want, rel_tol=1e-3), run.name
        facts = json.loads((run / "run.json").read_text()) if (run / "run.json").exists() else {}
        for name, fact in facts.items():
            assert self.page.locator(f"#about [data-fact='{name}'] td").text_content() == (fact if isinstance(fact, str) else json.dumps(fact, separators=(",", ":")))
        print(f"ok environment and timings of {run.name}")

    def prometheus(self):
        """`/metrics` has the last value of every metric of every run."""
        seen = {}
        for line in self.context.request.get(f"{self.url}/metrics").text().splitlines():
            if not line.startswith("#"):
                name, labels, value = re.fullmatch(r'(rlrun:[A-Za-z0-9_]+){run="((?:[^"\\\n]|\\["\\n])*)"[^}]*} (\S+)', line).groups()
                seen[name, labels] = float(value)
        for run in self.runs:
            for name, want in last_values(run).items():
                value = seen["rlrun:" + re.sub("[^A-Za-z0-9]", "_", name), run.name]
                assert math.isnan(value) if want is None else value == want, f"{run.name} {name}: {value} is not {want}"
        print(f"ok metrics for Prometheus: {len(seen)}")

    def keyboard(self):
        self.open("overview")
        self.page.locator("#tab-overview").focus()
        self.page.keyboard.press("ArrowRight")
        self.page.wait_for_selector("body[data-ready=samples]")
        assert self.page.locator("#samples").is_visible() and "view=samples" in self.page.url
        self.page.keyboard.press("End")
        expect(self.page.locator("#about")).to_be_visible()
        self.page.go_back()
        expect(self.page.locator("#samples")).to_be_visible()
        print("ok keyboard and history")

    def controls(self, run):
        """Axes, smoothing, logarithm, zoom, an added panel: each changes the state in the URL and draws without errors."""
        self.open("overview")
        self.page.get_by_role("button", name="trained tokens").click()
        self.page.get_by_label("smoothing").fill("0.9")
        self.page.get_by_role("button", name="Logarithmic scale").first.click()
        self.page.locator(".metrics tbody button").last.click()
        expect(self.page.locator("section[aria-label=Added] canvas")).to_have_count(1)
        over = self.page.locator("figure.panel .u-over").nth(1)
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=5)
        self.page.mouse.up()
        reset = self.page.get_by_role("button", name="reset zoom")
        expect(reset).to_be_visible()
        for part in ("x=tokens", "smooth=0.9", "log=", "panels=", "range="):
            assert part in self.page.url, f"{part} is not in {self.page.url}"
        self.page.screenshot(path=self.out / "controls.png")
        reset.click()
        expect(reset).to_have_count(0)
        print("ok controls")

    def live(self, run):
        """A line that is written now is on the page soon, in more tabs than a browser has connections to a server."""
        self.open("overview")
        tabs = [self.context.new_page() for _ in range(12)]
        for tab in tabs:
            tab.goto(self.url)
            expect(tab.locator("#connection")).to_have_text("live")
        step = self.page.locator("#runs tr", has_text=run.name).locator("td.value").first
        expect(step).to_have_text("1 / 3")
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step":2,"time_s":2,"reward/mean":0.75}\n')
        expect(step).to_have_text("2 / 3", timeout=15000)
        for tab in tabs:
            expect(tab.locator("#runs tr", has_text=run.name).locator("td.value").first).to_have_text("2 / 3")
            tab.close()
        print("ok live, in 13 tabs")

    def followed(self, run):
        """The timeline of a run that goes on shows its newest steps, also behind a line that was torn."""
        self.open("timeline", run=in_url(run.name))
        shown = self.page.locator("#timeline .controls")
        expect(shown).to_contain_text("20 – 40 s")
        with open(run / "timeline.jsonl", "a") as file:
            file.write('\n{"lane":"trainer","kind":"wait_for_batch","start":40,"end":41,"step":41}\n')
        expect(shown).to_contain_text("21 – 41 s", timeout=15000)
        print("ok timeline is followed")

    def deleted(self, run):
        """A run that is removed is named, and stays with what was read."""
        self.open("overview")
        shutil.rmtree(run)
        row = self.page.locator("#runs tr", has_text=run.name)
        expect(row.locator(".badge")).to_have_text("deleted", timeout=15000)
        expect(row.locator("td.value").first).to_have_text("2 / 3")
        print("ok deleted")

    def pictures(self, run):
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            for size, (width, height) in SIZES.items():
                self.page.set_viewport_size({"width": width, "height": height})
                for view in VIEWS:
                    self.open(view, run=run.name)
                    self.page.screenshot(path=self.out / f"{view}-{scheme}-{size}.png", full_page=view == "overview")
                    scroll = self.page.evaluate("document.documentElement.scrollWidth")
                    assert scroll <= width, f"{view} is {scroll} pixels wide on {width}"


def serve(program, *arguments):
    """A served page and its address."""
    server = subprocess.Popen([program, "view", *map(str, arguments), "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    return server, server.stdout.readline().strip().removeprefix("listening on ")


def token(program, browser, run, scratch):
    """With a token file the page shows nothing without the token, and all with it; the token leaves the address."""
    file = scratch / "token"
    file.write_text("a+b/c=secret\n")
    server, url = serve(program, run, "--token-file", file)
    try:
        page = browser.new_context().new_page()
        page.goto(url)
        expect(page.locator("#problem")).to_contain_text("the token is missing or wrong")
        page.goto(f"{url}/?token=a+b/c=secret")
        expect(page.locator("figure.panel canvas").first).to_be_visible()
        expect(page.locator("#connection")).to_have_text("live")
        assert "secret" not in page.url
        page.reload()
        expect(page.locator("figure.panel canvas").first).to_be_visible()
    finally:
        server.terminate()
        server.wait()
    print("ok token")


def walk_views(walk, synthetic_runs):
    """Every view of every run; the new files of those that have them."""
    walk.overview()
    for run in walk.runs:
        walk.samples(run)
        walk.recipe(run)
        walk.events(run)
        walk.about(run)
        if (run / "timeline.jsonl").exists():
            walk.timeline(run)
        if (run / "status.json").exists():
            walk.buffer(run)
        if any((run / "samples").glob("*_tokens.jsonl")):
            walk.tokens(run)
        walk.filters(run)
    for run in synthetic_runs:
        walk.compare(run)


def started(playwright):
    """A browser. Chromium itself crashes now and then while it starts, on a busy machine: it gets three attempts."""
    for attempt in range(3):
        try:
            return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except PlaywrightError as error:
            if attempt == 2 or "signal=SIG" not in str(error):
                raise
            print("Chromium crashed while it started, and is started again:", str(error).splitlines()[0])


def walk_page(program, out, runs):
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        scratch = pathlib.Path(scratch)
        hostile, copy = hostile_run(scratch), synthetic_run(scratch, runs[0])
        everything = [*runs, hostile, copy]
        server, url = serve(program, *everything)
        try:
            browser = started(playwright)
            walk = Walk(browser, url, everything, out)
            walk.live(hostile)
            walk_views(walk, [copy])
            walk.prometheus()
            walk.open("samples", run="hostile%3Cb%3E")
            assert walk.page.locator("pre.completion").first.text_content() == HOSTILE
            walk.open("recipe", run=runs[0].name, against="hostile%3Cb%3E")
            walk.page.screenshot(path=out / "difference.png")
            walk.keyboard()
            walk.controls(runs[0])
            walk.pictures(copy)
            assert walk.page.evaluate("window.broken") is None, "a text of a model ran as a script"
            walk.followed(hostile)
            walk.deleted(hostile)
            walk.problems and sys.exit("\n".join(["the console has errors:", *walk.problems]))
            print("ok console: no error in any view")
            token(program, browser, runs[0], scratch)
            browser.close()
        finally:
            server.terminate()
            server.wait()


def walk_report(file, out, runs):
    """A report from disk, without a network."""
    with sync_playwright() as playwright:
        browser = started(playwright)
        walk = Walk(browser, file.as_uri(), runs, out)
        walk.context.set_offline(True)
        loaded = []
        walk.page.on("request", lambda request: loaded.append(request.url) if request.url.split("#")[0] != walk.url else None)
        walk_views(walk, [run for run in runs if run.name == "synthetic"])
        walk.keyboard()
        walk.controls(runs[0])
        walk.pictures(runs[-1])
        assert walk.page.evaluate("window.broken") is None, "a text of a model ran as a script"
        walk.problems and sys.exit("\n".join(["the console has errors:", *walk.problems]))
        assert [url for url in loaded if url != "about:blank"] == [], loaded
        browser.close()
    print("ok report: no error in any view, and nothing was loaded")


def main(program, *rest):
    report = pathlib.Path(rest[0]).resolve() if program == "report" else None
    out, *runs = rest[1:] if report else rest
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    runs = [pathlib.Path(run).resolve() for run in runs]
    if report:
        walk_report(report, out, runs)
    else:
        walk_page(program, out, runs)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

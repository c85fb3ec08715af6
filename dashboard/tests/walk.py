"""Walks every view of `rlrun view` in Chromium, and compares what it shows with the files of the runs.

    walk.py RLRUN OUT RUN...

RLRUN is the program, OUT a directory for screenshots, each RUN a run directory. Needs the Python package playwright and a
Chromium (`chromium` on the path, or one that playwright installed). Fails on an error in the console of the browser, on a
number that differs from its file, on a text of a model that is not shown as text, and on a page wider than a phone.
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

from playwright.sync_api import expect, sync_playwright

VIEWS = ["overview", "samples", "recipe", "events"]
SIZES = {"wide": (1440, 900), "phone": (360, 740)}
HOSTILE = '<script>window.broken = 1</script><img src=x onerror="window.broken = 1">'


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    return run


class Walk:
    def __init__(self, browser, url, runs, out):
        self.url, self.runs, self.out, self.problems = url, runs, out, []
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}") or dialog.dismiss())

    def open(self, view, **more):
        state = "&".join(f"{key}={value}" for key, value in {"view": view, **more}.items())
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#{state}")
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
            answer = self.page.evaluate(
                "async ([key, run]) => (await fetch(`api/metrics?${new URLSearchParams({keys: key, run, pixels: 4000})}`)).json()", [key, run.name])
            if not want:
                continue
            curve = answer[run.name][key]
            assert [step for step, _ in want] == curve["x"], f"{run.name} {key}"
            assert all(math.isclose(value, y, rel_tol=1e-6) for (_, value), y in zip(want, curve["y"])), f"{run.name} {key}"

    def samples(self, run):
        files = sorted((run / "samples").glob("step_*.jsonl"))
        for file in {files[0], files[-1]}:
            step = int(file.stem.split("_")[1])
            self.open("samples", run=run.name.replace("<", "%3C").replace(">", "%3E"), step=step)
            groups = lines(file)
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
        self.open("recipe", run=run.name.replace("<", "%3C").replace(">", "%3E"))
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
        self.open("events", run=run.name.replace("<", "%3C").replace(">", "%3E"))
        rows = self.page.locator("section[aria-label=Events] tbody tr").count()
        assert rows == len(lines(run / "events.jsonl")), run.name
        remarks = [line["bottleneck"] for line in lines(run / "metrics.jsonl") if "bottleneck" in line]
        if remarks:
            assert self.page.locator("section[aria-label=Remarks] tbody td").first.text_content() == remarks[-1]
        print(f"ok events of {run.name}")

    def keyboard(self):
        self.open("overview")
        self.page.locator("#tab-overview").focus()
        self.page.keyboard.press("ArrowRight")
        self.page.wait_for_selector("body[data-ready=samples]")
        assert self.page.locator("#samples").is_visible() and "view=samples" in self.page.url
        self.page.keyboard.press("End")
        expect(self.page.locator("#events")).to_be_visible()
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
        expect(step).to_have_text("2 / 3", timeout=3000)
        for tab in tabs:
            expect(tab.locator("#runs tr", has_text=run.name).locator("td.value").first).to_have_text("2 / 3")
            tab.close()
        print("ok live, in 13 tabs")

    def deleted(self, run):
        """A run that is removed is named, and stays with what was read."""
        self.open("overview")
        shutil.rmtree(run)
        row = self.page.locator("#runs tr", has_text=run.name)
        expect(row.locator(".badge")).to_have_text("deleted", timeout=3000)
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
    file.write_text("secret\n")
    server, url = serve(program, run, "--token-file", file)
    try:
        page = browser.new_context().new_page()
        page.goto(url)
        expect(page.locator("#problem")).to_contain_text("the token is missing or wrong")
        page.goto(f"{url}/?token=secret")
        expect(page.locator("figure.panel canvas").first).to_be_visible()
        expect(page.locator("#connection")).to_have_text("live")
        assert "secret" not in page.url
        page.reload()
        expect(page.locator("figure.panel canvas").first).to_be_visible()
    finally:
        server.terminate()
        server.wait()
    print("ok token")


def main(program, out, *runs):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    runs = [pathlib.Path(run).resolve() for run in runs]
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        hostile = hostile_run(pathlib.Path(scratch))
        everything = [*runs, hostile]
        server, url = serve(program, *everything)
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            walk = Walk(browser, url, everything, out)
            walk.live(hostile)
            walk.overview()
            for run in everything:
                walk.samples(run)
                walk.recipe(run)
                walk.events(run)
            walk.open("samples", run="hostile%3Cb%3E")
            assert walk.page.locator("pre.completion").first.text_content() == HOSTILE
            walk.open("recipe", run=runs[0].name, against="hostile%3Cb%3E")
            walk.page.screenshot(path=out / "difference.png")
            walk.keyboard()
            walk.controls(runs[0])
            walk.pictures(runs[0])
            assert walk.page.evaluate("window.broken") is None, "a text of a model ran as a script"
            walk.deleted(hostile)
            walk.problems and sys.exit("\n".join(["the console has errors:", *walk.problems]))
            print("ok console: no error in any view")
            token(program, browser, runs[0], pathlib.Path(scratch))
            browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

// The page: tabs, the table of runs, and the stream that says when a run has new lines.

import { api, get, list, onChange, page, set, token } from "./state.js";
import { duration, el, number } from "./dom.js";
import * as overview from "./overview.js";
import * as samples from "./samples.js";
import * as timeline from "./timeline.js";
import * as buffer from "./buffer.js";
import * as recipe from "./recipe.js";
import * as events from "./events.js";
import * as about from "./about.js";
import { report } from "./report.js";

const VIEWS = { overview, samples, timeline, buffer, recipe, events, about };
// A quick run writes several lines a second; the page waits so long for more of them, milliseconds.
const PAUSE = 500;

const connection = document.getElementById("connection");
const problem = document.getElementById("problem");
const runsTable = document.getElementById("runs");
const tabs = [...document.querySelectorAll("[role=tab]")];
const current = () => (VIEWS[get("view")] ? get("view") : "overview");

// Loads and shows the current view; one at a time, and once more if something changed meanwhile.
let busy = false;
let again = false;
async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  const view = current();
  try {
    if (view !== "overview") page.runs = await api("runs");
    await VIEWS[view].load();
    if (view === current()) {
      showTabs();
      showRuns();
      await VIEWS[view].show();
    }
    problem.hidden = true;
  } catch (error) {
    showTabs();
    problem.textContent = error.message;
    problem.hidden = false;
  }
  busy = false;
  document.body.dataset.ready = view;
  if (again) {
    again = false;
    refresh();
  }
}

function showTabs() {
  for (const tab of tabs) {
    const selected = tab.id === `tab-${current()}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  document.title = `${page.runs.length === 1 ? page.runs[0].name : `${page.runs.length} runs`} – rlrun`;
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => set({ view: tab.id.slice(4) }, { replace: false }));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
});

const SAYS = {
  done: "done", running: "running", stopped: "stopped", waiting: "no line yet", quiet: "no new lines", missing: "deleted",
};

// Which side waits, in one sentence.
function diagnosis(run) {
  if (run.state === "missing") return "The directory is gone; the page keeps what it had read.";
  if (run.problem) return `The files cannot be read: ${run.problem}`;
  const notes = [];
  if (run.remark) notes.push(run.remark);
  else if (typeof run.last["rollout/idle_ratio"] === "number" && typeof run.last["trainer/idle_ratio"] === "number") {
    const share = (name) => `${Math.round(100 * run.last[name])} %`;
    notes.push(`neither side is the bottleneck: idle sampler ${share("rollout/idle_ratio")}, trainer ${share("trainer/idle_ratio")}`);
  }
  if (run.state === "quiet") notes.push(`the last line is ${duration(run.age_s)} old, and no end was recorded`);
  if (run.skipped_lines > 0) notes.push(`${run.skipped_lines} lines are too long and left out`);
  if (run.truncated) notes.push("some metrics exceed the limits of this page and are left out");
  return notes.join("; ");
}

const COLUMNS = [
  ["reward", "reward/mean"], ["eval accuracy", "eval/accuracy"], ["eval reward", "eval/reward"], ["staleness", "staleness/mean"],
  ["sampled tok/s", "rollout/tokens_per_s"], ["trained tok/s", "trainer/tokens_per_s"],
];

function showRuns() {
  const hidden = list("hide");
  const several = page.runs.length > 1;
  const columns = COLUMNS.filter(([, key]) => page.runs.some((run) => run.last[key] !== undefined));
  const focused = runsTable.contains(document.activeElement) ? document.activeElement.dataset.run : null;
  const rows = page.runs.map((run) => {
    const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
    if (several) swatch.style.background = overview.runColor(run);
    const change = () => set({ hide: hidden.includes(run.name) ? hidden.filter((name) => name !== run.name) : [...hidden, run.name] });
    const box = several && el("input", { type: "checkbox", checked: !hidden.includes(run.name), "data-run": run.name, "aria-label": `Show ${run.name}`, onchange: change });
    const progress = run.step === null ? "–" : `${number(run.step)}${run.steps ? ` / ${number(run.steps)}` : ""}`;
    return el("tr", {},
      el("th", { scope: "row" }, box, several && swatch, " ", run.name),
      el("td", {}, el("span", { class: `badge ${run.state}` }, SAYS[run.state] ?? run.state)),
      el("td", { class: "value", "data-label": "step" }, progress),
      el("td", { class: "value", "data-label": "time" }, duration(run.time_s)),
      columns.map(([name, key]) => el("td", { class: "value", "data-label": name, "data-metric": key }, number(run.last[key]))),
      el("td", { class: "diagnosis" }, diagnosis(run)));
  });
  const heads = ["run", "state", "step", "time", ...columns.map(([name]) => name), "diagnosis"];
  runsTable.replaceChildren(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: index > 1 && index < heads.length - 1 ? "value" : null }, head)))),
    el("tbody", {}, rows))));
  if (focused) runsTable.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
}

// One stream for all tabs of a browser, because browsers allow six connections to a server: the tab that has the lock owns
// the stream and passes on what it says. Without locks (a page that is neither local nor encrypted) every tab has its own.
const tabsOfBrowser = !report && navigator.locks && "BroadcastChannel" in window ? new BroadcastChannel("rlrun") : null;
let owned = null;
let timer = null;
let stale = false;

function hear(message) {
  if (message.state !== undefined) {
    connection.textContent = message.state;
    connection.className = message.state;
  }
  if (message.revisions && page.runs.some((run) => run.revision !== message.revisions[run.name])) changed();
  if (message.ask && owned) tabsOfBrowser.postMessage(owned);
}

function changed() {
  // A hidden tab reads nothing until it is looked at.
  stale = document.hidden;
  if (!stale) timer ??= setTimeout(() => { timer = null; refresh(); }, PAUSE);
}

function follow() {
  const tell = (message) => {
    owned = { ...owned, ...message };
    hear(message);
    tabsOfBrowser?.postMessage(message);
  };
  const stream = new EventSource(token() ? `api/events?token=${encodeURIComponent(token())}` : "api/events");
  stream.onopen = () => tell({ state: "live" });
  stream.onmessage = (event) => tell({ revisions: JSON.parse(event.data) });
  stream.onerror = () => {
    tell({ state: "disconnected" });
    // The browser tries again by itself, unless the server has refused.
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 5000);
  };
}

if (report) {
  connection.textContent = "report";
} else if (tabsOfBrowser) {
  tabsOfBrowser.onmessage = (event) => hear(event.data);
  tabsOfBrowser.postMessage({ ask: true });
  // The lock is free again when its tab is closed.
  navigator.locks.request("rlrun", () => { follow(); return new Promise(() => {}); });
} else {
  follow();
}

document.addEventListener("visibilitychange", () => { if (stale) changed(); });
onChange(refresh);
refresh();

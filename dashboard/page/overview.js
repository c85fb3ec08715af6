// The overview: panels of the first screen, panels that were added, and a list of all metrics.

import { api, get, list, page, set, shownRuns } from "./state.js";
import { debounce, el, number } from "./dom.js";
import { Chart, color } from "./chart.js";

const AXES = { step: "step", tokens: "trained tokens", time: "seconds" };
const root = document.getElementById("overview");
const controls = el("div", { class: "controls" });
const panels = el("div", { class: "rows" });
const filter = el("input", { type: "search", placeholder: "filter", "aria-label": "Filter metrics", oninput: () => listMetrics() });
const metrics = el("table", { class: "metrics" });
const count = el("span", { class: "dim" });
root.append(controls, panels,
  el("section", { class: "all", "aria-label": "All metrics" }, el("h2", {}, "All metrics"),
    el("p", { class: "controls" }, filter, count), el("div", { class: "scroll" }, metrics)));

let charts = new Map();
let drawn = "";
let answer = null;
let added = {};

const range = () => {
  const [from, to] = get("range").split("..").map(Number);
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? [from, to] : null;
};

// Columns that fit the window, for the width of a panel.
function pixels() {
  const width = root.clientWidth || document.documentElement.clientWidth - 24;
  const columns = Math.max(1, Math.floor((width + 10) / 330));
  return Math.max(120, Math.min(1200, Math.round((width / columns - 70) * Math.min(devicePixelRatio || 1, 1.5))));
}

const parameters = () => ({ x: get("x", "step"), pixels: pixels(), from: range()?.[0], to: range()?.[1] });

export async function load() {
  answer = await api("overview", parameters());
  page.runs = answer.runs;
  const keys = list("panels");
  added = keys.length > 0 ? await api("metrics", { ...parameters(), keys: keys.join(",") }) : {};
}

export function show() {
  if (!answer) return;
  showControls();
  const extra = list("panels").map((key) => ({ row: "Added", title: key, keys: [key] }));
  const all = [...extra, ...answer.panels];
  const shape = JSON.stringify(all);
  if (shape !== drawn) layOut(all, shape);
  const runs = shownRuns().map((run) => ({ ...run, index: page.runs.findIndex((other) => other.name === run.name) }));
  const options = { smooth: Number(get("smooth", "0")), axis: get("x", "step"), x: AXES[get("x", "step")] ?? "step", range: range() };
  const logs = list("log");
  for (const [id, chart] of charts) {
    const curves = id.startsWith("Added ") ? added : answer.curves;
    chart.update(curves, runs, { ...options, log: logs.includes(chart.title) });
  }
  listMetrics();
}

function layOut(all, shape) {
  charts.forEach((chart) => chart.destroy());
  charts = new Map();
  drawn = shape;
  const rows = new Map();
  for (const { row, title, keys, stacked } of all) {
    const chart = new Chart({
      title,
      keys,
      stacked,
      sync: "overview",
      onzoom: (from, to) => set({ range: `${Number(from.toPrecision(6))}..${Number(to.toPrecision(6))}` }, { replace: false }),
      onreset: () => set({ range: "" }),
      onlog: toggle("log"),
      onremove: row === "Added" ? toggle("panels") : null,
    });
    charts.set(`${row} ${title}`, chart);
    if (!rows.has(row)) rows.set(row, el("div", { class: "grid" }));
    rows.get(row).append(chart.element);
  }
  panels.replaceChildren(...[...rows].map(([row, grid]) => el("section", { "aria-label": row }, el("h2", {}, row), grid)));
  if (all.length === 0) panels.append(el("p", { class: "dim" }, "No metrics yet: the first line is written after the first step."));
}

const toggle = (key) => (value) => {
  const values = list(key);
  set({ [key]: values.includes(value) ? values.filter((other) => other !== value) : [...values, value] });
};

let shownControls = "";
function showControls() {
  const now = JSON.stringify([get("x"), get("smooth"), get("range")]);
  // The slider keeps its focus.
  if (now === shownControls || controls.contains(document.activeElement) && document.activeElement.type === "range") return;
  shownControls = now;
  const focused = document.activeElement?.dataset?.axis;
  const axes = Object.entries(AXES).map(([name, text]) => el("button", {
    "data-axis": name, "aria-pressed": String(get("x", "step") === name), onclick: () => set({ x: name === "step" ? "" : name, range: "" }),
  }, text));
  const value = get("smooth", "0");
  const output = el("output", {}, value);
  const apply = debounce(() => set({ smooth: slider.value === "0" ? "" : slider.value }), 60);
  const slider = el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value, oninput: () => { output.textContent = slider.value; apply(); } });
  controls.replaceChildren(
    el("div", { role: "group", "aria-label": "Horizontal axis", class: "segmented" }, axes),
    el("label", {}, "smoothing ", slider, " ", output),
    ...(range() ? [el("button", { onclick: () => set({ range: "" }) }, `reset zoom ${range().map(number).join(" – ")}`)] : [el("span", { class: "dim hint" }, "drag over a panel to zoom")]),
  );
  if (focused) controls.querySelector(`[data-axis="${focused}"]`)?.focus();
}

function listMetrics() {
  if (!answer) return;
  const wanted = filter.value.toLowerCase();
  const names = answer.names.filter((name) => name.toLowerCase().includes(wanted));
  const chosen = list("panels");
  count.textContent = `${names.length} of ${answer.names.length}`;
  const runs = shownRuns();
  const head = el("tr", {}, el("th", { scope: "col" }, "metric"), runs.map((run) => el("th", { scope: "col", class: "value" }, runs.length > 1 ? run.name : "last value")));
  const rows = names.slice(0, 400).map((name) => el("tr", {},
    el("th", { scope: "row" }, el("button", { class: "plain", "aria-pressed": String(chosen.includes(name)), title: "Add or remove a panel", onclick: () => toggle("panels")(name) }, name)),
    runs.map((run) => el("td", { class: "value", "data-metric": name, "data-run": run.name, "data-value": String(run.last[name]) }, number(run.last[name])))));
  const focused = metrics.contains(document.activeElement) ? document.activeElement.textContent : null;
  metrics.replaceChildren(el("thead", {}, head), el("tbody", {}, rows));
  if (focused) [...metrics.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  charts.forEach((chart) => chart.recolour());
  show();
});

export const runColor = (run) => color(page.runs.findIndex((other) => other.name === run.name));

// The buffer and the weights now, and who does what: `status.json` of a run, with the curves that belong to it.

import { api, currentRun, get, page, runNames, set } from "./state.js";
import { duration, el, number, runSelect } from "./dom.js";
import { Chart } from "./chart.js";

const root = document.getElementById("buffer");
const controls = el("div", { class: "controls" });
const now = el("div", {});
const curves = el("div", { class: "grid" });
root.append(controls, now, el("h2", {}, "Over the run"), curves);

const PANELS = [
  ["groups", ["buffer/size", "buffer/dropped_stale", "buffer/quarantined"]],
  ["staleness, versions", ["staleness/mean", "staleness/p95", "staleness/max"]],
  ["weights, bytes", ["weights/bytes", "weights/received_bytes"]],
  ["weights, s", ["weights/publish_s", "weights/apply_s", "weights/stall_s", "time/weight_sync"]],
];
const STATES = { admitted: 5, claimed: 1, finalized: 3, leased: 2 };

let run;
let answer = { status: null };
let answers = {};
let charts = [];

const range = () => {
  const [from, to] = get("range").split("..").map(Number);
  return Number.isFinite(from) && Number.isFinite(to) && to > from ? [from, to] : null;
};

export async function load() {
  run = currentRun();
  if (!run) return;
  const keys = PANELS.flatMap(([, names]) => names).join(",");
  const parameters = { run, keys, pixels: 300, from: range()?.[0], to: range()?.[1] };
  [answer, answers] = await Promise.all([api("status", { run }), api("metrics", parameters)]);
}

let drawn = "";
export function show() {
  if (!run) return;
  controls.replaceChildren(...[
    runSelect("run", runNames(), run, (name) => set({ run: name })),
    range() && el("button", { onclick: () => set({ range: "" }) }, "reset zoom"),
  ].filter(Boolean));
  controls.hidden = controls.childElementCount === 0;
  const state = JSON.stringify([run, answer.status]);
  if (state !== drawn) {
    drawn = state;
    now.replaceChildren(...describe(answer.status));
  }
  const age = now.querySelector(".age");
  if (age) age.textContent = answer.age_s === null ? "" : `, ${duration(answer.age_s)} ago`;
  drawCurves();
}

function drawCurves() {
  const known = PANELS.map(([title, keys]) => [title, keys.filter((key) => answers[run]?.[key])]).filter(([, keys]) => keys.length > 0);
  const shape = JSON.stringify(known);
  if (curves.dataset.shape !== shape) {
    curves.dataset.shape = shape;
    charts.forEach((chart) => chart.destroy());
    charts = known.map(([title, keys]) => new Chart({
      title, keys, sync: "buffer",
      onzoom: (from, to) => set({ range: `${Number(from.toPrecision(6))}..${Number(to.toPrecision(6))}` }, { replace: false }),
      onreset: () => set({ range: "" }),
      onlog: (name) => set({ log: get("log") === name ? "" : name }),
    }));
    curves.replaceChildren(...charts.map((chart) => chart.element));
  }
  const shown = page.runs.filter((one) => one.name === run).map((one) => ({ ...one, index: 0 }));
  charts.forEach((chart) => chart.update(answers, shown, { log: get("log") === chart.title, smooth: 0, axis: "step", x: "step", range: range() }));
}

function describe(status) {
  if (!status) return [el("p", { class: "dim", role: "status" }, "This run has written no status yet.")];
  if (status.problem) return [el("p", { role: "status" }, `The status cannot be shown: ${status.problem}`)];
  return [
    el("p", { class: "dim" }, `step ${number(status.step)}, second ${number(status.time_s)} of the run`, el("span", { class: "age" })),
    status.bottleneck && el("p", { class: "sentence" }, String(status.bottleneck)),
    el("section", { "aria-label": "Roles" }, el("h2", {}, "Who does what now"), el("ul", { class: "roles" }, list(status.roles).map((role) => el("li", {}, String(role))))),
    ...(status.buffer ? [bufferPart(status.buffer, status.weights?.version)] : []),
    ...(status.weights ? [weightsPart(status.weights)] : []),
  ].filter(Boolean);
}

const list = (value) => (Array.isArray(value) ? value : []);

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== undefined).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-fact": name }, number(value)))));
}

function table(label, heads, rows) {
  return el("div", { class: "scroll tables", tabindex: "0", role: "group", "aria-label": label }, el("table", { class: "metrics" },
    el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: index > 1 ? "value" : null }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) => el(index === 0 ? "th" : "td", { scope: index === 0 ? "row" : null, class: index > 1 ? "value" : null }, typeof cell === "string" ? cell : number(cell))))))));
}

function bufferPart(buffer, version) {
  const used = Object.keys(STATES).map((state) => [state, buffer[state] ?? 0]);
  const free = Math.max(0, (buffer.capacity ?? 0) - used.reduce((sum, [, count]) => sum + count, 0));
  const bar = el("div", { class: "slots", role: "img", "aria-label": `Slots: ${[...used, ["free", free]].map(([state, count]) => `${count} ${state}`).join(", ")}` },
    [...used, ["free", free]].filter(([, count]) => count > 0).map(([state, count]) => {
      const part = el("span", { class: state === "free" ? "free" : null, "data-state": state, title: `${count} ${state}` }, `${state} ${number(count)}`);
      part.style.flexGrow = String(count);
      part.style.flexBasis = "0";
      if (STATES[state]) part.style.setProperty("--of", `var(--series-${STATES[state]})`);
      return part;
    }));
  const order = Object.keys(STATES);
  const groups = list(buffer.groups).slice().sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || (b.age_ms ?? 0) - (a.age_ms ?? 0));
  const age = (group) => (typeof group.age_ms === "number" ? group.age_ms / 1000 : undefined);
  const lag = (group) => (version === undefined || group.policy_version === undefined ? undefined : version - group.policy_version);
  const leases = list(buffer.leases);
  return el("section", { "aria-label": "Buffer" }, el("h2", {}, `Slots of the buffer: ${number(buffer.capacity)}`), bar,
    facts([...used, ["free", free], ["dropped as stale", buffer.dropped_stale], ["expired", buffer.expired], ["evicted", buffer.evicted], ["quarantined", buffer.quarantined]]),
    el("div", { class: "two" },
      el("section", { "aria-label": "Groups" }, el("h2", {}, `Groups: ${number(groups.length)}`),
        table("Groups", ["group", "state", "version", "lag, versions", "tokens", "bytes", "reward", "uses", "age, s"], groups.map((group) => [group.id, String(group.state), group.policy_version, lag(group), group.tokens, group.bytes, group.reward, group.uses, age(group)]))),
      el("section", { "aria-label": "Leases" }, el("h2", {}, `Leases: ${number(leases.length)}`),
        table("Leases", ["lease", "consumer", "step", "expires in, s", "groups"], leases.map((lease) => [lease.id, `${lease.consumer}${lease.expired ? " (expired)" : ""}`, lease.step, typeof lease.expires_in_ms === "number" ? lease.expires_in_ms / 1000 : "never", list(lease.groups).slice(0, 64).join(", ") || "–"])))));
}

function weightsPart(weights) {
  const receivers = list(weights.receivers);
  return el("section", { "aria-label": "Weights" }, el("h2", {}, `Weights: version ${number(weights.version)}`),
    facts([["bytes", weights.bytes], ["seconds to publish", weights.publish_s]]),
    table("Receivers", ["receiver", "serves version", "lag", "bytes", "apply, s", "stall, s"], receivers.map((one) => [String(one.name), number(one.version), one.lag, one.bytes, one.apply_s, one.stall_s])));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  charts.forEach((chart) => chart.recolour());
  show();
});

// The timeline: what each role did when, which lane waits for what, and the way of trajectories from admission to training.

import { api, currentRun, get, runNames, set } from "./state.js";
import { el, number, runSelect } from "./dom.js";
import { showWhy, whyPanel } from "./why.js";
import { Lanes, hatch, isWait, kindColor, lagColor } from "./lanes.js";

const root = document.getElementById("timeline");
const controls = el("div", { class: "controls" });
const sentence = el("p", { class: "sentence", role: "status" });
const notes = el("p", { class: "dim" });
const stalls = el("ul", { class: "stalls" });
const kinds = el("ul", { class: "keys", "aria-label": "Kinds of spans" });
const waits = el("table", { class: "metrics" });
const heading = el("h2", {}, "Trajectories, from admission to training");
const lags = el("ul", { class: "keys", "aria-label": "Lags and phases" });

const zoom = (from, to) => set({ window: `${Number(from.toPrecision(9))}..${Number(to.toPrecision(9))}` }, { replace: false });
const reset = () => set({ window: "" });
const lanes = new Lanes({ label: "Lanes", rowHeight: 26, paint: paintSpan, describe: describeSpan, onzoom: zoom, onreset: reset });
const trajectories = new Lanes({ label: "Trajectories", rowHeight: 14, paint: paintTrajectory, describe: describeTrajectory, onzoom: zoom, onreset: reset });
root.append(whyPanel, controls, sentence, notes, stalls, kinds, lanes.element, el("div", { class: "scroll" }, waits), heading, lags, trajectories.element);

let run;
let answer = null;
let why = null;

// The part of the URL that says which range is shown; without it the newest steps are.
const range = () => {
  const [from, to] = get("window").split("..").map(Number);
  return get("window") && Number.isFinite(from) && Number.isFinite(to) && to > from ? { from, to } : {};
};

export async function load() {
  run = currentRun();
  // The timeline is shown without the critical path, too.
  [why, answer] = run ? await Promise.all([
    api("why", { run }).catch(() => null),
    api("timeline", { run, ...range(), pixels: Math.max(200, Math.min(2000, root.clientWidth || 900)) }),
  ]) : [null, null];
}

let drawn = "";
export function show() {
  if (!answer) return;
  showControls();
  const now = JSON.stringify([run, answer, why, root.clientWidth]);
  if (now === drawn) return;
  drawn = now;
  showWhy(why);
  const empty = answer.first === null;
  for (const part of [kinds, lanes.element, heading, lags, trajectories.element, waits]) part.hidden = empty;
  if (empty) {
    sentence.textContent = "This run has written no timeline; `log.timeline` says how many trajectories of a step are written.";
    notes.textContent = "";
    stalls.replaceChildren();
    return;
  }
  sentence.textContent = answer.sentence;
  notes.textContent = remarks().join("; ");
  notes.hidden = notes.textContent === "";
  stalls.replaceChildren(...answer.stalls.map((stall) => el("li", {}, el("b", {}, `stall at ${number(stall.start)} s, ${number(stall.end - stall.start)} s: `), stall.note || "without a reason")));
  const marks = answer.steps.map(({ step, at }) => ({ at, text: `step ${step}` }));
  const view = { marks, bands: answer.stalls, from: answer.from, to: answer.to };
  lanes.update({ ...view, rows: answer.lanes.map((lane) => ({ label: lane.name, spans: lane.spans })) });
  trajectories.update({ ...view, rows: answer.trajectories.map((one) => ({ label: `${one.group ?? "?"}.${one.index ?? "?"}  lag ${one.lag ?? "?"}`, spans: [one] })) });
  heading.textContent = `Trajectories, from admission to training: ${answer.trajectories.length}${answer.trajectories_left_out > 0 ? ` of ${answer.trajectories.length + answer.trajectories_left_out}` : ""}`;
  trajectories.element.hidden = lags.hidden = answer.trajectories.length === 0;
  showKeys();
  waits.replaceChildren(
    el("thead", {}, el("tr", {}, ["lane", "waits", "for"].map((head, index) => el("th", { scope: "col", class: index === 1 ? "value" : null }, head)))),
    el("tbody", {}, answer.lanes.map((lane) => el("tr", { "data-lane": lane.name }, el("th", { scope: "row" }, lane.name),
      el("td", { class: "value" }, percent(lane.waits.reduce((sum, wait) => sum + wait.share, 0))),
      el("td", {}, lane.waits.map((wait) => `${wait.for} ${percent(wait.share)}`).join(", "))))));
}

const percent = (share) => `${number(Math.round(1000 * share) / 10)} %`;

function remarks() {
  const left = answer.lanes.reduce((sum, lane) => sum + lane.left_out, 0);
  return [
    answer.indexed < 1 && `${Math.floor(100 * answer.indexed)} % of the file are read so far`,
    !answer.exact && "this range is too long for single spans: it shows the share of each kind of time; zoom in for spans and trajectories",
    left > 0 && `${number(left)} spans are left out`,
    answer.unreadable > 0 && `lines that are no spans: ${number(answer.unreadable)}`,
  ].filter(Boolean);
}

let shownControls = "";
function showControls() {
  const { from, to, first, last } = answer;
  const now = JSON.stringify([run, runNames(), get("window"), from, to, first, last]);
  if (now === shownControls) return;
  shownControls = now;
  const focused = controls.contains(document.activeElement) ? document.activeElement.textContent : null;
  const length = to - from;
  const button = (text, label, onclick, disabled) => el("button", { "aria-label": label, onclick, disabled }, text);
  controls.replaceChildren(...[
    runSelect("run", runNames(), run, (name) => set({ run: name, window: "" })),
    el("span", { class: "segmented" },
      button("‹", "Earlier", () => zoom(from - length / 2, to - length / 2), first === null || from <= first),
      button("−", "Zoom out", () => zoom(from - length, to + length), first === null),
      button("+", "Zoom in", () => zoom(from + length / 4, to - length / 4), first === null),
      button("›", "Later", () => zoom(from + length / 2, to + length / 2), first === null || to >= last)),
    el("button", { onclick: () => zoom(first, last), disabled: first === null }, "whole run"),
    get("window") ? el("button", { onclick: reset }, "newest steps") : el("span", { class: "dim hint" }, "the newest steps; drag to zoom, double-click to reset"),
    el("span", { class: "dim" }, `${number(from)} – ${number(to)} s`),
  ].filter(Boolean));
  if (focused) [...controls.querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
}

function showKeys() {
  const swatch = (kind) => {
    const mark = el("i", { class: isWait(kind) ? "swatch waits" : "swatch", "aria-hidden": "true" });
    mark.style.setProperty("--of", kindColor(kind));
    return mark;
  };
  const names = [...new Set(answer.lanes.flatMap((lane) => lane.spans.flatMap((span) => (span.seconds ? Object.keys(span.seconds) : [span.kind]))))].sort();
  kinds.replaceChildren(...names.map((kind) => el("li", {}, swatch(kind), kind.replaceAll("_", " "))));
  const seen = [...new Set(answer.trajectories.map((one) => Math.min(one.lag ?? 0, 4)))].sort();
  const phase = (name) => el("li", {}, el("i", { class: `swatch phase ${name}`, "aria-hidden": "true" }), name);
  lags.replaceChildren(
    ...seen.map((lag) => {
      const mark = el("i", { class: "swatch", "aria-hidden": "true" });
      mark.style.setProperty("--of", lagColor(lag));
      return el("li", {}, mark, lag === 4 ? "lag 4 and more" : `lag ${lag}`);
    }),
    ...["generate", "reward", "queue", "train", ...(answer.trajectories.some((one) => one.sampled === undefined) ? ["elsewhere"] : [])].map(phase));
}

function paintSpan(pen, span, { left, width, top, height }) {
  const parts = span.seconds ? Object.entries(span.seconds) : [[span.kind, span.end - span.start]];
  const length = Math.max(span.end - span.start, parts.reduce((sum, [, seconds]) => sum + seconds, 0), 1e-9);
  let bottom = top + height;
  for (const [kind, seconds] of parts) {
    const share = span.seconds ? Math.max(1, (height * seconds) / length) : height;
    const color = kindColor(kind);
    pen.fillStyle = isWait(kind) ? hatch(pen, color) : color;
    pen.fillRect(left, bottom - share, width, share);
    bottom -= share;
  }
  const name = span.kind.replaceAll("_", " ");
  if (!span.seconds && !isWait(span.kind) && width > pen.measureText(name).width + 8) {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bg");
    pen.textBaseline = "middle";
    pen.fillText(name, Math.max(left, 0) + 4, top + height / 2);
  }
}

const seconds = (value) => (Math.abs(value) < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`);

function describeSpan(span, row) {
  const at = `from second ${number(span.start)}, ${seconds(span.end - span.start)}`;
  if (span.seconds) {
    const parts = Object.entries(span.seconds).map(([kind, sum]) => `${kind.replaceAll("_", " ")} ${seconds(sum)}`);
    return `${row.label}: ${number(span.spans)} spans ${at}: ${parts.join(", ")}`;
  }
  const rest = ["step", "version", "count", "bytes", "note"].filter((key) => span[key] !== undefined).map((key) => `${key} ${typeof span[key] === "number" ? number(span[key]) : span[key]}`);
  return [`${row.label}: ${span.kind.replaceAll("_", " ")} ${at}`, ...rest].join(", ");
}

// The phases of a trajectory that are known: name, start and end.
function phases(one) {
  if (one.sampled === undefined) return [["elsewhere", one.start, one.leased ?? one.end], ...(one.leased === undefined ? [] : [["train", one.leased, one.end]])];
  const scored = one.scored ?? one.sampled;
  const leased = one.leased ?? one.end;
  return [["generate", one.start, one.sampled], ["reward", one.sampled, scored], ["queue", scored, leased], ["train", leased, one.end]];
}

function paintTrajectory(pen, one, { top, height, x }) {
  const color = lagColor(one.lag ?? 0);
  for (const [phase, from, to] of phases(one)) {
    const [left, width] = [x(from), Math.max(1, x(to) - x(from))];
    pen.fillStyle = phase === "reward" ? hatch(pen, color) : color;
    pen.strokeStyle = color;
    if (phase === "queue") pen.fillRect(left, top + height / 2 - 1, width, 2);
    else if (phase === "elsewhere") pen.strokeRect(left, top + 0.5, width, height - 1);
    else if (phase === "train") pen.fillRect(left, top - 1, width, height + 2);
    else pen.fillRect(left, top + 1, width, height - 2);
  }
}

function describeTrajectory(one) {
  const parts = phases(one).map(([phase, from, to]) => `${phase} ${seconds(to - from)}`);
  const more = [one.versions && `versions ${one.versions.join(", ")}`, one.sampler].filter(Boolean);
  return [`group ${one.group}, trajectory ${one.index}, step ${one.step}, lag ${one.lag}: from second ${number(one.start)}`, ...parts, ...more].join(", ");
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawn = "";
  show();
});

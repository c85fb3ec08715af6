// Events of a run and the remarks of its steps, newest first.

import { api, currentRun, runNames, set } from "./state.js";
import { el, runSelect } from "./dom.js";

const root = document.getElementById("events");
const controls = el("div", { class: "controls" });
const events = el("tbody");
const remarks = el("tbody");
const status = el("p", { class: "dim", role: "status" });
root.append(controls, status, el("div", { class: "two" },
  el("section", { "aria-label": "Events" }, el("h2", {}, "Events"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "event"), el("th", { scope: "col" }, "fields"))), events))),
  el("section", { "aria-label": "Remarks" }, el("h2", {}, "Remarks of steps"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "value" }, "step"), el("th", { scope: "col" }, "remark"))), remarks)))));

let answer = { events: [], remarks: [], left_out: 0 };
let run;

export async function load() {
  run = currentRun();
  if (run) answer = await api("history", { run });
}

const fields = (event) => {
  const { event: name, fields: inner, ...rest } = event;
  const all = inner && typeof inner === "object" && !Array.isArray(inner) ? { ...inner, ...rest } : { ...(inner === undefined ? {} : { fields: inner }), ...rest };
  return Object.entries(all).map(([key, value]) => el("span", { class: "field" }, el("span", { class: "dim" }, `${key} `), typeof value === "string" ? value : JSON.stringify(value)));
};

let drawn = "";
export function show() {
  const now = JSON.stringify([run, runNames(), answer]);
  // A control keeps its focus while the run goes on.
  if (now === drawn) return;
  drawn = now;
  controls.replaceChildren(...[runSelect("run", runNames(), run, (name) => set({ run: name }))].filter(Boolean));
  status.textContent = answer.left_out > 0 ? `${answer.left_out} older entries are in the files` : "";
  status.hidden = answer.left_out === 0;
  events.replaceChildren(...answer.events.slice().reverse().map((event) => el("tr", {}, el("th", { scope: "row" }, event.event), el("td", {}, fields(event)))));
  remarks.replaceChildren(...answer.remarks.slice().reverse().map((remark) => el("tr", {}, el("th", { scope: "row", class: "value" }, String(remark.step)), el("td", {}, remark.text))));
  if (answer.remarks.length === 0) remarks.append(el("tr", {}, el("td", { colspan: 2, class: "dim" }, "No step has a remark.")));
  if (answer.events.length === 0) events.append(el("tr", {}, el("td", { colspan: 2, class: "dim" }, "No event yet.")));
}

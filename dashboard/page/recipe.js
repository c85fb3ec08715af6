// Every value of a recipe with its origin, and the difference between two runs.

import { api, currentRun, get, runNames, set } from "./state.js";
import { el, runSelect } from "./dom.js";

const root = document.getElementById("recipe");
const controls = el("div", { class: "controls" });
const table = el("table", { class: "values" });
const status = el("p", { class: "dim", role: "status" });
const filter = el("input", { type: "search", placeholder: "filter", "aria-label": "Filter keys and values", oninput: () => draw() });
root.append(controls, status, el("div", { class: "scroll" }, table));

let rows = [];
let run;
let against;

export async function load() {
  run = currentRun();
  against = runNames().includes(get("against")) && get("against") !== run ? get("against") : "";
  rows = [];
  if (run) rows = await api("recipe", { run, against });
}

let drawn = "";
export function show() {
  const now = JSON.stringify([run, against, runNames(), rows, get("differences"), get("given")]);
  // A control keeps its focus while the run goes on.
  if (now === drawn) return;
  drawn = now;
  const box = (key, label) => {
    const input = el("input", { type: "checkbox", checked: get(key) === "1", onchange: () => set({ [key]: input.checked ? "1" : "" }) });
    return el("label", {}, input, ` ${label}`);
  };
  const others = runNames().filter((name) => name !== run);
  const focused = document.activeElement === filter;
  controls.replaceChildren(...[
    runSelect("run", runNames(), run, (name) => set({ run: name })),
    others.length > 0 && runSelect("compare with", others, against, (name) => set({ against: name }), "no other run"),
    filter,
    against ? box("differences", "only differences") : box("given", "without defaults"),
  ].filter(Boolean));
  if (focused) filter.focus();
  draw();
}

function draw() {
  const wanted = filter.value.toLowerCase();
  const contains = (row) => `${row.key} ${row.value} ${row.origin} ${row.other ?? ""}`.toLowerCase().includes(wanted);
  const shown = rows.filter(contains)
    .filter((row) => !against || get("differences") !== "1" || row.differs)
    .filter((row) => against || get("given") !== "1" || row.origin !== "default");
  const differing = rows.filter((row) => row.differs).length;
  status.textContent = against ? `${differing} of ${rows.length} values differ` : `${shown.length} of ${rows.length} values`;
  const heads = against ? ["key", run, "origin", against, "origin"] : ["key", "value", "origin"];
  const cells = (row) => [row.value ?? "–", row.origin ?? "", ...(against ? [row.other ?? "–", row.other_origin ?? ""] : [])];
  let section = "";
  const body = shown.flatMap((row) => {
    const at = row.key.lastIndexOf(".");
    const of = at < 0 ? "" : row.key.slice(0, at);
    const line = el("tr", { class: [row.differs && "differs", row.origin === "default" && "default"].filter(Boolean).join(" ") || null, "data-key": row.key },
      el("th", { scope: "row" }, row.key.slice(at + 1)),
      cells(row).map((cell, index) => el("td", { class: index % 2 === 0 ? "mono" : "dim" }, cell)));
    if (of === section) return [line];
    section = of;
    return [el("tr", { class: "section" }, el("th", { colspan: heads.length, scope: "rowgroup" }, of)), line];
  });
  table.replaceChildren(el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, body));
}

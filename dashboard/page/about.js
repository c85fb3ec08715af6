// The environment of a run, as its directory has it, and where its time went.

import { api, currentRun, runNames, set } from "./state.js";
import { el, number, runSelect } from "./dom.js";

const root = document.getElementById("about");

let run;
let answer = null;
export async function load() {
  run = currentRun();
  answer = run ? await api("about", { run }) : null;
}

let drawn = "";
export function show() {
  const now = JSON.stringify([run, runNames(), answer]);
  if (!answer || now === drawn) return;
  drawn = now;
  const value = (of) => (typeof of === "string" ? of : JSON.stringify(of));
  const percent = (share) => (share === null ? "–" : `${number(Math.round(1000 * share) / 10)} %`);
  const facts = [...Object.entries(answer.facts), ["page", answer.page]];
  root.replaceChildren(...[
    el("div", { class: "controls" }, runSelect("run", runNames(), run, (name) => set({ run: name }))),
    el("div", { class: "two" },
      el("section", { "aria-label": "Environment" }, el("h2", {}, "Environment"),
        el("table", { class: "metrics" }, el("tbody", {}, facts.map(([name, of]) => el("tr", { "data-fact": name }, el("th", { scope: "row" }, name), el("td", { class: "mono" }, value(of)))))),
        answer.attempts.map((attempt) => [el("h2", {}, attempt.name), el("pre", {}, attempt.lines.join("\n"))]).flat()),
      el("section", { "aria-label": "Timings" }, el("h2", {}, "Timings, s"),
        answer.timings.length === 0 && el("p", { class: "dim" }, "No step has timings yet."),
        el("div", { class: "scroll" }, el("table", { class: "metrics", hidden: answer.timings.length === 0 },
          el("thead", {}, el("tr", {}, ["part", "total", "mean of a step", "longest", "share of the steps"].map((head, index) => el("th", { scope: "col", class: index > 0 ? "value" : null }, head)))),
          el("tbody", {}, answer.timings.map((timing) => el("tr", { "data-timing": timing.name }, el("th", { scope: "row" }, timing.name.slice(5).replaceAll("_", " ")),
            [number(timing.total_s), number(timing.mean_s), number(timing.max_s), percent(timing.share)].map((cell) => el("td", { class: "value" }, cell)))))))))].filter(Boolean));
}

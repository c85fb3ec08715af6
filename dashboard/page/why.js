// Where the time of a run went: causes on the critical path, the longest waits by name, stalls and recommendations. The same as `rlrun why`.

import { el, number } from "./dom.js";

const percent = (share) => `${number(Math.round(1000 * share) / 10)} %`;
const named = (of) => (of.name === "" ? of.cause : `${of.cause} \`${of.name}\``);

const causes = el("table", { class: "metrics", "aria-label": "Causes" });
const stragglers = el("ul", { class: "stalls", "aria-label": "Longest waits by name" });
const stalls = el("ul", { class: "stalls", "aria-label": "Stalls" });
const changes = el("ul", { class: "stalls", "aria-label": "Recommendations" });
const summary = el("summary", {}, "Where the time went");
export const whyPanel = el("details", { class: "why", open: true }, summary, el("div", { class: "scroll" }, causes),
  el("h3", {}, "Longest waits by name"), stragglers, el("h3", {}, "Stalls, beyond what is usual in this run"), stalls,
  el("h3", {}, "Recommendations"), changes);

function stall(of) {
  if (of.lasting) return `the others waited ${number(of.excess_s)} s for it, in ${of.steps.length} steps`;
  const shown = of.steps.slice(0, 8).join(", ");
  return `${number(of.excess_s)} s beyond its median of ${number(of.median_s)} s, in step ${shown}${of.steps.length > 8 ? ", ..." : ""}`;
}

function change({ key, from, to, gain, why }) {
  const predicted = gain && `${percent(gain.p50)} more tokens per second predicted (${percent(gain.p10)} to ${percent(gain.p90)} over seeds), `;
  return el("li", {}, el("b", {}, `${key}: ${from} → ${to}: `), predicted, why);
}

export function showWhy(answer) {
  whyPanel.hidden = !answer || answer.steps === 0;
  if (whyPanel.hidden) return;
  const read = answer.read < 1 ? `, ${Math.floor(100 * answer.read)} % of the file are read so far` : "";
  summary.textContent = `Where the time went: ${answer.steps} steps in ${number(answer.wall_s)} s, the median step ${number(answer.median_step_s)} s${read}`;
  causes.replaceChildren(
    el("thead", {}, el("tr", {}, ["critical path", "share", "seconds", "steps"].map((head, index) => el("th", { scope: "col", class: index > 0 ? "value" : null }, head)))),
    el("tbody", {}, answer.causes.filter((of) => of.share >= 0.005).map((of) => el("tr", { "data-cause": of.cause, "data-name": of.name }, el("th", { scope: "row" }, named(of)),
      [percent(of.share), number(of.seconds), number(of.steps)].map((text) => el("td", { class: "value" }, text))))));
  const none = (text) => [el("li", { class: "dim" }, text)];
  stragglers.replaceChildren(...(answer.stragglers.length > 0 ? answer.stragglers.map((of) => el("li", {}, `${named(of)}: ${number(of.seconds)} s, ${percent(of.share)}`)) : none("none")));
  stalls.replaceChildren(...(answer.stalls.length > 0 ? answer.stalls.map((of) => el("li", {}, el("b", {}, `${named(of)}: `), stall(of))) : none("none")));
  const { changes: recommended, notes } = answer.recommendations ?? { changes: [], notes: ["recommendations are those of `rlrun why`"] };
  changes.replaceChildren(...recommended.map(change), ...notes.map((note) => el("li", { class: "dim" }, note)),
    ...(recommended.length + notes.length > 0 ? [] : none("no change of a key is predicted to gain more than noise")));
}

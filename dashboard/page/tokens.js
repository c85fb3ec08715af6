// The tokens of one trajectory, coloured by one of their numbers, with all their numbers as text and a small curve.

import { api, get, set } from "./state.js";
import { el, number, tick } from "./dom.js";

const MOST_AT_FIRST = 2000;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const finite = (value) => typeof value === "number" && Number.isFinite(value);

const difference = (token) => (finite(token.trainer) && finite(token.behavior) ? token.trainer - token.behavior : null);
// Name in the URL: label, value of a token, and whether zero (or one) divides the colours.
const COLUMNS = {
  behavior: ["log-probability of the sampler", (token) => token.behavior, false],
  trainer: ["log-probability of the trainer", (token) => token.trainer, false],
  ratio: ["importance ratio", (token) => (difference(token) === null ? null : Math.exp(difference(token))), true],
  difference: ["difference trainer − sampler", difference, true],
  advantage: ["advantage", (token) => token.advantage, true],
  version: ["version", (token) => token.version, false],
};

// One object per token of a row.
function tokensOf(row) {
  const texts = Array.isArray(row.texts) ? row.texts : [];
  const versions = [];
  for (const { version, len } of Array.isArray(row.versions) ? row.versions : []) {
    for (let count = 0; count < len && versions.length < texts.length; count += 1) versions.push(version);
  }
  return texts.map((text, at) => ({
    at, text: String(text), id: row.token_ids?.[at], trained: row.loss_mask?.[at] === 1, behavior: row.behavior_logprobs?.[at] ?? null,
    trainer: row.trainer_logprobs?.[at] ?? null, advantage: row.advantages?.[at] ?? null, version: versions[at] ?? null,
  }));
}

// What a colour means: a function from a token to a background, and the legend.
function colors(tokens, name) {
  const [, value, divides] = COLUMNS[name];
  const values = tokens.map(value).filter(finite);
  const mix = (color, share) => `color-mix(in srgb, var(${color}) ${Math.round(65 * Math.min(1, share))}%, transparent)`;
  if (name === "version") {
    const all = [...new Set(values)].sort((a, b) => a - b);
    const of = (version) => mix(`--series-${(all.indexOf(version) % 8) + 1}`, 0.6);
    return { of: (token) => (finite(token.version) ? of(token.version) : ""), legend: all.map((version) => [of(version), `version ${version}`]) };
  }
  if (divides) {
    const centre = name === "ratio" ? 1 : 0;
    const most = Math.max(1e-12, ...values.map((one) => Math.abs(one - centre)));
    const of = (one) => mix(one < centre ? "--series-2" : "--series-1", Math.abs(one - centre) / most);
    return { of: (token) => (finite(value(token)) ? of(value(token)) : ""), legend: [[of(centre - most), number(centre - most)], ["", number(centre)], [of(centre + most), number(centre + most)]] };
  }
  const least = Math.min(0, ...values);
  const of = (one) => mix("--series-2", least === 0 ? 0 : one / least);
  return { of: (token) => (finite(value(token)) ? of(value(token)) : ""), legend: [[of(least), number(least)], ["", "0"]] };
}

function describe(token) {
  const numbers = Object.entries(COLUMNS).map(([, [label, value]]) => [label, value(token)]).filter(([, value]) => value !== null);
  return [`token ${token.at} ${JSON.stringify(token.text)}${token.id === undefined ? "" : `, id ${token.id}`}`, token.trained ? null : "not trained on", ...numbers.map(([label, value]) => `${label} ${number(value)}`)].filter(Boolean).join(", ");
}

function curve(tokens, name, activate) {
  const [label, value] = COLUMNS[name];
  const plot = el("div", { class: "curve", role: "img", "aria-label": `${label} against position` });
  const data = [tokens.map((token) => token.at), tokens.map((token) => value(token))];
  const axis = { stroke: css("--dim"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", values: (u, ticks) => ticks.map(tick) };
  const options = {
    width: 300, height: 110, padding: [6, 8, 0, 0], legend: { show: false }, scales: { x: { time: false } }, cursor: { drag: { x: false, y: false } },
    axes: [{ ...axis, size: 22, gap: 3, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000] }, { ...axis, size: 46, gap: 3, space: 24 }],
    series: [{}, { stroke: css("--series-1"), width: 1.2, points: { show: tokens.length < 60, size: 4 } }],
    hooks: { setCursor: [(u) => { if (u.cursor.left >= 0 && u.cursor.idx !== null) activate(u.cursor.idx); }] },
  };
  // The width is known once the element is on the page.
  new ResizeObserver((_, observer) => {
    if (!plot.clientWidth) return;
    if (!plot.firstChild) plot.chart = new uPlot(options, data, plot);
    plot.chart.setSize({ width: plot.clientWidth, height: 110 });
    if (!plot.isConnected) observer.disconnect();
  }).observe(plot);
  return plot;
}

function row(of, several) {
  const tokens = tokensOf(of);
  const name = COLUMNS[get("column")] ? get("column") : "behavior";
  const { of: color, legend } = colors(tokens, name);
  const values = el("output", { class: "details", "aria-live": "polite" }, "Point at a token, or select one with the arrow keys.");
  const list = el("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": `Tokens of branch ${of.branch ?? 0}` });
  const id = `token-${of.group}-${of.index}-${of.branch ?? 0}-`;
  let active = null;
  const activate = (at) => {
    active?.classList.remove("active");
    active?.setAttribute("aria-selected", "false");
    active = list.children[at] ?? null;
    if (!active || !tokens[at]) return;
    active.classList.add("active");
    active.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", active.id);
    values.textContent = describe(tokens[at]);
  };
  const draw = (most) => list.replaceChildren(...tokens.slice(0, most).map((token) => {
    // A line break is drawn as one, with a sign for it.
    const part = el("span", { role: "option", id: id + token.at, "aria-selected": "false", class: token.trained ? null : "masked", "data-at": token.at }, token.text.replaceAll("\n", "⏎\n") || "∅");
    part.style.background = color(token);
    return part;
  }));
  draw(MOST_AT_FIRST);
  list.addEventListener("pointerover", (event) => { if (event.target.dataset.at) activate(Number(event.target.dataset.at)); });
  list.addEventListener("keydown", (event) => {
    const at = active ? Number(active.dataset.at) : -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: list.children.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    activate(Math.max(0, Math.min(list.children.length - 1, to)));
    active?.scrollIntoView({ block: "nearest" });
  });
  const more = tokens.length > MOST_AT_FIRST && el("button", { onclick: () => { draw(tokens.length); more.remove(); } }, `all ${number(tokens.length)} tokens`);
  const swatches = legend.map(([background, text]) => {
    const mark = el("i", { class: "swatch", "aria-hidden": "true" });
    mark.style.background = background || "transparent";
    return el("li", {}, mark, text);
  });
  return el("section", { class: "row", "aria-label": `Branch ${of.branch ?? 0}` },
    el("p", { class: "dim" }, [several && `branch ${of.branch ?? 0}`, `${number(tokens.length)}${of.tokens > tokens.length ? ` of ${number(of.tokens)}` : ""} tokens, ${number(tokens.filter((token) => token.trained).length)} trained on`].filter(Boolean).join(": ")),
    el("ul", { class: "keys" }, swatches, el("li", { class: "masked" }, "dimmed: not trained on")),
    list, more, values, curve(tokens, name, activate));
}

// The panel of a trajectory; `close` is called when it is to go.
export async function tokenPanel({ run, step, group, index }, close) {
  const answer = await api("tokens", { run, step, group, index });
  const panel = el("section", { class: "token-panel", "aria-label": `Tokens of trajectory ${Number(index) + 1}` });
  const draw = () => {
    const name = COLUMNS[get("column")] ? get("column") : "behavior";
    const picker = el("select", { onchange: () => { set({ column: picker.value }); draw(); panel.querySelector("select").focus(); } }, Object.entries(COLUMNS).map(([value, [label]]) => el("option", { value, selected: value === name }, label)));
    const missing = answer.rows.length === 0 && el("p", { class: "dim" }, answer.complete ? "This trajectory has no tokens in the file." : "The file is too long to be searched to its end.");
    panel.replaceChildren(
      el("div", { class: "controls" }, el("b", {}, `tokens of group ${group}, trajectory ${Number(index) + 1}`), el("label", {}, "colour ", picker), el("button", { onclick: close }, "close")),
      ...[missing].filter(Boolean), ...answer.rows.map((one) => row(one, answer.rows.length > 1)),
      ...(answer.left_out > 0 ? [el("p", { class: "dim" }, `${answer.left_out} more branches are in the file`)] : []));
  };
  draw();
  return panel;
}

// Sampled groups: all trajectories of a group side by side. Texts of the model are text nodes, never markup.

import { api, currentRun, get, page, runNames, set } from "./state.js";
import { debounce, el, number, runSelect } from "./dom.js";
import { showPairs } from "./compare.js";
import { tokenPanel } from "./tokens.js";

const root = document.getElementById("samples");
const controls = el("div", { class: "controls" });
const found = el("section", { "aria-label": "Search results" });
const groups = el("div", {});
const status = el("p", { class: "dim", role: "status" });
root.append(controls, found, status, groups);

let run;
let steps = [];
let searched = "";
// What is drawn: a reader keeps the place while other steps are written.
let drawn = "";

// The step of the URL, or the newest one.
const step = () => {
  const asked = Number(get("step"));
  return get("step") !== "" && steps.includes(asked) ? asked : steps.at(-1);
};

export async function load() {
  run = currentRun();
  steps = run ? await api("steps", { run }) : [];
}

export async function show() {
  showControls();
  if (steps.length === 0) {
    status.textContent = "This run has written no samples; `log.samples` says how many groups of a step are written.";
    groups.replaceChildren();
    drawn = "";
    return;
  }
  await showSearch();
  if (other() === null) {
    await showPage(0);
    await showTokens();
    return;
  }
  const now = JSON.stringify([run, step(), other()]);
  if (now === drawn) return;
  drawn = now;
  await showPairs({ run, step: step(), other: other() }, groups, status);
}

// The step whose groups of the same tasks are shown beside those of this step.
const other = () => (steps.includes(Number(get("other"))) && get("other") !== "" && Number(get("other")) !== step() ? Number(get("other")) : null);

// What groups are asked for beside their step.
const filters = () => ({ text: get("text"), reward_from: get("from"), reward_to: get("to"), stop: get("stop"), differing: get("differing") === "1" ? "true" : "" });

// Reasons to stop of the step, and steps that share tasks with it, as far as they were asked for.
let stops = [];
let shared = null;

let shownControls = "";
function showControls() {
  const now = JSON.stringify([run, runNames(), steps.length, steps.at(-1), step(), stops, shared, other(), get("stop"), get("differing")]);
  if (now === shownControls) return;
  shownControls = now;
  const position = steps.indexOf(step());
  const go = (at) => set({ step: steps[at] }, { replace: false });
  const picker = el("select", { "aria-label": "Step", onchange: () => set({ step: picker.value }, { replace: false }) },
    steps.slice().reverse().map((of) => el("option", { value: of, selected: of === step() }, `step ${of}`)));
  const text = el("input", { type: "search", placeholder: "text in this step", "aria-label": "Filter groups of this step", value: get("text"), oninput: debounce(() => set({ text: text.value }), 250) });
  const all = el("input", { type: "search", placeholder: "text in any step", "aria-label": "Search all steps", value: get("search") });
  controls.replaceChildren(
    ...[runSelect("run", runNames(), run, (name) => set({ run: name, step: "" }))].filter(Boolean),
    el("span", { class: "segmented" },
      el("button", { "aria-label": "Previous step", disabled: position <= 0, onclick: () => go(position - 1) }, "‹"),
      picker,
      el("button", { "aria-label": "Next step", disabled: position >= steps.length - 1, onclick: () => go(position + 1) }, "›")),
    ...(other() === null ? [text, ...filterControls()] : []),
    compareControl(),
    el("form", { role: "search", onsubmit: (event) => { event.preventDefault(); set({ search: all.value }); } }, all, " ", el("button", {}, "search")));
}

function filterControls() {
  const bound = (key, label) => {
    const input = el("input", { type: "number", step: "any", placeholder: label, "aria-label": `Reward ${label === "≥" ? "at least" : "at most"}`, value: get(key), oninput: debounce(() => set({ [key]: input.value }), 250) });
    return input;
  };
  const stop = el("select", { "aria-label": "Stop reason", onchange: () => set({ stop: stop.value }) },
    [["", "any stop reason"], ...[...new Set([...stops, get("stop")])].filter(Boolean).map((name) => [name, name])].map(([value, name]) => el("option", { value, selected: value === get("stop") }, name)));
  const differing = el("input", { type: "checkbox", checked: get("differing") === "1", onchange: () => set({ differing: differing.checked ? "1" : "" }) });
  return [el("label", {}, "reward ", bound("from", "≥"), bound("to", "≤")), stop, el("label", {}, differing, " only different rewards")];
}

// A button that looks for steps with the same tasks, and then a choice among them.
function compareControl() {
  if (other() === null && shared?.of !== `${run} ${step()}`) {
    return el("button", { onclick: async () => { shared = { of: `${run} ${step()}`, steps: (await api("shared", { run, step: step() })).steps }; showControls(); controls.querySelector(".compare")?.focus(); } }, "same tasks at other steps");
  }
  const known = shared?.of === `${run} ${step()}` ? shared.steps : [];
  if (other() === null && known.length === 0) return el("span", { class: "dim compare", tabindex: "-1" }, "no other step has these tasks");
  const options = [["", other() === null ? "compare with …" : "no comparison"], ...known.map((one) => [one.step, `step ${one.step} (${one.tasks === 1 ? "1 task" : `${one.tasks} tasks`})`])];
  if (other() !== null && !known.some((one) => one.step === other())) options.push([other(), `step ${other()}`]);
  const picker = el("select", { class: "compare", "aria-label": "Compare with the same tasks at step", onchange: () => set({ other: picker.value }, { replace: false }) },
    options.map(([value, name]) => el("option", { value, selected: String(value) === String(other() ?? "") }, name)));
  return picker;
}

// The tokens of the trajectory that the URL names, below its group.
let tokensOf = "";
let panel = null;
async function showTokens() {
  const [of, index] = get("tokens").split(".");
  const now = JSON.stringify([run, step(), of, index]);
  if (now === tokensOf && (panel === null || panel.isConnected)) return;
  tokensOf = now;
  panel?.remove();
  panel = null;
  const article = index === undefined ? null : [...groups.children].find((one) => one.dataset.group === of);
  if (!article) return;
  const made = await tokenPanel({ run, step: step(), group: of, index }, () => set({ tokens: "" }));
  if (now !== tokensOf || !article.isConnected) return;
  panel = made;
  article.append(panel);
}

async function showSearch() {
  const wanted = get("search");
  const now = JSON.stringify([run, wanted]);
  if (now === searched) return;
  searched = now;
  found.replaceChildren();
  if (wanted) await more(wanted);
}

async function more(text, before) {
  const answer = await api("search", { run, text, before });
  const list = el("ul", { class: "hits" }, answer.hits.map((hit) => el("li", {},
    el("button", { class: "plain", onclick: () => set({ step: hit.step, text }, { replace: false }) }, `step ${hit.step}, group ${hit.group}`),
    " ", el("span", { class: "mono" }, hit.excerpt))));
  found.append(list);
  if (answer.hits.length === 0 && answer.next === null) found.append(el("p", { class: "dim" }, `No text contains “${text}”${before ? " in older steps" : ""}.`));
  if (answer.next !== null) {
    const next = el("button", { onclick: () => { next.remove(); more(text, answer.next); } }, "search older steps");
    found.append(next);
  }
}

async function showPage(offset) {
  const asked = { run, step: step(), offset, ...filters() };
  const answer = await api("samples", asked);
  if (JSON.stringify(asked) !== JSON.stringify({ run, step: step(), offset, ...filters() })) return;
  stops = answer.stops ?? [];
  showControls();
  if (offset === 0) {
    const now = JSON.stringify([asked, answer]);
    if (now === drawn) return;
    drawn = now;
  }
  const seen = offset + answer.groups.length;
  const skipped = answer.skipped_lines > 0 ? `; ${answer.skipped_lines} lines are incomplete or too long` : "";
  status.textContent = `step ${answer.step}: ${seen} of ${answer.matching} groups${Object.values(filters()).some(Boolean) ? " that match" : ""}${skipped}`;
  const cards = answer.groups.map(group);
  if (answer.next !== null) {
    const next = el("button", { onclick: async () => { next.remove(); await showPage(answer.next); } }, "more groups");
    cards.push(next);
  }
  if (offset === 0) groups.replaceChildren(...cards);
  else groups.append(...cards);
}

function group(of) {
  const trajectories = of.trajectories ?? [];
  const rewards = trajectories.filter((one) => !one.baseline).map((one) => one.reward).filter((reward) => typeof reward === "number");
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  const names = [...new Set(trajectories.flatMap((one) => (one.components ?? []).map((component) => component.name)))];
  return el("article", { class: "group", "aria-label": `Group ${of.group}`, "data-group": of.group },
    el("header", {},
      el("h2", {}, `group ${of.group}`),
      el("span", { class: "dim" }, `task ${of.task}`),
      el("span", {}, `reward ${number(mean)} ± ${number(spread)}`),
      spread === 0 && el("span", { class: "badge warn" }, "equal rewards"),
      of.answer !== null && of.answer !== undefined && el("span", {}, "answer ", el("code", {}, typeof of.answer === "string" ? of.answer : JSON.stringify(of.answer)))),
    of.prompt && el("pre", { class: "prompt", "aria-label": "Prompt", tabindex: "0" }, of.prompt),
    el("div", { class: "side", tabindex: "0", role: "group", "aria-label": "Trajectories" }, trajectories.map((one, index) => trajectory(one, index, mean, names, of.group))));
}

function trajectory(of, index, mean, names, group) {
  const difference = typeof of.reward === "number" ? of.reward - mean : null;
  const sign = difference === null ? "" : difference > 1e-9 ? "up" : difference < -1e-9 ? "down" : "";
  const versions = (of.versions ?? []).map((span) => span.version);
  const facts = [
    ["reward", number(of.reward)],
    ["− mean of the group", difference === null ? "–" : `${difference > 0 ? "+" : ""}${number(difference)}`, sign],
    ...names.map((name) => {
      const component = (of.components ?? []).find((one) => one.name === name);
      return [name, component?.error ? "failed" : number(component?.value), component?.error ? "down" : "", component?.error ?? undefined];
    }).filter(([name, value]) => names.length > 1 || name !== "environment" || value !== "–"),
    typeof of.advantage === "number" && ["advantage", `${of.advantage > 0 ? "+" : ""}${number(of.advantage)}`],
    ["tokens", number(of.tokens)],
    ["stop", of.stop ?? "–"],
    ["version", versions.length > 1 ? `${Math.min(...versions)}–${Math.max(...versions)}` : versions[0] ?? "–"],
    of.role && ["role", of.role],
    of.turns && ["turns", of.turns.length],
    of.branches && ["branches", of.branches.length],
    of.baseline && ["baseline", "yes"],
  ].filter(Boolean);
  const details = (of.components ?? []).filter((component) => component.details || component.error);
  return el("section", { class: `trajectory ${sign}`, "aria-label": `Trajectory ${index + 1}` },
    el("dl", {}, facts.map(([name, value, mark, title]) => el("div", { title }, el("dt", {}, name), el("dd", { class: mark }, String(value))))),
    text(of),
    el("button", { class: "small", "aria-label": `Tokens of trajectory ${index + 1} of group ${group}`, onclick: () => set({ tokens: `${group}.${of.index ?? index}` }) }, "tokens"),
    details.length > 0 && el("details", {}, el("summary", {}, "reward details"),
      details.map((component) => el("pre", {}, `${component.name}: ${component.error ?? JSON.stringify(component.details, null, 1)}`))));
}

// A completion; an episode of several turns as a conversation. Its file has messages as `[role] text` on lines of their own.
function text(of) {
  const completion = of.completion ?? "";
  if (!of.turns || of.turns.length < 2) return el("pre", { class: "completion" }, completion);
  const parts = completion.split(/\n\[([\w -]{1,24})\] /);
  let turn = 0;
  const says = (content) => {
    const played = of.turns[turn];
    turn += 1;
    const reward = typeof played?.reward === "number" ? `reward ${number(played.reward)}` : "";
    return el("div", { class: "message policy" }, el("span", { class: "who" }, "policy ", el("i", {}, [played && `${played.tokens} tokens`, reward].filter(Boolean).join(", "))), el("pre", {}, content));
  };
  const messages = [says(parts[0])];
  for (let index = 1; index < parts.length; index += 2) {
    const lines = parts[index + 1].split("\n");
    // Of a message with several lines the file does not say where the reply begins.
    const clear = lines.length <= 2;
    const message = clear ? lines[0] : parts[index + 1];
    messages.push(el("div", { class: "message" }, el("span", { class: "who" }, clear ? parts[index] : `${parts[index]}, then policy`), el("pre", {}, message)));
    if (!clear) turn += 1;
    else if (lines[1]) messages.push(says(lines[1]));
  }
  return el("div", { class: "conversation" }, messages);
}

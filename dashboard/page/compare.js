// Groups of the same task at two steps, side by side, with the words that differ.

import { api } from "./state.js";
import { el, number } from "./dom.js";

// Most pairs of words that one comparison looks at; beyond it texts are shown without marks.
const MOST = 250000;

// Words, spaces and signs of `a` and `b` as [kind, text]: " " for both, "-" for a alone, "+" for b alone; null if it is too long.
export function wordDiff(a, b) {
  const split = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
  const [left, right] = [split(a), split(b)];
  let start = 0;
  while (start < left.length && start < right.length && left[start] === right[start]) start += 1;
  let end = 0;
  while (end < left.length - start && end < right.length - start && left[left.length - 1 - end] === right[right.length - 1 - end]) end += 1;
  const [ours, theirs] = [left.slice(start, left.length - end), right.slice(start, right.length - end)];
  if (ours.length * theirs.length > MOST) return null;
  // Longest common subsequence, from the end, so that it is read from the start.
  const width = theirs.length + 1;
  const table = new Uint32Array((ours.length + 1) * width);
  for (let i = ours.length - 1; i >= 0; i -= 1) {
    for (let j = theirs.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = ours[i] === theirs[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const out = [];
  const push = (kind, text) => {
    if (text === "") return;
    if (out.at(-1)?.[0] === kind) out.at(-1)[1] += text;
    else out.push([kind, text]);
  };
  push(" ", left.slice(0, start).join(""));
  let [i, j] = [0, 0];
  while (i < ours.length || j < theirs.length) {
    if (i < ours.length && j < theirs.length && ours[i] === theirs[j]) {
      push(" ", ours[i]);
      i += 1;
      j += 1;
    } else if (j >= theirs.length || (i < ours.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) {
      push("-", ours[i]);
      i += 1;
    } else {
      push("+", theirs[j]);
      j += 1;
    }
  }
  push(" ", left.slice(left.length - end).join(""));
  return out;
}

function side(of, step, parts, mark) {
  if (!of) return el("div", { class: "dim" }, "–");
  const shown = parts ? parts.filter(([kind]) => kind !== (mark === "ins" ? "-" : "+")).map(([kind, text]) => (kind === " " ? text : el(mark, {}, text))) : [of.completion ?? ""];
  return el("div", { class: "trajectory" },
    el("p", { class: "dim" }, `step ${step}: reward ${number(of.reward)}, ${number(of.tokens)} tokens, ${of.stop ?? "no stop reason"}`),
    el("pre", { class: "completion" }, shown));
}

function pair({ left, right }, step, other) {
  const [ours, theirs] = [left.trajectories ?? [], right.trajectories ?? []];
  const rows = Array.from({ length: Math.max(ours.length, theirs.length) }, (_, at) => {
    // The earlier text is compared with the later one.
    const [a, b] = [theirs[at]?.completion ?? "", ours[at]?.completion ?? ""];
    const later = step > other;
    const parts = ours[at] && theirs[at] ? (later ? wordDiff(a, b) : wordDiff(b, a)) : null;
    const [first, second] = later ? [[theirs[at], other], [ours[at], step]] : [[ours[at], step], [theirs[at], other]];
    return el("div", { class: "pair" }, side(...first, parts, "del"), side(...second, parts, "ins"));
  });
  return el("article", { class: "group", "aria-label": `Task ${left.task}` },
    el("header", {}, el("h2", {}, `task ${left.task}`), el("span", { class: "dim" }, `groups ${right.group} and ${left.group}`)),
    left.prompt && el("pre", { class: "prompt", "aria-label": "Prompt", tabindex: "0" }, left.prompt), rows);
}

// Draws the pairs of two steps into `groups`, and says in `status` how many there are.
export async function showPairs({ run, step, other, offset = 0 }, groups, status) {
  const answer = await api("compare", { run, step, other, offset });
  const seen = offset + answer.pairs.length;
  status.textContent = `steps ${Math.min(step, other)} and ${Math.max(step, other)}: ${seen} of ${answer.matching} shared tasks`;
  const cards = answer.pairs.map((of) => pair(of, step, other));
  if (answer.next !== null) {
    const next = el("button", { onclick: () => { next.remove(); showPairs({ run, step, other, offset: answer.next }, groups, status); } }, "more tasks");
    cards.push(next);
  }
  if (offset === 0) groups.replaceChildren(...cards);
  else groups.append(...cards);
}

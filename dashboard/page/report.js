// A report is this page as one file: the answers of the API are in it, and are picked from there.

const element = document.getElementById("report");
// What the file has; null on the live page.
export const report = element && JSON.parse(element.textContent);

// The points of curves between two values of x, with a neighbour on either side.
function part({ x, y }, from, to) {
  if (from === undefined || to === undefined) return { x, y };
  const start = Math.max(0, x.findIndex((at) => at >= from) - 1);
  const last = x.findLastIndex((at) => at <= to);
  return { x: x.slice(start, last + 2), y: y.slice(start, last + 2) };
}

function curves({ keys, run, x = "step", from, to }) {
  const runs = Object.entries(report.curves[x] ?? report.curves.step).filter(([name]) => run === undefined || name === run);
  return Object.fromEntries(runs.map(([name, all]) => [name, Object.fromEntries(Object.entries(all).filter(([key]) => !keys || keys.includes(key)).map(([key, curve]) => [key, part(curve, from, to)]))]));
}

const groupsOf = (run, step) => run.samples[step]?.groups ?? [];
const textsOf = (group) => [[null, group.prompt], ...(group.trajectories ?? []).map((one, index) => [index, one.completion])].filter(([, text]) => typeof text === "string");

function samples(run, { step, text = "", reward_from: from, reward_to: to, stop, differing }) {
  const page = run.samples[step];
  if (!page) throw new Error(`step ${step} has no samples in this report`);
  const fits = (one) => (!stop || one.stop === stop) && (!from || one.reward >= Number(from)) && (!to || one.reward <= Number(to));
  const rewards = (group) => new Set((group.trajectories ?? []).filter((one) => !one.baseline).map((one) => one.reward));
  const groups = page.groups.filter((group) => (!text || textsOf(group).some(([, of]) => of.toLowerCase().includes(text.toLowerCase())))
    && (differing !== "true" || rewards(group).size > 1) && ((!stop && !from && !to) || (group.trajectories ?? []).some(fits)));
  return { ...page, groups, matching: groups.length, next: null };
}

function search(run, text) {
  const wanted = text.toLowerCase();
  const hits = run.steps.slice().reverse().flatMap((step) => groupsOf(run, step).flatMap((group) => textsOf(group).flatMap(([trajectory, of]) => {
    const at = of.toLowerCase().indexOf(wanted);
    return at < 0 ? [] : [{ step, group: group.group, trajectory, excerpt: of.slice(Math.max(0, at - 60), at + wanted.length + 60) }];
  })));
  return { hits: hits.slice(0, 60), next: null };
}

function shared(run, step) {
  const tasks = new Set(groupsOf(run, step).map((group) => JSON.stringify(group.task)));
  const found = run.steps.filter((other) => other !== Number(step)).map((other) => ({ step: other, tasks: groupsOf(run, other).filter((group) => tasks.has(JSON.stringify(group.task))).length }));
  return { steps: found.filter((one) => one.tasks > 0).reverse(), next: null };
}

function compare(run, step, other) {
  const pairs = groupsOf(run, step).map((left) => ({ left, right: groupsOf(run, other).find((right) => JSON.stringify(right.task) === JSON.stringify(left.task)) })).filter((pair) => pair.right);
  return { step, other, pairs, matching: pairs.length, next: null };
}

function recipe(run, against) {
  const rows = report.of_runs[run].recipe;
  if (!against) return rows;
  const theirs = report.of_runs[against].recipe;
  const keys = [...new Set([...rows, ...theirs].map((row) => row.key))];
  return keys.map((key) => {
    const [our, their] = [rows, theirs].map((all) => all.find((row) => row.key === key));
    return { key, value: our?.value ?? null, origin: our?.origin ?? null, other: their?.value ?? null, other_origin: their?.origin ?? null, differs: our?.value !== their?.value };
  });
}

// The newest steps, or the whole run: the one that has the range that is asked for.
function timeline(run, from, to) {
  const { newest, whole } = run.timeline;
  const of = from === undefined || (from >= newest.from && to <= newest.to) ? newest : whole;
  return from === undefined ? of : { ...of, from, to, sentence: `seconds ${of.from.toFixed(1)} to ${of.to.toFixed(1)}: ${of.sentence}` };
}

// The answer of the file to a request of the page.
export async function answer(path, { run: name, ...asked }) {
  const run = report.of_runs[name];
  const answers = {
    overview: () => ({ ...report.overview, curves: curves({ ...asked, keys: report.overview.panels.flatMap((panel) => panel.keys) }) }),
    runs: () => report.overview.runs,
    metrics: () => curves({ ...asked, run: name, keys: asked.keys.split(",") }),
    steps: () => run.steps,
    samples: () => samples(run, asked),
    search: () => search(run, asked.text),
    tokens: () => {
      const rows = run.tokens[`${asked.step}.${asked.group}.${asked.index}`];
      if (!rows) throw new Error("this report has tokens of other trajectories alone; `rlrun view` shows all");
      return rows;
    },
    shared: () => shared(run, asked.step),
    compare: () => compare(run, asked.step, asked.other),
    recipe: () => recipe(name, asked.against),
    timeline: () => timeline(run, asked.from, asked.to),
    why: () => run.why,
    history: () => run.history,
    status: () => run.status,
    about: () => run.about,
  };
  return answers[path]();
}

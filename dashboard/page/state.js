// The state of the page and its requests. What a reader would want to share is in the hash of the URL.

import { answer, report } from "./report.js";

const listeners = new Set();
let hash = new URLSearchParams(location.hash.slice(1));

window.addEventListener("hashchange", () => {
  hash = new URLSearchParams(location.hash.slice(1));
  listeners.forEach((listener) => listener());
});

export const get = (key, otherwise = "") => hash.get(key) ?? otherwise;
export const list = (key) => get(key).split(",").filter(Boolean).map(decodeURIComponent);

// Changes keys of the hash; an empty value removes its key. Listeners are called once.
export function set(changes, { replace = true } = {}) {
  for (const [key, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) hash.delete(key);
    else hash.set(key, Array.isArray(value) ? value.map(encodeURIComponent).join(",") : value);
    if (Array.isArray(value) && value.length === 0) hash.delete(key);
  }
  const url = `${location.pathname}#${hash}`;
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  listeners.forEach((listener) => listener());
}

export const onChange = (listener) => listeners.add(listener);

// A value of a query with its escapes decoded. `URLSearchParams` would read the `+` of a token as a space.
function decoded(value) {
  try {
    return decodeURIComponent(value);
  } catch {
    return value;
  }
}

// The token comes in the URL once, and is kept for this tab.
const pair = location.search.slice(1).split("&").find((part) => part.startsWith("token="));
const given = pair && decoded(pair.slice("token=".length));
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", `${location.pathname}${location.hash}`);
}
export const token = () => sessionStorage.getItem("token");

// An answer of the API as JSON. An error has the text of the server.
export async function api(path, parameters = {}) {
  if (report) return answer(path, parameters);
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== ""));
  const headers = token() ? { authorization: `Bearer ${token()}` } : {};
  const response = await fetch(`api/${path}?${query}`, { headers }).catch(() => {
    throw new Error("The server does not answer; the page shows what it had.");
  });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// What the last overview or list of runs said.
export const page = { runs: [], revisions: {} };
export const runNames = () => page.runs.map((run) => run.name);
export const shownRuns = () => page.runs.filter((run) => !list("hide").includes(run.name));
// The run that samples, recipe and events are of.
export const currentRun = () => (runNames().includes(get("run")) ? get("run") : (shownRuns()[0] ?? page.runs[0])?.name);

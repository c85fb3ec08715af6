// One panel: curves of its metrics, of all shown runs.

import { el, number, tick } from "./dom.js";

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [1, 4], [4, 2, 1, 2], [10, 2]];
const HEIGHT = 168;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (index) => css(`--series-${(index % 8) + 1}`);

// Exponential moving average, unbiased at the start; gaps stay gaps.
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// The names of metrics without the part that all of them begin with.
function shortened(keys) {
  const parts = keys.map((key) => key.split("/"));
  let shared = 0;
  while (keys.length > 1 && parts.every((part) => part.length > shared + 1 && part[shared] === parts[0][shared])) shared += 1;
  return parts.map((part) => part.slice(shared).join("/"));
}

// The range of values with a margin; numbers that are never negative have an axis that is not, either.
function valueRange(low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), high + 0.1 * Math.abs(high)];
  const [from, to] = uPlot.rangeNum(low, high, 0.08, true);
  return [low >= 0 ? Math.max(from, 0) : from, to];
}

export class Chart {
  constructor({ title, keys, stacked, sync, onzoom, onreset, onlog, onremove }) {
    this.keys = keys;
    this.names = shortened(keys);
    this.stacked = stacked;
    this.title = title;
    this.sync = sync;
    this.onzoom = onzoom;
    this.onreset = onreset;
    this.log = el("button", { class: "small", "aria-pressed": "false", title: "Logarithmic scale", "aria-label": `Logarithmic scale of ${title}`, onclick: () => onlog(title) }, "log");
    const remove = onremove && el("button", { class: "small", "aria-label": `Remove the panel ${title}`, onclick: () => onremove(title) }, "×");
    this.legend = el("ul", { class: "legend" });
    this.at = el("span", { class: "at" });
    this.plot = el("div", { class: "plot" });
    this.element = el("figure", { class: "panel" }, el("figcaption", {}, el("span", { class: "title" }, title), this.at, this.log, remove), this.plot, this.legend);
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  // Draws `curves[run][key] = {x, y}` for the runs, in their colours.
  update(curves, runs, { log, smooth, axis, range, x }) {
    this.log.setAttribute("aria-pressed", String(log));
    const several = runs.length > 1;
    this.several = several;
    // Of several runs parts are lines: areas would hide each other.
    const stack = this.stacked && !several;
    if (stack) [log, smooth] = [false, 0];
    const lines = [];
    runs.forEach((run) => this.keys.forEach((key, index) => {
      const curve = curves[run.name]?.[key];
      if (!curve) return;
      // The ends of an interval look like their metric.
      const base = this.keys.indexOf(key.replace(/_(low|high)$/, ""));
      const at = base < 0 ? index : base;
      const look = several ? { stroke: color(run.index), dash: DASHES[at % 8] } : { stroke: color(at), dash: [] };
      // A logarithm has no place for 0 and less.
      const y = log ? curve.y.map((value) => (value > 0 ? value : null)) : curve.y;
      lines.push({ run: run.name, key, label: [several && run.name, (!several || this.keys.length > 1) && this.names[index]].filter(Boolean).join(" "), x: curve.x, y, last: run.last[key], edge: base >= 0 && base !== index, ...look });
    }));
    const tables = [];
    const series = [{}];
    this.lines = [];
    const edges = new Map();
    for (const line of lines) {
      if (line.edge) {
        tables.push([line.x, line.y]);
        edges.set(`${line.run} ${line.key}`, series.length);
        series.push({ stroke: line.stroke, alpha: 0.35, width: 0.7, points: { show: false } });
        this.lines.push(line);
        continue;
      }
      // A single point has no line.
      const points = { show: line.x.length < 40, size: 4 };
      if (smooth > 0 && line.x.length > 2) {
        tables.push([line.x, line.y]);
        series.push({ stroke: line.stroke, alpha: 0.25, width: 1, points: { show: false } });
        this.lines.push(null);
        line.y = smoothed(line.y, smooth);
        points.show = false;
      }
      tables.push([line.x, line.y]);
      series.push({ stroke: line.stroke, dash: line.dash, width: 1.5, points });
      this.lines.push(line);
    }
    // Points of other curves leave `undefined`, which lines pass over; `null` is a gap.
    const data = tables.length === 0 ? [[], []] : tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map(() => [1]));
    if (stack) this.pile(data, series);
    const bands = [...edges].filter(([name]) => name.endsWith("_high") && edges.has(name.replace(/_high$/, "_low")))
      .map(([name, high]) => ({ series: [high, edges.get(name.replace(/_high$/, "_low"))], fill: `${series[high].stroke}22` }));
    const shape = JSON.stringify([log, axis, lines.map((line) => [line.label, line.stroke]), smooth > 0, range, stack]);
    if (this.chart && this.shape === shape) {
      this.chart.setData(data);
    } else {
      this.shape = shape;
      this.draw(data, series, { log, range, x, bands });
    }
    this.showLegend();
    const words = lines.filter((line) => !line.edge).map((line) => `${line.label} ${number(line.last)}`).join(", ");
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${this.title} over ${x}; last values: ${words}`);
  }

  // Draws each line on top of those behind it in the list; the legend keeps the values.
  pile(data, series) {
    const below = data[0].map(() => 0);
    for (let at = data.length - 1; at >= 1; at -= 1) {
      let last = 0;
      this.lines[at - 1].values = data[at];
      // A line that has no point here has its last value.
      data[at] = data[at].map((value, index) => {
        last = value ?? last;
        below[index] += last;
        return below[index];
      });
      series[at].fill = series[at].stroke;
    }
  }

  draw(data, series, { log, range, x, bands }) {
    this.chart?.destroy();
    const axis = { stroke: css("--dim"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(this.plot.clientWidth, 200),
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: this.sync }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: range ? () => range : (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: log ? { distr: 3 } : {
          range: (u, low, high) => valueRange(low, high),
        },
      },
      axes: [
        { ...axis, size: 24, gap: 4, space: 60, values: (u, ticks) => ticks.map(tick) },
        { ...axis, size: 46, gap: 4, space: 28, values: (u, ticks) => ticks.map(tick) },
      ],
      series,
      bands,
      hooks: {
        setCursor: [() => this.showLegend()],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          this.onzoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
    this.chart = new uPlot(options, data, this.plot);
    this.chart.over.addEventListener("dblclick", () => this.onreset());
    this.x = x;
  }

  // The last values, or those under the cursor.
  showLegend() {
    if (!this.chart) return;
    const index = this.chart.cursor.idx;
    const hovered = index !== null && index !== undefined && this.chart.cursor.left >= 0;
    const at = (values) => {
      // The nearest point of this curve.
      for (let distance = 0; distance < values.length; distance += 1) {
        for (const near of [index - distance, index + distance]) {
          if (values[near] !== undefined) return values[near];
        }
      }
      return null;
    };
    const shown = (line, position) => (hovered ? at(line.values ?? this.chart.data[position + 1] ?? []) : line.last);
    const interval = (line) => ["low", "high"].map((end) => {
      const position = this.lines.findIndex((other) => other?.edge && other.run === line.run && other.key === `${line.key}_${end}`);
      return position < 0 ? null : shown(this.lines[position], position);
    });
    const items = this.lines.flatMap((line, position) => {
      if (!line || line.edge) return [];
      const value = shown(line, position);
      const [low, high] = interval(line);
      const ends = this.several || low === null || high === null ? "" : ` (${number(low)}–${number(high)})`;
      const swatch = el("i", { "aria-hidden": "true" });
      swatch.style.borderTopColor = line.stroke;
      swatch.style.borderTopStyle = line.dash.length === 0 ? "solid" : line.dash[0] > 3 ? "dashed" : "dotted";
      return [el("li", { title: `${line.run} ${line.key}`, "data-key": line.key, "data-run": line.run }, swatch, el("span", { class: "name" }, line.label), el("b", {}, number(value) + ends))];
    });
    this.at.textContent = hovered ? `${this.x} ${number(this.chart.data[0][index])}` : "";
    this.legend.classList.toggle("single", items.length === 1);
    this.legend.replaceChildren(...items);
  }

  resize() {
    if (this.chart && this.plot.clientWidth > 0) this.chart.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }

  // Colours follow the scheme of the system.
  recolour() {
    this.shape = null;
  }

  destroy() {
    this.chart?.destroy();
  }
}

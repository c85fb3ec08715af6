// Rows of spans over time on a canvas: hover, drag to zoom, and the same by keyboard. What is selected is a text beside it.

import { el, tick } from "./dom.js";

const TOP = 34;
const MOST_PIXELS = 8e6;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A colour of each kind; waits are hatched, so that the colour is not all that tells them apart.
const KINDS = {
  forward_backward: 1, score: 2, forward: 2, optimizer: 5, sample: 3, weight_sync: 4, push: 4, apply_weights: 4, evaluate: 5, save_checkpoint: 6, snapshot: 6, phase_switch: 7, regroup: 7,
};
export const isWait = (kind) => kind.startsWith("wait");
export const kindColor = (kind) => css(kind === "stall" ? "--down" : isWait(kind) ? "--dim" : `--series-${KINDS[kind] ?? 8}`);
export const lagColor = (lag) => css(`--series-${[3, 1, 6, 2][lag] ?? 4}`);

const hatches = new Map();
export function hatch(context, color) {
  if (!hatches.has(color)) {
    const tile = el("canvas", { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.strokeStyle = color;
    pen.lineWidth = 1.2;
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift - 1, 7);
      pen.lineTo(shift + 7, -1);
    }
    pen.stroke();
    hatches.set(color, context.createPattern(tile, "repeat"));
  }
  return hatches.get(color);
}

export class Lanes {
  constructor({ label, rowHeight, paint, describe, onzoom, onreset }) {
    Object.assign(this, { label, rowHeight, paint, describe, onzoom, onreset, rows: [], marks: [], bands: [], from: 0, to: 1 });
    this.canvas = el("canvas", {
      tabindex: "0", role: "application", "aria-label": label, onpointerdown: (event) => this.press(event), onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event), onpointercancel: () => this.cancel(), onpointerleave: () => this.hover(null), ondblclick: () => onreset(), onkeydown: (event) => this.key(event),
    });
    this.details = el("output", { class: "details", "aria-live": "polite" });
    this.element = el("div", { class: "lanes" }, el("div", { class: "scroll tall" }, this.canvas), this.details);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // Rows are `{ label, spans }`, marks `{ at, text }`, bands `{ start, end }` across all rows.
  update({ rows, marks, bands, from, to }) {
    const chosen = this.selected && this.identity(this.selected);
    Object.assign(this, { rows, marks, bands, from, to, hovered: null });
    this.selected = null;
    rows.forEach((row, index) => row.spans.forEach((span, at) => {
      if (chosen && this.identity({ row: index, at }) === chosen) this.selected = { row: index, at };
    }));
    this.canvas.setAttribute("aria-label", `${this.label}, ${rows.length} rows from second ${tick(from)} to ${tick(to)}; arrow keys select a span, Enter zooms to it, plus and minus zoom, Escape resets`);
    this.draw();
  }

  identity({ row, at }) {
    const span = this.rows[row]?.spans[at];
    return span && `${this.rows[row].label} ${span.start} ${span.end}`;
  }

  get gutter() { return this.width < 520 ? 84 : 128; }
  x(time) { return this.gutter + ((time - this.from) / (this.to - this.from)) * (this.width - this.gutter); }
  time(x) { return this.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.to - this.from); }

  draw() {
    this.width = this.element.clientWidth;
    if (this.width < 50) return;
    const height = TOP + this.rows.length * this.rowHeight + 4;
    // Very tall pictures are less fine, because every pixel takes memory.
    const scale = Math.min(devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (this.width * height)));
    this.canvas.width = this.width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    hatches.clear();
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    this.axis(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width - this.gutter, height);
    pen.clip();
    pen.fillStyle = css("--down-bg");
    for (const band of this.bands) pen.fillRect(this.x(band.start), TOP, Math.max(2, this.x(band.end) - this.x(band.start)), height - TOP);
    this.rows.forEach((row, index) => row.spans.forEach((span) => {
      const left = this.x(span.start);
      this.paint(pen, span, { left, width: Math.max(1, this.x(span.end) - left), top: TOP + index * this.rowHeight + 2, height: this.rowHeight - 4, x: (time) => this.x(time) });
    }));
    pen.restore();
    pen.fillStyle = css("--text");
    pen.textBaseline = "middle";
    this.rows.forEach((row, index) => pen.fillText(row.label, 0, TOP + (index + 0.5) * this.rowHeight, this.gutter - 8));
    this.outline(pen, this.hovered, 1);
    this.outline(pen, this.selected, 2);
    if (this.drag) {
      pen.fillStyle = css("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(this.drag.begin, this.drag.end), TOP, Math.abs(this.drag.end - this.drag.begin), height - TOP);
    }
  }

  axis(pen, height) {
    const raw = ((this.to - this.from) / Math.max(2, (this.width - this.gutter) / 90));
    const power = 10 ** Math.floor(Math.log10(raw));
    const every = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
    pen.strokeStyle = css("--grid");
    pen.fillStyle = css("--dim");
    pen.textBaseline = "alphabetic";
    const first = Math.ceil(this.from / every);
    // A bound, because a range may be too short for its numbers to differ.
    for (let tickAt = 0; tickAt < 100 && (first + tickAt) * every <= this.to; tickAt += 1) {
      const at = (first + tickAt) * every;
      pen.beginPath();
      pen.moveTo(this.x(at), 14);
      pen.lineTo(this.x(at), height);
      pen.stroke();
      if (this.x(at) < this.width - 24) pen.fillText(`${Number(at.toPrecision(7))} s`, this.x(at) + 2, 11);
    }
    let free = this.gutter;
    for (const mark of this.marks) {
      const x = this.x(mark.at);
      if (x < free) continue;
      pen.fillText(mark.text, x + 2, 26);
      pen.fillRect(x, 18, 1, 12);
      free = x + pen.measureText(mark.text).width + 12;
    }
  }

  outline(pen, at, width) {
    const span = at && this.rows[at.row]?.spans[at.at];
    if (!span) return;
    pen.strokeStyle = css("--text");
    pen.lineWidth = width;
    const left = Math.max(this.x(span.start), this.gutter);
    pen.strokeRect(left - 1, TOP + at.row * this.rowHeight + 1, Math.max(3, this.x(span.end) - left + 2), this.rowHeight - 2);
  }

  show() {
    const at = this.hovered ?? this.selected;
    const span = at && this.rows[at.row]?.spans[at.at];
    this.details.textContent = span ? this.describe(span, this.rows[at.row]) : "";
    this.draw();
  }

  hover(at) {
    if (JSON.stringify(at) === JSON.stringify(this.hovered ?? null)) return;
    this.hovered = at;
    this.show();
  }

  // The span at a place, or one within three pixels of it.
  find(x, y) {
    const row = Math.floor((y - TOP) / this.rowHeight);
    const spans = this.rows[row]?.spans ?? [];
    const distance = (span) => Math.max(this.x(span.start) - x, x - this.x(span.end), 0);
    let best = -1;
    spans.forEach((span, at) => { if (distance(span) <= 3 && (best < 0 || distance(span) <= distance(spans[best]))) best = at; });
    return best < 0 ? null : { row, at: best };
  }

  press(event) {
    if (event.offsetX < this.gutter || event.button > 0) return;
    this.drag = { begin: event.offsetX, end: event.offsetX };
    if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    // A finger scrolls the page.
    if (this.drag && event.pointerType === "mouse") {
      this.drag.end = event.offsetX;
      this.draw();
    } else {
      this.hover(this.find(event.offsetX, event.offsetY));
    }
  }

  release(event) {
    const { begin, end } = this.drag ?? { begin: 0, end: 0 };
    this.drag = null;
    if (Math.abs(end - begin) >= 4) {
      this.onzoom(this.time(Math.min(begin, end)), this.time(Math.max(begin, end)));
      return;
    }
    this.selected = this.find(event.offsetX, event.offsetY);
    this.hovered = null;
    this.show();
  }

  cancel() {
    this.drag = null;
    this.draw();
  }

  key(event) {
    const middle = (this.from + this.to) / 2;
    const length = this.to - this.from;
    const zoom = { "+": 0.25, "=": 0.25, "-": 1 }[event.key];
    if (zoom) {
      event.preventDefault();
      this.onzoom(middle - length * zoom, middle + length * zoom);
    } else if (event.key === "Escape") {
      this.onreset();
    } else if (event.key === "Enter" && this.selected) {
      const span = this.rows[this.selected.row].spans[this.selected.at];
      const margin = Math.max((span.end - span.start) / 4, length / 1e4);
      this.onzoom(span.start - margin, span.end + margin);
    } else if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") {
      event.preventDefault();
      this.hovered = null;
      this.step(event.key);
      this.show();
    }
  }

  step(key) {
    const filled = this.rows.map((row, index) => index).filter((index) => this.rows[index].spans.length > 0);
    if (filled.length === 0) return;
    if (!this.selected) {
      this.selected = { row: filled[0], at: 0 };
      return;
    }
    const { row, at } = this.selected;
    const last = this.rows[row].spans.length - 1;
    const along = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last }[key];
    if (along !== undefined) {
      this.selected = { row, at: along };
      return;
    }
    const next = filled[filled.indexOf(row) + (key === "ArrowUp" ? -1 : 1)];
    if (next === undefined) return;
    const { start } = this.rows[row].spans[at];
    const spans = this.rows[next].spans;
    const nearest = spans.reduce((best, span, index) => (Math.abs(span.start - start) < Math.abs(spans[best].start - start) ? index : best), 0);
    this.selected = { row: next, at: nearest };
    this.canvas.parentElement.scrollTop = Math.max(0, next * this.rowHeight - 150);
  }
}

// The workers as a grid of cells on one canvas: what each holds in its cache, what it is working on, what has just come.
// Only cells that changed are drawn. For keyboards and screen readers the grid is one element whose active cell says in
// words what is drawn.

import { colours, onTheme, soft, strong } from "./colours.js";
import { el, onFadeStep, onNextFrame, setAttribute, setText } from "./dom.js";
import { count, counted, milliseconds, percent, rate } from "./format.js";

const SIZES = [
  { name: "card", upTo: 40, width: 158, height: 102, gap: 8 },
  { name: "middle", upTo: 200, width: 84, height: 52, gap: 6 },
  { name: "small", upTo: Infinity, width: 27, height: 23, gap: 3 },
];
const FLASH_MS = 900;
const TICKS = 12;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

export const STATE_WORDS = { ready: "ready", draining: "draining", unreachable: "unreachable", restating: "resyncing its cache" };

// One that has said nothing since it joined is well.
export const streamWords = (state) => (state === "syncing" ? "no events yet" : state);

const serviceWords = ({ service }) => (service ? `TTFT ${milliseconds(service.p50)}, ${rate(service.requests)} /s` : "no requests lately");

export function toneOf(worker) {
  if (worker.state === "unreachable") return "bad";
  if (worker.state !== "ready") return "warn";
  if (worker.trusted === false || worker.stream === "stale") return "bad";
  return worker.stream === "live" || worker.stream === "syncing" ? "good" : "warn";
}

export function describe(worker) {
  const parts = [worker.key, STATE_WORDS[worker.state] ?? worker.state];
  if (worker.role !== "aggregated") parts.push(worker.role);
  parts.push(`${count(worker.running)} running, ${count(worker.waiting)} waiting`);
  parts.push(`${percent(worker.total ? worker.held / worker.total : 0)} cached, ${counted(worker.held, "block")}`, serviceWords(worker));
  if (worker.stream !== "live") parts.push(`event stream ${streamWords(worker.stream)}`);
  if (worker.trusted === false) parts.push("its events are not trusted");
  if (worker.note) parts.push(worker.note);
  return parts.join(", ");
}

export class WorkerGrid {
  constructor(open) {
    this.open = open;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.cell = el("div", { role: "gridcell", id: "worker-cell" });
    this.row = el("div", { role: "row" }, this.cell);
    this.node = el(
      "div",
      { class: "grid", role: "grid", tabindex: "0", "aria-label": "Workers", "aria-activedescendant": "worker-cell" },
      this.canvas,
      el("div", { class: "unseen", role: "rowgroup" }, this.row),
    );
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.workers = [];
    this.at = new Map();
    this.shown = [];
    this.flashes = new Map();
    this.dirty = new Set();
    this.size = SIZES[0];
    this.columns = 1;
    this.width = 0;
    this.active = 0;
    this.draw = (now) => this.paint(now);
    new ResizeObserver(() => this.layOut()).observe(this.node);
    onTheme(() => this.all());
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("focus", () => this.activate(this.active));
    this.node.addEventListener("blur", () => this.mark(this.active));
    this.canvas.addEventListener("click", (event) => {
      const index = this.indexAt(event);
      if (index >= 0) {
        this.activate(index);
        this.open(this.workers[index].key);
      }
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const index = this.indexAt(event);
      this.canvas.title = index < 0 ? "" : describe(this.workers[index]);
      this.canvas.style.cursor = index < 0 ? "default" : "pointer";
    });
  }

  // Takes the workers in the order in which they are to be shown.
  show(workers) {
    const before = this.workers;
    this.workers = workers;
    this.at = new Map(workers.map((worker, index) => [worker.key, index]));
    if (before.length !== workers.length) {
      this.active = Math.min(this.active, Math.max(0, workers.length - 1));
      this.layOut();
      return;
    }
    for (let index = 0; index < workers.length; index += 1) {
      const worker = workers[index];
      // The store keeps a worker of which nothing has changed. Cards show conversations too, which change beside it.
      if (worker === before[index] && this.size.name !== "card" && this.shown[index] !== undefined) continue;
      if (signature(worker) !== this.shown[index]) this.mark(index);
    }
    this.sayActive();
  }

  // A request has just fallen into a worker.
  flash(key, hue) {
    const index = this.at.get(key);
    if (index === undefined) return;
    this.flashes.set(index, { began: performance.now(), hue });
    this.mark(index);
  }

  mark(index) {
    this.dirty.add(index);
    onNextFrame(this.draw);
  }

  all() {
    this.fresh = true;
    for (let index = 0; index < this.workers.length; index += 1) this.dirty.add(index);
    onNextFrame(this.draw);
  }

  layOut() {
    const width = Math.floor(this.node.clientWidth);
    if (!width) return;
    const size = SIZES.find((each) => this.workers.length <= each.upTo);
    const most = Math.max(1, Math.floor((width + size.gap) / (size.width + size.gap)));
    // Rows of equal length, so that no card stands alone in the last one.
    const columns = this.workers.length > most ? Math.ceil(this.workers.length / Math.ceil(this.workers.length / most)) : most;
    this.size = size;
    this.columns = columns;
    this.width = width;
    this.cellWidth = (width - (columns - 1) * size.gap) / columns;
    this.rows = Math.max(1, Math.ceil(this.workers.length / columns));
    const height = this.rows * (size.height + size.gap) - size.gap;
    const ratio = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    setAttribute(this.node, "aria-rowcount", String(this.rows));
    setAttribute(this.node, "aria-colcount", String(columns));
    this.shown = [];
    this.flashes.clear();
    this.dirty.clear();
    this.all();
    this.sayActive();
  }

  place(index) {
    const { height, gap } = this.size;
    const row = Math.floor(index / this.columns);
    return [(index % this.columns) * (this.cellWidth + gap), row * (height + gap)];
  }

  indexAt(event) {
    const { height, gap } = this.size;
    const column = Math.floor(event.offsetX / (this.cellWidth + gap));
    const index = Math.floor(event.offsetY / (height + gap)) * this.columns + column;
    return column < this.columns && index < this.workers.length ? index : -1;
  }

  onKey(event) {
    const last = this.workers.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    let to = this.active;
    if (event.key in steps) to += steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "Enter" || event.key === " ") {
      if (this.workers[this.active]) this.open(this.workers[this.active].key);
      event.preventDefault();
      return;
    } else return;
    event.preventDefault();
    if (to >= 0 && to <= last) this.activate(to);
  }

  activate(index) {
    const before = this.active;
    this.active = index;
    this.mark(before);
    this.mark(index);
    this.sayActive();
    if (document.activeElement === this.node && this.workers.length) {
      const box = this.canvas.getBoundingClientRect();
      const top = box.top + this.place(index)[1];
      if (top < 70 || top + this.size.height > innerHeight) scrollBy({ top: top - innerHeight / 2 });
    }
  }

  sayActive() {
    const worker = this.workers[this.active];
    setText(this.cell, worker ? describe(worker) : "no workers");
    setAttribute(this.cell, "aria-colindex", String((this.active % this.columns) + 1));
    setAttribute(this.row, "aria-rowindex", String(Math.floor(this.active / this.columns) + 1));
  }

  paint(now) {
    const context = this.context;
    if (this.fresh) {
      this.fresh = false;
      context.fillStyle = colours.surface;
      context.fillRect(0, 0, this.width, this.canvas.height);
    }
    for (const [index, flash] of this.flashes) {
      this.dirty.add(index);
      if (now - flash.began > FLASH_MS) this.flashes.delete(index);
    }
    const focused = document.activeElement === this.node;
    for (const index of this.dirty) {
      const worker = this.workers[index];
      if (!worker) continue;
      this.shown[index] = signature(worker);
      const [x, y] = this.place(index);
      context.fillStyle = colours.surface;
      context.fillRect(x - 2, y - 2, this.cellWidth + 4, this.size.height + 4);
      this[this.size.name](worker, x, y, this.cellWidth, this.size.height);
      this.edge(worker, index, x, y, now, focused);
    }
    this.dirty.clear();
    if (this.flashes.size) onFadeStep(this.draw);
  }

  edge(worker, index, x, y, now, focused) {
    const context = this.context;
    const flash = this.flashes.get(index);
    const tone = toneOf(worker);
    const radius = this.size.name === "small" ? 5 : 8;
    if (tone !== "good") outline(context, x, y, this.cellWidth, this.size.height, radius, colours[tone], 1.5);
    if (flash) {
      const left = Math.max(0, 1 - (now - flash.began) / FLASH_MS);
      // The background, not the edge: a coloured edge means trouble.
      context.globalAlpha = 0.2 * left;
      box(context, x, y, this.cellWidth, this.size.height, radius, colours.accent);
      context.globalAlpha = 1;
    }
    if (focused && index === this.active) outline(context, x, y, this.cellWidth, this.size.height, radius, colours.ink, 2);
  }

  card(worker, x, y, width, height) {
    const context = this.context;
    box(context, x, y, width, height, 8, colours.raised);
    context.textBaseline = "alphabetic";
    context.fillStyle = colours[toneOf(worker)];
    context.beginPath();
    context.arc(x + 13, y + 16, 4, 0, 7);
    context.fill();
    context.font = `11.5px ${FONT}`;
    context.fillStyle = colours.quiet;
    context.textAlign = "right";
    const role = worker.role === "aggregated" ? "" : worker.role;
    const state = worker.state === "ready" ? role : worker.state;
    let stateRoom = state ? context.measureText(state).width + 8 : 0;
    // Without room for both, the name keeps the first line.
    context.font = `600 12.5px ${FONT}`;
    const below = stateRoom > 0 && context.measureText(worker.key).width > width - 32 - stateRoom;
    context.font = `11.5px ${FONT}`;
    if (below) stateRoom = 0;
    else context.fillText(state, x + width - 10, y + 20.5);
    const full = worker.total ? worker.held / worker.total : 0;
    context.fillText(percent(full), x + width - 10, y + 40);
    const fullRoom = context.measureText(percent(full)).width + 8;
    context.textAlign = "left";
    context.fillStyle = worker.running || worker.waiting ? colours.ink : colours.quiet;
    context.fillText(work(context, worker, width - 20 - fullRoom, below ? state : ""), x + 10, y + 40);
    context.font = `600 12.5px ${FONT}`;
    context.fillStyle = colours.ink;
    context.fillText(fitted(context, worker.key, width - 32 - stateRoom), x + 22, y + 20.5);
    context.font = `11.5px ${FONT}`;
    context.fillStyle = colours.quiet;
    context.fillText(fitted(context, serviceWords(worker), width - 20), x + 10, y + 58);
    bar(context, x + 10, y + 65, width - 20, 6, full);
    this.ticks(worker, x + 10, y + 78, width - 20, 14);
  }

  // How much of each of the latest conversations this worker holds, in the conversation's colour.
  ticks(worker, x, y, width, height) {
    const context = this.context;
    const step = Math.min(14, width / TICKS);
    const ticks = worker.ticks.slice(0, Math.floor(width / step));
    for (let at = 0; at < ticks.length; at += 1) {
      const { hue, share } = ticks[at];
      context.fillStyle = soft(hue);
      context.fillRect(x + at * step, y, step - 3, height);
      context.fillStyle = strong(hue);
      const filled = Math.max(1.5, height * share);
      context.fillRect(x + at * step, y + height - filled, step - 3, filled);
    }
    if (!ticks.length) {
      context.fillStyle = colours.cell;
      context.fillRect(x, y + height - 2, width, 2);
    }
  }

  middle(worker, x, y, width, height) {
    const context = this.context;
    box(context, x, y, width, height, 7, colours.raised);
    context.font = `600 11px ${FONT}`;
    context.fillStyle = colours.ink;
    context.fillText(fitted(context, worker.key, width - 14), x + 7, y + 16);
    context.font = `11px ${FONT}`;
    context.fillStyle = worker.running ? colours.ink : colours.quiet;
    context.fillText(String(worker.running), x + 7, y + 32);
    context.textAlign = "right";
    context.fillStyle = colours.quiet;
    const full = worker.total ? worker.held / worker.total : 0;
    context.fillText(percent(full), x + width - 7, y + 32);
    context.textAlign = "left";
    bar(context, x + 7, y + height - 11, width - 14, 5, full);
  }

  small(worker, x, y, width, height) {
    const context = this.context;
    box(context, x, y, width, height, 5, colours.cell);
    const full = Math.min(1, worker.total ? worker.held / worker.total : 0);
    if (full > 0) {
      const top = Math.max(1, full * height);
      context.save();
      context.beginPath();
      context.roundRect(x, y, width, height, 5);
      context.clip();
      context.fillStyle = colours.fill;
      context.fillRect(x, y + height - top, width, top);
      context.restore();
    }
    if (worker.running || worker.waiting) {
      context.font = `600 10.5px ${FONT}`;
      context.fillStyle = colours.ink;
      context.textAlign = "center";
      context.fillText(String(worker.running + worker.waiting), x + width / 2, y + height / 2 + 3.5);
      context.textAlign = "left";
    }
  }
}

function signature(worker) {
  let ticks = "";
  for (const tick of worker.ticks) ticks += `${tick.hue | 0}:${Math.round(tick.share * 16)},`;
  return `${worker.key}|${worker.state}|${worker.role}|${worker.running}|${worker.waiting}|${Math.round(worker.total ? (worker.held / worker.total) * 200 : 0)}|${toneOf(worker)}|${serviceWords(worker)}|${ticks}`;
}

// What a worker has to do, as long as there is room for it; its state first where that has no other place.
function work(context, { running, waiting }, room, state) {
  if (state) return running + waiting ? `${state}, ${running + waiting}` : state;
  const words = waiting ? [`${running} running, ${waiting} queued`, `${running} + ${waiting} queued`] : [`${running} running`];
  return words.find((each) => context.measureText(each).width <= room) ?? String(running + waiting);
}

function box(context, x, y, width, height, radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  context.fill();
}

function outline(context, x, y, width, height, radius, colour, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.beginPath();
  context.roundRect(x + line / 2, y + line / 2, width - line, height - line, radius);
  context.stroke();
}

function bar(context, x, y, width, height, share) {
  box(context, x, y, width, height, height / 2, colours.cell);
  if (share > 0) box(context, x, y, Math.max(height, Math.min(1, share) * width), height, height / 2, colours.accent);
}

const widths = new Map();

function fitted(context, text, room) {
  const known = `${context.font}|${text}|${Math.round(room)}`;
  let found = widths.get(known);
  if (found === undefined) {
    found = text;
    // The end of a worker's name tells it from others.
    for (let cut = 1; context.measureText(found).width > room && cut < text.length; cut += 1) found = `…${text.slice(cut)}`;
    if (widths.size > 4000) widths.clear();
    widths.set(known, found);
  }
  return found;
}

// Requests by time: a bar for each second, what of their prompts was found in caches in the accent's colour. Pointer and
// arrows read a second.

import { colours, onTheme } from "./colours.js";
import { el, onNextFrame, setAttribute } from "./dom.js";
import { clock, counted, percent } from "./format.js";

export const SPAN_S = 300;
const HEIGHT = 76;
const FOOT = 16;
const FONT = "10.5px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

// The counts of a second only grow. Smaller ones come when the process was started again.
export const grown = (known, counts) => known.map((each, at) => Math.max(each, counts[at]));

// Seconds of which nobody knows anything, in grey: those before the router began to count.
export function paintUnknown(context, strip, start, width, height) {
  context.fillStyle = colours.cell;
  for (const [from, to] of strip.unknown) {
    const left = Math.max(0, ((from - start) / SPAN_S) * width);
    const right = ((to - start) / SPAN_S) * width;
    if (right > left) context.fillRect(left, 0, right - left, height);
  }
}

export class Strip {
  constructor() {
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "slider",
      "aria-label": "A moment of the last five minutes",
      "aria-valuemin": "0",
      "aria-valuemax": String(SPAN_S),
      "aria-valuenow": String(SPAN_S),
    });
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.seconds = new Map(); // second -> [requests, prompt tokens, tokens found in caches, moves]
    this.plain = false; // without what was found in caches, which a global router does not count
    this.unknown = []; // [from, to] in seconds, of which nothing is known
    this.sinceS = 0;
    this.endS = 0;
    this.cursorS = null;
    this.hoverS = null;
    this.width = 0;
    this.draw = () => this.paint();
    new ResizeObserver(() => this.layOut()).observe(this.canvas);
    onTheme(() => onNextFrame(this.draw));
    this.canvas.addEventListener("pointermove", (event) => this.hover(this.timeAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("blur", () => this.hover(null));
  }

  count(second, counts) {
    const known = this.seconds.get(second);
    if (!known) this.forget();
    this.seconds.set(second, known ? grown(known, counts) : counts);
  }

  // The router counts since a time; what this page has seen of a router before it, it knows up to another one.
  countedSince(sinceS, heardS) {
    if (sinceS <= this.sinceS) return;
    this.unknown.push([this.sinceS ? heardS : 0, sinceS]);
    this.sinceS = sinceS;
  }

  isUnknown(second) {
    return this.unknown.some(([from, to]) => second >= from && second + 1 <= to);
  }

  moves(from, to) {
    let sum = 0;
    for (let second = from; second < to; second += 1) sum += this.seconds.get(second)?.[3] ?? 0;
    return sum;
  }

  forget() {
    const oldest = this.endS - 2 * SPAN_S;
    for (const second of this.seconds.keys()) if (second < oldest) this.seconds.delete(second);
    this.unknown = this.unknown.filter(([, to]) => to > oldest);
  }

  // Sums over the last seconds before ``now``: requests a second, and the share of prompt tokens found in caches.
  lately(nowMs, spanS) {
    const end = Math.floor(nowMs / 1000);
    let requests = 0;
    let tokens = 0;
    let found = 0;
    for (let second = end - spanS; second < end; second += 1) {
      const slot = this.seconds.get(second);
      if (slot) {
        requests += slot[0];
        tokens += slot[1];
        found += slot[2];
      }
    }
    return { perSecond: requests / spanS, tokensPerSecond: tokens / spanS, share: tokens ? found / tokens : NaN };
  }

  show(nowMs) {
    const end = Math.floor(nowMs / 1000) + 1;
    if (end !== this.endS || this.changed) {
      this.endS = end;
      onNextFrame(this.draw);
    }
    this.sayValue();
  }

  layOut() {
    const width = Math.floor(this.canvas.clientWidth);
    if (!width || width === this.width) return;
    const ratio = Math.min(2, devicePixelRatio || 1);
    this.width = width;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    this.canvas.style.height = `${HEIGHT}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    onNextFrame(this.draw);
  }

  timeAt(event) {
    return this.endS - SPAN_S + (event.offsetX / this.width) * SPAN_S;
  }

  hover(second) {
    this.hoverS = second;
    if (second !== null) {
      const slot = this.seconds.get(Math.floor(second));
      this.canvas.title = `${clock(second * 1000)}: ${this.words(slot, second)}`;
    }
    onNextFrame(this.draw);
  }

  words(slot, second) {
    if (!slot && this.isUnknown(Math.floor(second))) return "not known: before the router started";
    if (slot && this.plain) return counted(slot[0], "request");
    if (!slot) return "no requests";
    const moved = slot[3] ? `, ${counted(slot[3], "move")} to another worker` : "";
    return `${counted(slot[0], "request")}, ${percent(slot[1] ? slot[2] / slot[1] : NaN)} of prompt tokens cached${moved}`;
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -15, PageUp: 15 };
    const from = this.cursorS ?? this.endS - 1;
    if (event.key in steps) this.cursorS = Math.min(this.endS - 1, Math.max(this.endS - SPAN_S, from + steps[event.key]));
    else if (event.key === "Home") this.cursorS = this.endS - SPAN_S;
    else if (event.key === "End") this.cursorS = this.endS - 1;
    else return;
    event.preventDefault();
    this.hover(this.cursorS);
    this.sayValue();
  }

  sayValue() {
    const at = this.cursorS ?? this.endS - 1;
    setAttribute(this.canvas, "aria-valuenow", String(Math.max(0, Math.round(at - this.endS + SPAN_S))));
    setAttribute(this.canvas, "aria-valuetext", `${clock(at * 1000)}, ${this.words(this.seconds.get(Math.floor(at)), at)}`);
  }

  paint() {
    const { context, width } = this;
    if (!width) return;
    const start = this.endS - SPAN_S;
    const floor = HEIGHT - FOOT;
    context.fillStyle = colours.surface;
    context.fillRect(0, 0, width, HEIGHT);
    paintUnknown(context, this, start, width, floor);
    const [, knownS] = this.unknown.at(-1) ?? [0, 0];
    let most = 4;
    for (let second = start; second < this.endS; second += 1) most = Math.max(most, this.seconds.get(second)?.[0] ?? 0);
    context.fillStyle = colours.line;
    context.fillRect(0, floor, width, 1);
    context.font = FONT;
    context.fillStyle = colours.quiet;
    context.textAlign = "center";
    const every = width < 420 ? 120 : 60;
    for (let second = Math.ceil(start / every) * every; second < this.endS; second += every) {
      const x = ((second - start) / SPAN_S) * width;
      context.fillRect(x, floor, 1, 4);
      if (x > 24 && x < width - 24) context.fillText(clock(second * 1000).slice(0, 5), x, HEIGHT - 2);
    }
    context.textAlign = "left";
    context.fillText(`${most}/s`, 2, 9);
    if (knownS > start) {
      const words = `not known before ${clock(knownS * 1000)}`;
      const x = ((knownS - start) / SPAN_S) * width;
      if (x > context.measureText(words).width + 12) context.fillText(words, 6, floor - 8);
      else context.fillText(words, Math.min(x + 6, width - context.measureText(words).width - 4), 9);
    }
    const step = width / SPAN_S;
    const bar = Math.max(1, step - (step > 3 ? 1 : 0));
    for (let second = start; second < this.endS; second += 1) {
      const slot = this.seconds.get(second);
      if (!slot) continue;
      const x = (second - start) * step;
      const height = Math.max(1.5, (slot[0] / most) * (floor - 14));
      const found = slot[1] ? height * Math.min(1, slot[2] / slot[1]) : 0;
      context.fillStyle = colours.quiet;
      context.fillRect(x, floor - height, bar, height - found);
      context.fillStyle = colours.accent;
      context.fillRect(x, floor - found, bar, found);
    }
    this.line(this.hoverS, start);
  }

  line(second, start) {
    if (second === null || second < start) return;
    const x = ((second - start) / SPAN_S) * this.width;
    this.context.fillStyle = colours.quiet;
    this.context.fillRect(x - 0.5, 0, 1, HEIGHT - FOOT);
  }
}

// Latencies, tokens, errors and moves: figures of the last ten seconds, each over a strip of the same five minutes as the
// requests by time. Ink is the median and grey the 99th percentile; orange is a move and red an error, as everywhere.

import { colours, onTheme } from "./colours.js";
import { byId, el, onNextFrame, setAttribute } from "./dom.js";
import { count, counted, milliseconds, rate, short } from "./format.js";
import { SPAN_S, grown, paintUnknown } from "./strip.js";

const LATELY_S = 10;
const MINUTE_MS = 60000;
const HEIGHT = 38;
const OUTPUT_TOKENS = 0;
const ERRORS = 1;

// The value below which a share of observations lies, from counts by bucket; within a bucket they are taken to be spread
// evenly, and what is above the last bound counts as that bound.
export function quantile(counts, bounds, share) {
  const wanted = share * counts.reduce((sum, each) => sum + each, 0);
  let below = 0;
  for (let at = 0; at < counts.length; at += 1) {
    if (counts[at] && below + counts[at] >= wanted) {
      const from = at ? bounds[at - 1] : 0;
      return Number.isFinite(bounds[at]) ? from + ((bounds[at] - from) * (wanted - below)) / counts[at] : from;
    }
    below += counts[at];
  }
  return NaN;
}

// What each worker did in the last minute, from its requests: median and 99th percentile from the choice of the worker to
// the first token, in milliseconds, and requests and prompt tokens a second.
export function serviceByWorker(requests, nowMs) {
  const found = new Map();
  const begin = Math.max(nowMs - MINUTE_MS, Math.min(...requests.map((each) => each.time_ms)));
  const seconds = Math.max(1, (nowMs - begin) / 1000);
  for (const { worker, time_ms, prefilled_ms, isl } of requests) {
    if (time_ms < begin) continue;
    let of = found.get(worker);
    if (!of) found.set(worker, (of = { ttfts: [], requests: 0, tokens: 0 }));
    of.requests += 1 / seconds;
    of.tokens += isl / seconds;
    if (prefilled_ms) of.ttfts.push(Math.max(0, prefilled_ms - time_ms));
  }
  for (const of of found.values()) {
    of.ttfts.sort((one, other) => one - other);
    [of.p50, of.p99] = [0.5, 0.99].map((share) => of.ttfts[Math.ceil(share * of.ttfts.length) - 1] ?? NaN);
  }
  return found;
}

export class Served {
  constructor(strip) {
    this.strip = strip; // knows of moves, and since when anything is known
    this.seconds = new Map(); // second -> row of the table
    this.latencies = { ttft: [], itl: [] }; // [column, upper bound in seconds] of each bucket
    this.canvases = ["ttft", "itl", "tokens", "errors", "moves"].map((name) => el("canvas", { role: "img", "data-strip": name }));
    this.atS = 0;
    this.draw = () => this.paint();
    new ResizeObserver(() => onNextFrame(this.draw)).observe(byId("served"));
    onTheme(() => onNextFrame(this.draw));
  }

  use(columns) {
    for (const kind of ["ttft", "itl"]) this.latencies[kind] = columns.map((name, at) => [at, ...name.split(" ")]).filter((each) => each[1] === kind).map(([at, , bound]) => [at, Number(bound)]);
  }

  count(second, row) {
    const known = this.seconds.get(second);
    this.seconds.set(second, known ? grown(known, row) : row);
    if (this.seconds.size > 2 * SPAN_S) this.seconds.delete(this.seconds.keys().next().value);
    onNextFrame(this.draw);
  }

  // p50 and p99 in milliseconds, over the seconds from one to before another.
  latency(kind, from, to) {
    const buckets = this.latencies[kind];
    const bounds = buckets.map(([, bound]) => bound);
    const counts = buckets.map(([column]) => this.sum(column, from, to));
    return [0.5, 0.99].map((share) => 1000 * quantile(counts, bounds, share));
  }

  sum(column, from, to) {
    let sum = 0;
    for (let second = from; second < to; second += 1) sum += this.seconds.get(second)?.[column] ?? 0;
    return sum;
  }

  // The tiles: name, figure, unit, what is below it, its tone.
  figures(nowMs) {
    const to = Math.floor(nowMs / 1000);
    const from = to - LATELY_S;
    const errors = this.sum(ERRORS, from, to);
    const allErrors = this.sum(ERRORS, to - SPAN_S, to + 1);
    const moves = this.strip.moves(from, to);
    const allMoves = this.strip.moves(to - SPAN_S, to + 1);
    const latency = (kind) => {
      const [median, high] = this.latency(kind, from, to).map(milliseconds);
      return [`${kind.toUpperCase()} p50, last ${LATELY_S} s`, median, "", `p99 ${high}`, ""];
    };
    if (to !== this.atS) onNextFrame(this.draw);
    this.atS = to;
    return [
      latency("ttft"),
      latency("itl"),
      [`output tokens, last ${LATELY_S} s`, rate(this.sum(OUTPUT_TOKENS, from, to) / LATELY_S), " /s", `${short(this.sum(OUTPUT_TOKENS, to - SPAN_S, to + 1))} in five minutes`, ""],
      [`errors (5xx), last ${LATELY_S} s`, count(errors), "", `${count(allErrors)} in five minutes`, errors ? "bad" : ""],
      [`moves to another worker, last ${LATELY_S} s`, count(moves), "", `${count(allMoves)} in five minutes`, moves ? "warn" : ""],
    ];
  }

  paint() {
    const { endS } = this.strip;
    const start = endS - SPAN_S;
    byId("served").querySelectorAll(".tile").forEach((tile, at) => tile.contains(this.canvases[at]) || tile.append(this.canvases[at]));
    const [ttft, itl, tokens, errors, moves] = this.canvases;
    this.lines(ttft, "ttft", start, endS);
    this.lines(itl, "itl", start, endS);
    this.bars(tokens, (second) => this.seconds.get(second)?.[OUTPUT_TOKENS] ?? 0, colours.quiet, start, (most) => `Output tokens by second, at most ${count(most)}`);
    this.bars(errors, (second) => this.seconds.get(second)?.[ERRORS] ?? 0, colours.bad, start, (most) => `Errors by second, at most ${count(most)}`);
    this.bars(moves, (second) => this.strip.moves(second, second + 1), colours.warn, start, (most) => `Moves by second, at most ${counted(most, "move")}`);
  }

  // Clears a canvas and returns its context and width; null while it is not shown.
  begin(canvas, start) {
    const width = Math.floor(canvas.clientWidth);
    if (!width) return null;
    const ratio = Math.min(2, devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintUnknown(context, this.strip, start, width, HEIGHT - 1);
    context.fillStyle = colours.line;
    context.fillRect(0, HEIGHT - 1, width, 1);
    return { context, width };
  }

  bars(canvas, of, colour, start, words) {
    const begun = this.begin(canvas, start);
    if (!begun) return;
    const { context, width } = begun;
    const values = Array.from({ length: SPAN_S }, (_, at) => of(start + at));
    const most = Math.max(...values);
    const step = width / SPAN_S;
    context.fillStyle = colour;
    values.forEach((value, at) => {
      const height = value ? Math.max(2, (value / most) * (HEIGHT - 3)) : 0;
      context.fillRect(at * step, HEIGHT - 1 - height, Math.max(1, step), height);
    });
    this.say(canvas, words(most));
  }

  // A step for each ten seconds: single seconds of a quiet pool have too few requests for a percentile.
  lines(canvas, kind, start, endS) {
    const begun = this.begin(canvas, start);
    if (!begun) return;
    const { context, width } = begun;
    const steps = [];
    for (let from = Math.floor(start / LATELY_S) * LATELY_S; from < endS; from += LATELY_S) {
      const [median, high] = this.latency(kind, from, from + LATELY_S);
      if (Number.isFinite(high)) steps.push([from, median, high]);
    }
    const most = Math.max(0, ...steps.map((step) => step[2]));
    const x = (second) => ((second - start) / SPAN_S) * width;
    for (const [column, colour] of [[2, colours.quiet], [1, colours.ink]]) {
      context.fillStyle = colour;
      for (const step of steps) context.fillRect(x(step[0]), HEIGHT - 3 - (step[column] / most) * (HEIGHT - 5), x(LATELY_S + step[0]) - x(step[0]), 2);
    }
    paintUnknown(context, this.strip, start, width, HEIGHT - 1); // the first step may have begun in it
    this.say(canvas, steps.length ? `${kind.toUpperCase()} by ten seconds, p99 at most ${milliseconds(most)}` : `No ${kind.toUpperCase()} in five minutes`);
  }

  say(canvas, words) {
    setAttribute(canvas, "aria-label", words);
    setAttribute(canvas, "title", words);
  }
}

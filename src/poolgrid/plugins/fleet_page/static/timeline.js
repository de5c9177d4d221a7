// The legs of one request as bars over time: waiting for a worker with room, waiting for the engine, prefill, output.

import { colours } from "./colours.js";
import { el, svg } from "./dom.js";
import { milliseconds, statusWords } from "./format.js";

const LEFT = 118;
const RIGHT = 80;
const ROW = 34;
const BAR = 14;

export function timeline(legs, nowMs, width = 660) {
  const begun = legs.filter((leg) => leg.placed_ms !== null);
  if (!begun.length) return el("p", { class: "quiet" }, "Its times are not known.");
  const queuedFrom = (leg) => leg.placed_ms - (leg.queued_ms ?? 0);
  const from = Math.min(...begun.map(queuedFrom));
  const known = begun.flatMap((leg) => [leg.placed_ms, leg.started_ms, leg.prefilled_ms, leg.ended_ms]).filter((at) => at !== null);
  const open = begun.some((leg) => leg.ended_ms === null && !leg.released);
  const to = Math.max(from + 1, ...known, open ? Math.min(nowMs, from + 600000) : 0);
  const x = (at) => LEFT + ((Math.max(from, at) - from) / (to - from)) * (width - LEFT - RIGHT);
  const height = begun.length * ROW + 24;
  const parts = [];
  const said = [];
  begun.forEach((leg, index) => {
    const y = index * ROW + 8;
    const end = leg.ended_ms ?? (leg.released ? Math.max(...[leg.placed_ms, leg.started_ms, leg.prefilled_ms].filter((at) => at !== null)) : to);
    // A worker tells of a step when it is over: what began and ended in one step has one time.
    const inOneStep = leg.started_ms !== null && leg.started_ms === leg.prefilled_ms;
    const work = { encode: "encode", decode: "KV transfer" }[leg.stage] ?? "prefill";
    const steps = [
      leg.queued_ms ? ["queued in the router", queuedFrom(leg), leg.placed_ms, colours.quiet] : ["", null],
      inOneStep ? [`queued and ${work}`, leg.placed_ms, leg.prefilled_ms, colours.accent] : ["queued in the engine", leg.placed_ms, leg.started_ms ?? end, colours.warn],
      inOneStep ? ["", null] : [work, leg.started_ms, leg.prefilled_ms ?? end, colours.accent],
      ["output", leg.prefilled_ms, end, colours.good],
    ].filter(([, begin]) => begin !== null);
    parts.push(
      svg("text", { x: 0, y: y + 11 }, leg.stage === "whole" ? "request" : leg.stage),
      svg("text", { x: 0, y: y + 24, "font-size": "10" }, short(leg.worker)),
    );
    const words = [];
    for (const [name, begin, finish, colour] of steps) {
      const span = Math.max(0, finish - begin);
      words.push(`${name} ${milliseconds(span)}`);
      parts.push(
        svg("rect", { x: x(begin), y, width: Math.max(1.5, x(finish) - x(begin)), height: BAR, rx: 2, fill: colour }, svg("title", {}, `${name}: ${milliseconds(span)}, from +${milliseconds(begin - from)}`)),
      );
    }
    parts.push(svg("text", { x: Math.min(width - RIGHT + 5, x(end) + 5), y: y + 11 }, endWords(leg, index === begun.length - 1)));
    parts.push(svg("text", { x: LEFT, y: y + 25, "font-size": "10" }, words.join(" · ")));
    said.push(`${leg.stage} on ${leg.worker}: ${words.join(", ")}`);
  });
  parts.push(
    svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - 14, y2: height - 14 }),
    svg("text", { x: LEFT, y: height - 2 }, "0"),
    svg("text", { x: width - RIGHT, y: height - 2, "text-anchor": "end" }, milliseconds(to - from)),
  );
  return el(
    "div",
    { class: "scroll" },
    svg("svg", { class: "timeline", width: "100%", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said.join("; "), preserveAspectRatio: "xMinYMin" }, parts),
  );
}

// A leg that was given up before another one has moved there.
const endWords = (leg, last) => (leg.end ? statusWords(leg.end) : leg.released ? (last ? "released" : "moved") : "…");

const short = (worker) => (worker.length > 19 ? `…${worker.slice(-18)}` : worker);

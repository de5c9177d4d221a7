// The sheet at the side: one request with its decision and its legs, one worker with its cache, or the keys of the page.

import { colours, strong } from "./colours.js";
import { gauge } from "./conversations.js";
import { byId, el, webAddress } from "./dom.js";
import { clock, count, counted, hueOfName, milliseconds, nameOf, percent, rate, statusWords, tone } from "./format.js";
import { timeline } from "./timeline.js";

const CANDIDATES = 32;
const REASON_WORDS = { only: "only candidate" };

export class Sheet {
  constructor() {
    this.dialog = byId("sheet");
    this.refresh = null;
    this.key = null;
    this.dialog.addEventListener("close", () => {
      if (this.dialog.open) return; // the event comes later, and another sheet is open by now
      this.refresh = null;
      this.key = null;
      this.controller?.abort();
    });
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  open(key, title, under, body) {
    this.key = key;
    const close = el("button", { type: "button", class: "tool", "aria-label": "Close", onclick: () => this.dialog.close() }, "Close");
    this.under = el("p", { class: "quiet" }, under);
    this.body = el("div", { class: "sheet-body" }, body);
    this.dialog.replaceChildren(el("div", { class: "sheet-head" }, el("div", {}, el("h2", { id: "sheet-title" }, title), this.under), close), this.body);
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
    close.focus();
  }

  // A new signal for what this sheet asks for; what the one before it asked for is given up.
  signal() {
    this.controller?.abort();
    this.controller = new AbortController();
    return this.controller.signal;
  }

  set(...body) {
    this.body.replaceChildren(...body.filter(Boolean));
  }
}

export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export function statusMark(status) {
  return el("span", { class: "status", "data-tone": tone(status) }, el("i", { "aria-hidden": "true" }), statusWords(status));
}

const section = (title, ...body) => el("section", {}, el("h3", {}, title), ...body);

// -- one request -------------------------------------------------------------------------------------------------------

export function requestBody(found, row, nowMs, openWorker) {
  const { explanation, legs } = found;
  const isGlobal = "placements" in explanation;
  const first = isGlobal ? explanation : explanation.attempts[0];
  const reused = isGlobal ? null : first.realised_cached_tokens;
  const queuedMs = isGlobal ? explanation.queued_ms : Math.max(0, ...legs.map((leg) => leg.queued_ms ?? 0));
  const arrivedMs = first.time_ms - (isGlobal ? 0 : (legs[0]?.queued_ms ?? 0)); // a decision is timed, and the wait before it
  const firstToken = Math.min(...legs.map((leg) => leg.prefilled_ms ?? Infinity));
  const pairs = [
    ["status", statusMark(statusOf(row, legs, isGlobal ? explanation.outcome : ""))],
    ["arrived", clock(arrivedMs, true)],
    ["prompt", counted(first.isl, "token")],
    reused !== null && ["reused", `${count(reused)} tokens, ${percent(first.isl ? reused / first.isl : NaN)}`],
    isGlobal && ["output", counted(explanation.output_tokens, "token")],
    isGlobal ? ["TTFT", milliseconds(explanation.ttft_ms)] : Number.isFinite(firstToken) && ["first token after", milliseconds(firstToken - arrivedMs)],
    isGlobal && ["ITL", milliseconds(explanation.itl_ms)],
    ["queued in the router", queuedMs ? milliseconds(queuedMs) : "no"],
    row?.conversation && ["conversation", el("span", {}, el("i", { class: "chip", style: { background: strong(hueOfName(row.conversation)) } }), row.conversation)],
  ];
  return [
    section("Summary", facts(pairs)),
    section(legs.length > 1 ? `Timeline: ${legs.length} legs` : "Timeline", timeline(legs, nowMs), el("p", { class: "quiet" }, legsNote(found.legs_from))),
    section("Routing decision", isGlobal ? placements(explanation, found.pools ?? {}, openWorker) : attempts(explanation.attempts, openWorker)),
  ];
}

// The last leg of several says what became of the request; its row in the list may be that of an earlier one.
function statusOf(row, legs, outcome) {
  const last = legs.at(-1)?.end ?? "";
  return (legs.length > 1 && last) || (row?.status ?? (outcome || last));
}

function legsNote(source) {
  if (source === "router") return "By the global router's clock; each pool's own page shows the legs.";
  if (source === "unknown") return "Some times are not known: the page was closed when it ran.";
  return "The choice uses the router's clock, the rest the worker's.";
}

function placements(explanation, pools, openWorker) {
  const items = explanation.placements.map((placement) => {
    const inside = [
      el("li", {}, folded("grid", placement.selection)),
      placement.spill ? el("li", {}, `spill: ${percent(placement.spill.share)} of the cell goes to ${placement.spill.pool}`) : null,
      el("li", {}, folded("fallback", placement.fallback)),
      ...placement.refusals.map((refusal) => el("li", {}, el("span", { class: "mark" }, `refused by ${refusal.pool}`), `: ${refusal.state}, ${refusal.message}`)),
      el("li", {}, placement.block_size ? `reserved in ${milliseconds(placement.select_ms)}: ${placement.pool_reason}, overlap ${counted(placement.overlap_blocks, "block")} of ${counted(placement.block_size, "token")}` : `forwarded, and its router chose: ${placement.pool_reason || "nothing is known of it"}`),
    ];
    const ofPool = pools[placement.dispatch_id];
    return el(
      "li",
      {},
      el(
        "details",
        { open: true },
        el("summary", {}, `${placement.work} (${placement.cause}): pool ${placement.pool} by ${placement.how}, worker ${placement.worker}`),
        el("ul", {}, inside, ofPool ? el("li", {}, `decision of the router of pool ${placement.pool}`, attempts(ofPool.attempts, openWorker)) : null),
      ),
    );
  });
  const hints = Object.entries(explanation.hints).filter(([, value]) => value !== null);
  return el(
    "ul",
    { class: "tree" },
    el("li", {}, `model ${explanation.model}, document revision ${explanation.revision}`),
    el("li", {}, `hints: ${hints.map(([name, value]) => `${name} ${value}`).join(", ") || "none given"}; expected output ${counted(explanation.expected_output.tokens, "token")} (${explanation.expected_output.source})`),
    items,
    explanation.notes.map((note) => el("li", {}, note)),
  );
}

// The reason in one line, and all that it was made of behind it.
function folded(name, values) {
  const { reason, ...rest } = values;
  return el("details", { class: "plain" }, el("summary", {}, `${name}: ${reason ?? ""}`), mapping(rest));
}

function mapping(values) {
  return el(
    "ul",
    {},
    Object.entries(values ?? {}).map(([name, value]) => {
      if (value === null || value === "" || (Array.isArray(value) && !value.length)) return null;
      if (Array.isArray(value) && value.some((each) => each !== null && typeof each === "object")) {
        return el("li", {}, name, el("ul", {}, value.map((each) => el("li", {}, oneLine(each)))));
      }
      if (typeof value === "object" && !Array.isArray(value)) return el("li", {}, name, mapping(value));
      return el("li", {}, `${name.replaceAll("_", " ")}: ${Array.isArray(value) ? value.join(", ") : value}`);
    }),
  );
}

const oneLine = (value) => (value !== null && typeof value === "object" ? Object.entries(value).map(([name, each]) => `${name} ${typeof each === "object" ? JSON.stringify(each) : each}`).join(", ") : String(value));

function attempts(list, openWorker) {
  return el("ul", { class: "tree" }, list.map((attempt) => attemptItem(attempt, openWorker)));
}

function attemptItem(attempt, openWorker) {
  const reused = attempt.realised_cached_tokens;
  const inside = [
    el("li", {}, `${counted(attempt.isl, "prompt token")} = ${counted(attempt.isl_blocks, "block")}; ${count(attempt.overlap_blocks)} expected in cache, ${reused === null ? "reuse not known yet" : `${counted(reused, "token")} reused`}`),
    attempt.media ? el("li", {}, `${counted(attempt.media.items, "medium", "media")}: ${count(attempt.media.compared_blocks)} of ${counted(Math.floor(attempt.isl / attempt.block_size), "whole block")} compared with the workers' caches${attempt.media.compared_blocks >= Math.floor(attempt.isl / attempt.block_size) ? "" : "; the rest is output, or follows a medium whose token count the workers do not report"}`) : null,
    attempt.failure ? el("li", {}, el("span", { class: "mark" }, `${attempt.worker} did not serve it`), `: ${attempt.failure}`) : null,
    attempt.behind_records ? el("li", {}, el("span", { class: "mark" }, "the router was catching up"), `: ${counted(attempt.behind_records, "record")} or more of the journal were not applied yet`) : null,
    attempt.expected_ttft_ms !== null
      ? el("li", {}, `TTFT: expected ${number(attempt.expected_ttft_ms)} ms, ${attempt.realised_ttft_ms === null ? "not measured yet" : `measured ${number(attempt.realised_ttft_ms)} ms`}`)
      : null,
    attempt.margin !== null ? el("li", {}, `runner-up: ${attempt.runner_up ?? "not named"}, cost ${number(attempt.margin)} higher`) : null,
    el("li", {}, candidates(attempt, openWorker)),
    ...Object.entries(attempt.filtered).map(([worker, why]) => el("li", {}, el("span", { class: "mark" }, `not ${worker}`), `: ${why}`)),
    ...Object.entries(attempt.untrusted).map(([worker, why]) => el("li", {}, el("span", { class: "mark" }, `overlap of ${worker} estimated from the router's own choices`), `: ${why}`)),
  ];
  return el(
    "li",
    {},
    el(
      "details",
      { open: true },
      el("summary", {}, `${attempt.stage === "whole" ? "" : `${attempt.stage}: `}${attempt.worker}: ${REASON_WORDS[attempt.reason] ?? attempt.reason}, policy ${attempt.policy}`),
      el("ul", {}, inside, el("li", { class: "quiet" }, `attempt ${attempt.attempt}, decided at journal record ${count(attempt.offset)} · ${nameOf(attempt.request_id)}`)),
    ),
  );
}

const number = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 100 ? count(value) : Number(value.toPrecision(3)).toString());

function candidates(attempt, openWorker) {
  const terms = [...new Set(attempt.rows.flatMap((row) => Object.keys(row.terms)))];
  const ordered = [...attempt.rows].sort((one, other) => other.chosen - one.chosen || (one.cost ?? 0) - (other.cost ?? 0) || (one.worker < other.worker ? -1 : 1));
  const shown = ordered.slice(0, CANDIDATES);
  const most = Math.max(1e-9, ...shown.map((row) => row.cost ?? 0));
  const rows = shown.map((row) =>
    el(
      "tr",
      { class: row.chosen ? "chosen" : null },
      el("td", {}, el("a", { href: "#", onclick: (event) => follow(event, () => openWorker(row.worker)) }, row.worker)),
      el("td", {}, count(row.device_overlap_blocks + row.host_overlap_blocks + row.disk_overlap_blocks)),
      el("td", {}, count(row.active_prefill_tokens)),
      el("td", {}, count(row.active_blocks)),
      el("td", {}, count(row.requests)),
      terms.map((name) => el("td", {}, number(row.terms[name]))),
      el("td", { class: "cost" }, row.cost === null ? "–" : [el("i", { "aria-hidden": "true" }, el("b", { style: { width: `${(100 * Math.max(0, row.cost)) / most}%` } })), number(row.cost)]),
    ),
  );
  const head = ["candidate", "cached blocks", "prefill tokens", "active blocks", "requests", ...terms.map((name) => name.replaceAll("_", " ")), "cost"];
  const rest = ordered.length - shown.length;
  return el(
    "div",
    { class: "scroll" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)),
    rest > 0 ? el("p", { class: "quiet" }, `and ${counted(rest, "more candidate")}, with a higher cost`) : null,
  );
}

function follow(event, go) {
  event.preventDefault();
  go();
}

// -- one worker --------------------------------------------------------------------------------------------------------

export function workerBody(worker, { conversations, requests, flow, nowMs, openRequest }) {
  const full = worker.total ? worker.held / worker.total : NaN;
  const pairs = [
    ["state", worker.state],
    ["role", worker.role],
    worker.model && ["model", worker.model],
    ["requests", `${count(worker.running)} running, ${count(worker.waiting)} waiting`],
    worker.prefill_tokens !== undefined && ["tokens to prefill", counted(worker.prefill_tokens, "token")],
    ["cached", `${count(worker.held)} of ${counted(worker.total, "block")}, ${percent(full)}`],
    worker.service && ["TTFT from the choice, last minute", `p50 ${milliseconds(worker.service.p50)}, p99 ${milliseconds(worker.service.p99)}`],
    worker.service && ["throughput, last minute", `${rate(worker.service.requests)} requests/s, ${rate(worker.service.tokens)} prompt tokens/s`],
    ["stored", `${rate(flow.stored)} blocks/s`],
    ["evicted", `${rate(flow.removed)} blocks/s`],
    worker.requests_total !== undefined && ["requests so far", count(worker.requests_total)],
  ];
  const address = webAddress(worker.http_endpoint ?? "");
  const held = conversations
    .map((each) => ({ ...each, holder: each.holders.find(([name]) => name === worker.key) }))
    .filter((each) => each.holder);
  const rows = held.map((each) => {
    const [, blocks, lost] = each.holder;
    const share = each.blocks ? blocks / each.blocks : 0;
    return el(
      "tr",
      {},
      el("td", {}, gauge(share, hueOfName(each.name)), " ", each.name),
      el("td", {}, percent(share)),
      el("td", {}, `${count(blocks)} of ${count(each.blocks)}`),
      el("td", {}, lost ? count(lost) : "–"),
    );
  });
  return [
    section("Now", facts(pairs)),
    section(
      "Event stream",
      facts([
        ["state", worker.stream],
        ["trusted", worker.trusted ? "yes" : "no: its cache is estimated from the router's own choices"],
        ["lag", worker.lag_ms === null ? "–" : milliseconds(worker.lag_ms)],
        ["last event", worker.recorded_ms ? `${milliseconds(Math.max(0, nowMs - worker.recorded_ms))} ago` : "not yet"],
      ]),
      worker.note ? el("p", { class: "note" }, worker.note) : null,
      worker.sources?.length ? el("ul", { class: "tree" }, worker.sources.map(([name, state, why]) => el("li", {}, `source ${name}: ${state}${why ? `, ${why}` : ""}`))) : null,
    ),
    section(
      "Latest conversations in its cache",
      rows.length
        ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["conversation", "share", "blocks", "evicted"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)))
        : el("p", { class: "quiet" }, "None since this page was opened."),
    ),
    section(
      "Last requests",
      requests.length
        ? el(
            "ul",
            { class: "tree" },
            requests.map((request) => el("li", {}, el("a", { href: "#", onclick: (event) => follow(event, () => openRequest(request)) }, nameOf(request.request_id)), ` · ${clock(request.time_ms, true)} · ${counted(request.isl, "token")} · `, statusMark(request.status))),
          )
        : el("p", { class: "quiet" }, "None."),
    ),
    address ? section("Worker address", el("p", {}, el("a", { href: address, target: "_blank", rel: "noreferrer" }, address))) : null,
  ].filter(Boolean);
}

// -- keys --------------------------------------------------------------------------------------------------------------

const KEYS = [
  ["Tab", "next part of the page"],
  ["← ↑ → ↓", "from worker to worker, request to request, cell to cell, second to second"],
  ["Home  End", "first, last"],
  ["Enter", "open the marked item"],
  ["Escape", "close the open part"],
];

export function keysBody() {
  return [el("dl", { class: "keys" }, KEYS.flatMap(([keys, what]) => [el("dt", {}, keys.split("  ").map((each) => el("kbd", {}, each)).flatMap((each, at) => (at ? [" ", each] : [each]))), el("dd", {}, what)]))];
}

export function waitingBody(words) {
  return [el("p", { class: "quiet", role: "status" }, words)];
}

export function faultBody(words) {
  return [el("p", { class: "note bad", role: "alert" }, words)];
}

export const legendOf = (cards) => [
  [cards ? colours.accent : colours.fill, "cached"],
  [colours.warn, "draining, or its event stream is catching up"],
  [colours.bad, "unreachable, or untrusted"],
];

// The fleet page: follows the router's stream, and shows what it says.

import { onTheme, readColours, startTheme, strong } from "./colours.js";
import { ConversationList } from "./conversations.js";
import { byId, el, onNextFrame, say, setAttribute, setText } from "./dom.js";
import { clock, count, counted, hueOfName, milliseconds, nameOf, percent, rate, short } from "./format.js";
import { PoolGrids, PoolList } from "./grids.js";
import { RequestList } from "./requests.js";
import { ask, hasKey, Stream, useKey } from "./server.js";
import { faultBody, keysBody, legendOf, requestBody, Sheet, waitingBody, workerBody } from "./sheet.js";
import { Served, serviceByWorker } from "./served.js";
import { Store } from "./store.js";
import { Strip } from "./strip.js";
import { streamWords, toneOf, WorkerGrid } from "./workers.js";

const LATELY_S = 10;
const CARDS = 40; // as many workers as are drawn with all that there is to say of them
const CELL_SPAN_MS = 60000;
const FLOW_MS = 5000;
const NONE = [];
const SORTS = {
  name: (one, other) => compare(one.key, other.key),
  busy: (one, other) => other.running + other.waiting - one.running - one.waiting || compare(one.key, other.key),
  full: (one, other) => ratio(other) - ratio(one) || compare(one.key, other.key),
  trouble: (one, other) => rank(other) - rank(one) || compare(one.key, other.key),
};
const collator = new Intl.Collator("en", { numeric: true });
const compare = (one, other) => collator.compare(one, other);
const ratio = (worker) => (worker.total ? worker.held / worker.total : 0);
const rank = (worker) => ({ bad: 2, warn: 1 })[toneOf(worker)] ?? 0;

class Page {
  constructor() {
    this.store = new Store();
    this.sheet = new Sheet();
    this.kind = null;
    this.order = [];
    this.sort = "name";
    this.flows = new Map(); // worker -> [[time, stored, removed], …], one for each change of the last moments
    this.linkState = "connecting";
    this.linkWords = "";
    this.heardMs = 0;
    this.servicedMs = 0;
    this.service = new Map();
    this.strip = new Strip();
    byId("strip").append(this.strip.canvas);
    this.served = new Served(this.strip);
    this.stream = new Stream(
      (kind, data) => this.onEvent(kind, data),
      (state, words) => this.onLink(state, words),
    );
    this.drawn = () => this.render();
  }

  start() {
    startTheme(byId("theme"));
    onTheme(() => {
      this.legend?.replaceChildren();
      this.renderSoon();
    });
    byId("help").addEventListener("click", () => this.sheet.open("keys", "Keyboard", "Everything on this page works without a mouse.", keysBody()));
    byId("key-button").addEventListener("click", () => this.askForKey(""));
    byId("key-form").addEventListener("submit", (event) => this.onKeyForm(event));
    setInterval(() => this.renderSoon(), 1000);
    this.showKeyButton();
    this.stream.start();
  }

  // -- the stream ------------------------------------------------------------------------------------------------------

  onEvent(kind, data) {
    if (kind === "bye") return;
    const heardS = this.heardMs / 1000;
    this.store.apply(kind, data);
    this.strip.countedSince(this.store.values.totals.since_ms / 1000, heardS);
    this.heardMs = this.store.now();
    const about = this.store.values.about;
    if (about && about.kind !== this.kind) this.build(about);
    const first = this.store.wholes === 1 && kind === "whole";
    for (const key of this.store.fresh) {
      const request = this.store.requests.get(key);
      if (!first) this.flash(request);
    }
    this.countRequests(kind, data);
    this.noteFlows(kind, data);
    this.renderSoon();
  }

  // The router counts every request; the page gets only the last ones, and under load none of most.
  countRequests(kind, data) {
    for (const [second, ...counts] of data.tables.seconds?.rows ?? NONE) this.strip.count(Number(second), counts);
    if (kind === "whole") this.served.use(data.tables.served.columns);
    for (const [second, ...row] of data.tables.served?.rows ?? NONE) this.served.count(Number(second), row);
    this.strip.changed = true;
  }

  flash(request) {
    if (this.kind === "router") this.workers.flash(request.worker, request.conversation ? hueOfName(request.conversation) : null);
    else this.grids.flash(request);
  }

  noteFlows(kind, data) {
    const now = this.store.now();
    const workers = this.store.table("workers");
    if (kind === "whole") this.flows.clear();
    for (const [key] of data.tables.workers?.rows ?? NONE) {
      const worker = workers.get(key);
      let flow = this.flows.get(key);
      if (!flow) this.flows.set(key, (flow = []));
      flow.push([now, worker.stored, worker.removed]);
      while (flow.length > 2 && flow[1][0] < now - FLOW_MS) flow.shift();
    }
    for (const key of data.tables.workers?.gone ?? NONE) this.flows.delete(key);
  }

  // Blocks a second over the last moments; what a worker said last holds until it says something else.
  flowOf(key, now = this.store.now()) {
    const flow = this.flows.get(key);
    if (!flow) return { stored: 0, removed: 0 };
    while (flow.length > 1 && flow[1][0] < now - FLOW_MS) flow.shift();
    const [from, to] = [flow[0], flow.at(-1)];
    const seconds = Math.max(0.25, Math.min(FLOW_MS, now - from[0]) / 1000);
    return { stored: Math.max(0, to[1] - from[1]) / seconds, removed: Math.max(0, to[2] - from[2]) / seconds };
  }

  onLink(state, words) {
    if (state === "key") {
      this.wantsKey = true;
      this.askForKey(hasKey() ? words : "");
      state = "lost";
      words = "waiting for a key";
    }
    if (state !== this.linkState && (state === "lost" || this.linkState === "lost")) say(state === "live" ? "Connected again" : state === "lost" ? `Not connected: ${words}` : "");
    this.linkState = state;
    this.linkWords = words;
    this.showLink();
    this.showKeyButton();
  }

  showLink() {
    const node = byId("link");
    const words = byId("link-words");
    setAttribute(node, "data-state", this.linkState);
    const seen = this.heardMs ? `; last update ${clock(this.heardMs)}` : "";
    if (this.linkState === "live") setText(words, "live");
    else if (this.linkState === "lost") setText(words, `${this.linkWords}${seen}`);
    else setText(words, `connecting${seen}`);
  }

  // -- the key ---------------------------------------------------------------------------------------------------------

  showKeyButton() {
    byId("key-button").hidden = !hasKey() && !this.wantsKey;
    setText(byId("key-button"), hasKey() ? "Key ✓" : "Sign in");
  }

  askForKey(fault) {
    const dialog = byId("key");
    setText(byId("key-fault"), fault);
    byId("key-value").value = "";
    if (!dialog.open) dialog.showModal();
    byId("key-value").focus();
  }

  onKeyForm(event) {
    event.preventDefault();
    useKey(byId("key-value").value.trim(), byId("key-keep").checked);
    byId("key-value").value = "";
    byId("key").close();
    this.showKeyButton();
    this.stream.start();
  }

  // -- what is on the page ---------------------------------------------------------------------------------------------

  build(about) {
    this.kind = about.kind;
    const main = byId("main-column");
    const side = byId("side-column");
    this.requests = new RequestList(this.kind === "router" ? "router" : "global", (request) => this.openRequest(request));
    if (this.kind === "router") {
      this.workers = new WorkerGrid((key) => this.openWorker(key));
      this.workerCount = el("span", { class: "count" });
      this.noWorkers = el("p", { class: "empty", hidden: true }, "No worker has joined this pool yet. Start one: ", el("code", {}, "poolgrid worker --consolidator tcp://HOST:PORT"));
      this.legend = el("div", { class: "legend" });
      const sorts = Object.entries({ name: "by name", busy: "busiest", full: "most cached", trouble: "in trouble" }).map(([name, words]) =>
        el("button", { type: "button", "aria-pressed": String(name === this.sort), onclick: (event) => this.sortBy(name, event.target) }, words),
      );
      this.sorts = el("div", { class: "sorts", role: "group", "aria-label": "Order of the workers" }, sorts);
      const panel = el("section", { class: "panel", "aria-labelledby": "workers-title" }, el("div", { class: "bar" }, el("h2", { id: "workers-title" }, "Workers and caches"), this.workerCount, this.sorts), el("div", { class: "canvas-box" }, this.workers.node), this.noWorkers, this.legend);
      this.conversations = new ConversationList((key) => this.openWorker(key));
      main.replaceChildren(panel, this.conversations.node);
      side.replaceChildren(this.requests.node);
    } else {
      this.grids = new PoolGrids((stage, cell) => this.openCell(stage, cell));
      this.pools = new PoolList();
      main.replaceChildren(this.grids.node, this.pools.node);
      side.replaceChildren(this.requests.node);
      this.strip.plain = true;
    }
    const legend = this.kind === "router" ? [["accent", "cached"], ["quiet", "not cached"], ["cell", "not known"]] : [["quiet", "requests"], ["cell", "not known"]];
    byId("strip-legend").replaceChildren(...legend.map(([colour, words]) => el("span", {}, el("i", { style: { background: `var(--${colour})` } }), words)));
    document.title = `poolgrid ${about.name === "router" ? "fleet" : about.name}`;
    const processes = about.processes > 1 ? ` · process ${about.process + 1} of ${about.processes}, each has its page at its admin port` : "";
    this.heading(NONE);
    setText(byId("foot"), `poolgrid ${about.version}${processes} · this page is read-only`);
  }

  heading(models) {
    const { about } = this.store.values;
    const served = models.length > 2 ? counted(models.length, "model") : models.join(", ");
    const parts = [served, about.pool && `pool ${about.pool}`, location.host, about.name, about.policy ? `policy ${about.policy}` : "", `version ${about.version}`];
    setText(byId("name"), parts.filter(Boolean).join(" · "));
  }

  sortBy(name, button) {
    this.sort = name;
    for (const each of this.sorts.children) each.setAttribute("aria-pressed", String(each === button));
    this.order = [];
    this.render();
  }

  renderSoon() {
    onNextFrame(this.drawn);
  }

  render() {
    if (!this.kind) return;
    const now = this.store.now();
    if (this.kind === "router") this.renderRouter(now);
    else this.renderGlobal(now);
    this.strip.show(now);
    this.tiles(this.served.figures(now), byId("served"));
    this.strip.changed = false;
    this.renderTrouble();
    this.refreshSheet(now);
  }

  renderTrouble() {
    const totals = this.store.values.totals ?? {};
    // What the router logs as an error, in the same words; some records behind are the rule under load.
    const starting = !totals.ready && totals.behind > 0 ? `the router is not ready: ${counted(totals.behind, "record")} of the journal to apply` : "";
    const words = totals.trouble || starting;
    const node = byId("trouble");
    node.hidden = !words;
    setText(node, words);
  }

  renderRouter(now) {
    const models = this.liveWorkers();
    const conversations = this.liveConversations();
    const ticks = new Map();
    // Only cards have room for them.
    for (const each of models.length > CARDS ? [] : [...conversations].sort((one, other) => compare(one.name, other.name))) {
      for (const [worker, blocks] of each.holders) {
        if (!blocks) continue;
        let of = ticks.get(worker);
        if (!of) ticks.set(worker, (of = []));
        of.unshift({ hue: hueOfName(each.name), share: each.blocks ? blocks / each.blocks : 0 });
      }
    }
    if (now - this.servicedMs >= 1000) {
      this.servicedMs = now;
      this.service = serviceByWorker(this.store.newest(Infinity), now);
    }
    for (const worker of models) {
      worker.ticks = ticks.get(worker.key) ?? NONE;
      worker.service = this.service.get(worker.key);
    }
    this.workers.show(this.inOrder(models));
    this.noWorkers.hidden = models.length > 0;
    this.workers.node.hidden = models.length === 0;
    this.conversations.show(conversations);
    this.requests.show(this.store.newest(64), this.store.values.totals?.decisions, this.store.missed);
    this.renderTiles(models, now);
    this.heading([...new Set(models.map((worker) => worker.model))].sort(compare));
    const streams = new Map();
    for (const worker of models) streams.set(worker.stream, (streams.get(worker.stream) ?? 0) + 1);
    const others = [...streams].filter(([state]) => state !== "live").map(([state, number]) => `${count(number)} ${streamWords(state)}`);
    setText(this.workerCount, `${counted(models.length, "worker")}, event streams: ${others.length ? others.join(", ") : "all live"}`);
    const cards = models.length <= CARDS;
    if (!this.legend.firstChild || cards !== this.cards) {
      this.cards = cards;
      this.legend.replaceChildren(...this.legendParts());
    }
  }

  legendParts() {
    return [
      ...legendOf(this.cards).map(([colour, words]) => el("span", {}, el("i", { style: { background: colour } }), words)),
      this.cards ? el("span", {}, el("i", { style: { background: `linear-gradient(90deg, ${["c1", "c2", "c3"].map((name, at) => `${strong(hueOfName(name))} ${33 * at}% ${33 * (at + 1)}%`).join(", ")})` } }), "bars: share of each recent conversation that is cached there") : "number: requests on the worker",
    ];
  }

  liveWorkers() {
    return [...this.store.table("workers").values()];
  }

  liveConversations() {
    return [...this.store.table("conversations").values()].map((row) => ({ ...row, name: row.key })).sort((one, other) => other.last_ms - one.last_ms);
  }

  // Workers stay where they are while figures move; a new order is made when somebody asks or when workers come and go.
  inOrder(models) {
    const known = new Set(this.order);
    if (models.length !== known.size || models.some((worker) => !known.has(worker.key))) this.order = [...models].sort(SORTS[this.sort]).map((worker) => worker.key);
    const byKey = new Map(models.map((worker) => [worker.key, worker]));
    return this.order.map((key) => byKey.get(key)).filter(Boolean);
  }

  renderTiles(models, now) {
    const { queue, totals } = this.store.values;
    const ready = models.filter((worker) => worker.state === "ready").length;
    const running = models.reduce((sum, worker) => sum + worker.running, 0);
    const waiting = models.reduce((sum, worker) => sum + worker.waiting, 0);
    const held = models.reduce((sum, worker) => sum + worker.held, 0);
    const total = models.reduce((sum, worker) => sum + worker.total, 0);
    const lately = this.strip.lately(now, LATELY_S);
    const bad = models.filter((worker) => toneOf(worker) === "bad").length;
    const unreachable = models.filter((worker) => worker.state === "unreachable").length;
    const flow = this.flowOfAll(models, now);
    this.tiles([
      ["workers", count(ready), ` of ${count(models.length)} ready`, [unreachable && `${count(unreachable)} unreachable`, bad > unreachable && `${count(bad - unreachable)} untrusted`].filter(Boolean).join(", "), bad ? "bad" : ""],
      ["running", count(running), "", waiting ? `${count(waiting)} queued in engines` : "none queued in engines", ""],
      ["requests", rate(lately.perSecond), " /s", `last ${LATELY_S} s`, ""],
      ["cache hit rate", percent(lately.share), "", "of the prompt tokens", ""],
      ["cached", percent(total ? held / total : NaN), " of blocks", `+${rate(flow.stored)}${flow.removed < 0.05 ? "" : ` −${rate(flow.removed)}`} blocks/s`, ""],
      queueTile(queue, totals),
    ]);
  }

  flowOfAll(models, now) {
    const sum = { stored: 0, removed: 0 };
    for (const worker of models) {
      const flow = this.flowOf(worker.key, now);
      sum.stored += flow.stored;
      sum.removed += flow.removed;
    }
    return sum;
  }

  tiles(list, node = byId("tiles")) {
    while (node.children.length < list.length) node.append(el("div", { class: "tile" }, el("dt"), el("dd", {}, "", el("small")), el("p")));
    list.forEach(([name, value, unit, under, tone], at) => {
      const [title, figure, note] = node.children[at].children;
      setText(title, name);
      if (!figure.firstChild || figure.firstChild.nodeType !== Node.TEXT_NODE) figure.prepend(document.createTextNode(""));
      if (figure.firstChild.data !== value) figure.firstChild.data = value;
      setText(figure.lastChild, unit);
      setText(note, under);
      setAttribute(note, "class", tone);
    });
  }

  // -- a global router -------------------------------------------------------------------------------------------------

  renderGlobal(now) {
    const { grids, queue, totals } = this.store.values;
    this.grids.use(grids);
    const within = this.store.newest(4000, (request) => request.time_ms > now - CELL_SPAN_MS).reverse();
    this.grids.show(within);
    const pools = [...this.store.table("pools").values()];
    this.pools.show(pools);
    this.requests.show(this.store.newest(64), totals?.decisions, this.store.missed);
    this.heading([...new Set(this.store.newest(64).map((request) => request.model))].sort(compare));
    const lately = this.strip.lately(now, LATELY_S);
    const spilled = within.filter((request) => request.places.some((place) => place[4] !== "grid")).length;
    const up = pools.filter((pool) => pool.state === "available" || pool.state === "saturated").length;
    this.tiles([
      ["pools", count(up), ` of ${count(pools.length)} up`, `document revision ${count(grids.revision)}`, ""],
      ["in flight", count(totals?.active), "", `${count(totals?.waiting)} waiting for a pool`, totals?.waiting ? "warn" : ""],
      ["requests", rate(lately.perSecond), " /s", `last ${LATELY_S} s`, ""],
      ["prompt tokens", rate(lately.tokensPerSecond), " /s", `last ${LATELY_S} s`, ""],
      ["outside their pool", percent(within.length ? spilled / within.length : NaN), "", "spill, override, fallback; last minute", ""],
      queueTile(queue),
    ]);
  }

  openCell(stage, cell) {
    const found = this.store.newest(40, (request) => request.places.some((place) => place[0] === stage.stage && place[5].join() === cell.join()));
    const rows = found.map((request) => el("li", {}, el("a", { href: "#", onclick: (event) => (event.preventDefault(), this.openRequest(request)) }, nameOf(request.request_id)), ` · ${clock(request.time_ms, true)} · ${counted(request.isl, "token")} · TTFT ${milliseconds(request.ttft_ms)} · ${request.places.map((place) => `${place[2]} by ${place[4]}`).join(", ")}`));
    this.sheet.open(`cell ${cell.join()}`, `Cell [${cell.join("][")}] of the ${stage.stage} grid`, rows.length ? "last requests, newest first" : "", rows.length ? el("ul", { class: "tree" }, rows) : el("p", { class: "quiet" }, "No recent request in this cell."));
  }

  // -- sheets ----------------------------------------------------------------------------------------------------------

  async openRequest(request) {
    const { sheet } = this;
    const key = `request ${request.key}`;
    sheet.open(key, nameOf(request.request_id), request.key === nameOf(request.request_id) ? "" : request.key, waitingBody("loading…"));
    const signal = sheet.signal();
    try {
      const found = await ask(`v1/fleet/requests/${encodeURIComponent(request.request_id)}`, signal);
      if (sheet.key === key) sheet.set(...requestBody(found, this.store.requests.get(request.key) ?? request, this.store.now(), (worker) => this.openWorker(worker)));
    } catch (error) {
      if (sheet.key === key && error.name !== "AbortError") sheet.set(...faultBody(error.message));
    }
  }

  openWorker(key) {
    if (this.kind !== "router") return;
    const make = () => this.workerParts(key);
    this.sheet.open(`worker ${key}`, key, "", make() ?? faultBody(`${key} is not in the pool any more.`));
    this.sheet.refresh = make;
    this.refreshedMs = this.store.now();
  }

  workerParts(key) {
    const worker = this.liveWorkers().find((each) => each.key === key);
    if (!worker) return null;
    return workerBody(worker, {
      conversations: this.liveConversations(),
      requests: this.store.newest(4000).filter((request) => request.worker === key).slice(0, 12),
      flow: this.flowOf(key),
      nowMs: this.store.now(),
      openRequest: (request) => this.openRequest(request),
    });
  }

  refreshSheet(now) {
    const { sheet } = this;
    // Once a second is enough to read, and not while somebody is at a link in it.
    if (!sheet.refresh || now - this.refreshedMs < 1000 || sheet.body.contains(document.activeElement)) return;
    this.refreshedMs = now;
    const parts = sheet.refresh();
    if (parts) sheet.set(...parts);
  }
}

function queueTile(queue, totals) {
  const full = queue.requests_max > 0 && queue.requests >= queue.requests_max;
  const refused = Object.values(queue.refused).reduce((sum, each) => sum + each, 0);
  const under = refused ? `${count(refused)} refused so far` : totals?.for_room ? `${count(totals.for_room)} wait for room for their session` : queue.requests ? "waiting for a worker" : "none waiting or refused";
  return ["queue", count(queue.requests), ` of ${short(queue.requests_max)}`, under, full ? "bad" : refused ? "warn" : ""];
}

readColours();
new Page().start();

// What the router said last, by table, and the requests of the last minutes.

const REQUESTS_KEPT = 6000; // a minute and a half at 60 requests a second; the router keeps them longer

// A worker as cells and sheets take it: what is on it by the router's books, what it holds.
function asShown(worker) {
  worker.running = Math.max(0, worker.active - worker.waiting);
  worker.held = worker.held_blocks;
  worker.total = worker.total_blocks;
}

export class Store {
  constructor() {
    this.values = {};
    this.tables = new Map();
    this.columns = new Map();
    this.requests = new Map();
    this.missed = 0;
    this.clockMs = null;
    this.fresh = []; // keys of requests that came with the last message
    this.wholes = 0;
  }

  // The router's clock now: what is shown as "ago" must not depend on this machine's.
  now() {
    return Date.now() + (this.clockMs ?? 0);
  }

  table(name) {
    return this.tables.get(name) ?? new Map();
  }

  apply(kind, message) {
    const skewMs = message.time_ms - Date.now();
    this.clockMs = this.clockMs === null || Math.abs(skewMs - this.clockMs) > 5000 ? skewMs : Math.max(this.clockMs, skewMs);
    const decidedBefore = this.values.totals?.decisions;
    this.fresh = [];
    if (kind === "whole") this.whole(message, decidedBefore);
    else this.change(message);
  }

  whole(message, decidedBefore) {
    this.wholes += 1;
    this.values = message.values;
    this.tables.clear();
    for (const [name, table] of Object.entries(message.tables)) {
      this.columns.set(name, table.columns);
      if (name !== "requests") this.tables.set(name, new Map());
      this.set(name, table.rows);
    }
    const decided = message.values.totals?.decisions ?? 0;
    const restarted = decidedBefore === undefined || decided < decidedBefore;
    this.missed = restarted ? 0 : Math.max(0, decided - decidedBefore - this.fresh.length);
  }

  change(message) {
    Object.assign(this.values, message.values);
    for (const [name, table] of Object.entries(message.tables)) {
      this.set(name, table.rows);
      if (name === "requests") continue; // the router watches only the last ones; the page keeps more
      const rows = this.tables.get(name);
      for (const key of table.gone) rows?.delete(key);
    }
  }

  set(name, rows) {
    const columns = this.columns.get(name) ?? [];
    const into = name === "requests" ? this.requests : this.tables.get(name);
    if (!into) return;
    for (const row of rows) {
      const value = { key: row[0] };
      for (let at = 0; at < columns.length; at += 1) value[columns[at]] = row[at + 1];
      if (name === "requests" && !into.has(value.key)) this.fresh.push(value.key);
      else if (name === "workers") asShown(value);
      into.set(value.key, value);
    }
    if (name === "requests" && into.size > REQUESTS_KEPT) {
      let over = into.size - REQUESTS_KEPT;
      for (const key of into.keys()) {
        if (over-- <= 0) break;
        into.delete(key);
      }
    }
  }

  // Newest first, at most so many that are accepted. What other processes of the router did comes a moment later.
  newest(limit, accept = () => true) {
    const all = [...this.requests.values()];
    const found = [];
    for (let at = all.length - 1; at >= 0 && found.length < limit; at -= 1) if (accept(all[at])) found.push(all[at]);
    return found.sort((one, other) => other.time_ms - one.time_ms);
  }
}

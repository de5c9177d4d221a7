// The last requests, newest first. The rows are made once and written anew. While somebody points at the list or is in it
// with the keyboard it is held still, and says how many have come since.

import { strong } from "./colours.js";
import { el, setAttribute, setText } from "./dom.js";
import { clock, count, counted, hueOfName, milliseconds, nameOf, percent, short, shortId, statusWords, tone } from "./format.js";

const ROWS = 32;
const STATUSES = "placed on a worker, prefill, output, done; released: answered, and its worker has not said so yet";

const ROUTER = ["time", "request", "worker", "tokens", "cached", "status"];
const GLOBAL = ["time", "request", "pool", "tokens", "TTFT", "status"];
const WIDE = [1, 3]; // not on a phone

export class RequestList {
  constructor(kind, open) {
    this.kind = kind;
    this.open = open;
    this.count = el("span", { class: "count" });
    this.rows = [];
    this.shown = [];
    this.active = 0;
    this.held = false;
    this.fresh = 0;
    const names = kind === "router" ? ROUTER : GLOBAL;
    const wide = (index) => (WIDE.includes(index) ? " wide" : "");
    const head = el(
      "div",
      { class: "row head", role: "row" },
      names.map((name, index) => el("span", { role: "columnheader", class: `${index === 3 ? "number" : ""}${wide(index)}` }, name)),
    );
    for (let at = 0; at < ROWS; at += 1) this.rows.push(this.makeRow(at, wide));
    this.body = el("div", { role: "rowgroup" }, this.rows.map((row) => row.node));
    this.grid = el("div", { class: `rows requests ${kind}`, role: "grid", "aria-label": "Last requests", "aria-readonly": "true" }, el("div", { role: "rowgroup" }, head), this.body);
    this.hint = el("span", {}, "No request yet. Send one, for instance: ", el("code", {}, "poolgrid bench --url " + location.origin));
    this.empty = el("p", { class: "empty" }, this.hint);
    this.node = el("section", { class: "panel", "aria-labelledby": "requests-title" }, el("div", { class: "bar" }, el("h2", { id: "requests-title" }, "Requests"), this.count), this.grid, this.empty, kind === "router" ? el("p", { class: "quiet legend" }, STATUSES) : null);
    this.body.addEventListener("pointerenter", () => this.hold(true));
    this.body.addEventListener("pointerleave", () => this.hold(this.grid.contains(document.activeElement) && this.byKeyboard));
    this.body.addEventListener("focusin", (event) => {
      this.byKeyboard = event.target.matches(":focus-visible");
      if (this.byKeyboard) this.hold(true);
    });
    this.body.addEventListener("focusout", (event) => {
      if (!this.body.contains(event.relatedTarget)) this.hold(false);
    });
    this.body.addEventListener("keydown", (event) => this.onKey(event));
  }

  makeRow(at, wide) {
    const share = el("b");
    const words = el("span");
    const chip = el("i", { class: "chip", "aria-hidden": "true" });
    const name = el("span");
    const statusText = el("span");
    const status = el("span", { class: "status" }, el("i", { "aria-hidden": "true" }), statusText);
    const fifth = this.kind === "router" ? el("span", { class: "share" }, share, words) : el("span", { class: "number" });
    const cells = [
      el("span", { role: "gridcell", class: "quiet" }),
      el("span", { role: "gridcell", class: `mono${wide(1)}` }, this.kind === "router" ? [chip, name] : [name]),
      el("span", { role: "gridcell", class: wide(2) }),
      el("span", { role: "gridcell", class: `number${wide(3)}` }),
      el("span", { role: "gridcell" }, fifth),
      el("span", { role: "gridcell" }, status),
    ];
    const node = el("div", { class: "row", role: "row", tabindex: at === 0 ? "0" : "-1", hidden: true }, cells);
    node.addEventListener("click", () => this.shown[at] && this.open(this.shown[at]));
    return { node, cells, name, chip, share, words, status, statusText, fifth };
  }

  hold(held) {
    if (this.held === held) return;
    this.held = held;
    this.fresh = 0;
    if (!held && this.latest) this.show(this.latest, this.total, this.missed);
    else this.sayCount();
  }

  show(requests, total, missed) {
    const before = this.latest?.[0]?.key;
    this.latest = requests;
    this.total = total;
    this.missed = missed;
    if (this.held) {
      // What is shown stays where it is, and its own news are shown.
      const at = requests.findIndex((each) => each.key === before);
      this.fresh += at < 0 ? requests.length : at;
      const byKey = new Map(requests.map((each) => [each.key, each]));
      this.shown = this.shown.map((each) => byKey.get(each.key) ?? each);
    } else this.shown = requests.slice(0, ROWS);
    this.write();
    this.sayCount();
  }

  sayCount() {
    const words = [];
    if (this.total) words.push(`${count(this.total)} so far`);
    if (this.missed) words.push(`${count(this.missed)} missed while disconnected`);
    if (this.held) words.push(this.fresh ? `paused, ${count(this.fresh)} new` : "paused");
    setText(this.count, words.join(" · "));
  }

  write() {
    this.empty.hidden = this.shown.length > 0;
    this.grid.hidden = this.shown.length === 0;
    for (let at = 0; at < ROWS; at += 1) {
      const row = this.rows[at];
      const request = this.shown[at];
      if (row.node.hidden !== !request) row.node.hidden = !request;
      if (!request || row.last === request) continue;
      row.last = request;
      setText(row.cells[0], clock(request.time_ms, true));
      setText(row.name, shortId(request.request_id));
      setText(row.cells[3], short(request.isl));
      setText(row.statusText, statusWords(request.status));
      setAttribute(row.status, "data-tone", tone(request.status));
      if (this.kind === "router") this.writeRouter(row, request);
      else this.writeGlobal(row, request);
    }
  }

  writeRouter(row, request) {
    const found = request.reused_tokens ?? request.found_tokens;
    const share = request.isl ? found / request.isl : 0;
    setText(row.cells[2], request.worker);
    row.share.style.setProperty("--part", String(Math.min(1, share)));
    setText(row.words, request.stage === "decode" ? "decode" : percent(share));
    row.chip.style.background = request.conversation ? strong(hueOfName(request.conversation)) : "transparent";
    setAttribute(row.node, "aria-label", `${nameOf(request.request_id)}, ${request.worker}, ${counted(request.isl, "token")}, ${percent(share)} cached, ${statusWords(request.status)}`);
  }

  writeGlobal(row, request) {
    const hows = new Map(request.places.map(([, , pool, , how]) => [pool, how]));
    const pools = [...hows].map(([pool, how]) => (how === "grid" || how === "same-pool" ? pool : `${pool}, ${how}`)).join(" → ");
    setText(row.cells[2], pools || "–");
    setText(row.fifth, milliseconds(request.ttft_ms));
    setAttribute(row.node, "aria-label", `${nameOf(request.request_id)}, pool ${pools || "none"}, ${counted(request.isl, "token")}, ${statusWords(request.status)}`);
  }

  onKey(event) {
    const at = this.rows.findIndex((row) => row.node === event.target);
    if (at < 0) return;
    const last = this.shown.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, PageDown: Math.min(last, at + 10), PageUp: Math.max(0, at - 10) }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      if (to < 0 || to > last) return;
      this.rows[at].node.tabIndex = -1;
      this.rows[to].node.tabIndex = 0;
      this.rows[to].node.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.shown[at]) this.open(this.shown[at]);
    } else if (event.key === "Escape") {
      event.preventDefault();
      event.target.blur();
    }
  }
}

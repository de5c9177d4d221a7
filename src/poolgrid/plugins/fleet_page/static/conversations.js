// The latest conversations, and which workers hold how much of each in their caches; what a worker has lost is said too.

import { soft, strong } from "./colours.js";
import { el, setText, svg } from "./dom.js";
import { clock, count, counted, hueOfName, percent, shortId } from "./format.js";

const ROWS = 12;
const HOLDERS = 4;

export class ConversationList {
  constructor(openWorker) {
    this.openWorker = openWorker;
    this.count = el("span", { class: "count" });
    this.body = el("div", { class: "rows conversations", role: "table", "aria-label": "Conversations and the workers that cache them" });
    this.empty = el("p", { class: "empty" }, "No conversation yet. Requests of a session are one conversation. They are tracked while this page is open.");
    this.node = el("section", { class: "panel", "aria-labelledby": "conversations-title" }, el("div", { class: "bar" }, el("h2", { id: "conversations-title" }, "Cached conversations"), this.count), this.body, this.empty);
    this.last = "";
    this.body.addEventListener("keydown", (event) => this.onKey(event));
  }

  // The list is one stop of Tab; arrows go from holder to holder, and from row to row.
  onKey(event) {
    const from = event.target.closest(".holder");
    if (!from) return;
    const rows = [...this.body.querySelectorAll(".row")].filter((row) => row.querySelector(".holder"));
    const row = rows.indexOf(from.closest(".row"));
    const to = {
      ArrowLeft: from.previousElementSibling,
      ArrowRight: from.nextElementSibling,
      ArrowUp: rows[row - 1]?.querySelector(".holder"),
      ArrowDown: rows[row + 1]?.querySelector(".holder"),
    }[event.key];
    if (to === undefined && !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (!to?.matches(".holder")) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  // Takes [{name, turns, blocks, last_ms, holders: [[worker, blocks, lost], …]}, …], latest first.
  show(conversations) {
    // The latest of all, each in its place as long as it is among them.
    const shown = conversations.slice(0, ROWS).sort((one, other) => (one.name < other.name ? -1 : 1));
    const now = JSON.stringify(shown);
    if (now === this.last || this.body.contains(document.activeElement)) return;
    this.last = now;
    this.empty.hidden = shown.length > 0;
    this.body.hidden = shown.length === 0;
    setText(this.count, conversations.length > shown.length ? `the latest ${shown.length} of ${conversations.length}` : "");
    const head = el(
      "div",
      { class: "row head", role: "row" },
      el("span", { role: "columnheader" }, "name"),
      el("span", { role: "columnheader", class: "number" }, "turns"),
      el("span", { role: "columnheader", class: "number wide" }, "blocks"),
      el("span", { role: "columnheader" }, "cached on"),
      el("span", { role: "columnheader", class: "number wide" }, "last"),
    );
    this.body.replaceChildren(head, ...shown.map((each) => this.row(each)));
    for (const [at, holder] of this.body.querySelectorAll(".holder").entries()) holder.tabIndex = at ? -1 : 0;
  }

  row(conversation) {
    const hue = hueOfName(conversation.name);
    const chip = el("i", { class: "chip", style: { background: strong(hue) }, "aria-hidden": "true" });
    const holders = conversation.holders.slice(0, HOLDERS).map((holder) => this.holder(conversation, holder, hue));
    const more = conversation.holders.length - HOLDERS;
    return el(
      "div",
      { class: "row", role: "row", style: { cursor: "default" } },
      el("span", { role: "rowheader", title: conversation.name }, chip, shortId(conversation.name, 9)),
      el("span", { role: "cell", class: "number" }, count(conversation.turns)),
      el("span", { role: "cell", class: "number wide" }, count(conversation.blocks)),
      el("span", { role: "cell", class: "holders" }, holders, more > 0 ? el("span", { class: "quiet" }, `+${more}`) : null, holders.length ? null : el("span", { class: "quiet" }, "no worker")),
      el("span", { role: "cell", class: "number quiet wide" }, conversation.last_ms ? clock(conversation.last_ms) : ""),
    );
  }

  holder(conversation, [worker, blocks, lost], hue) {
    const share = conversation.blocks ? blocks / conversation.blocks : 0;
    const words = `${worker} holds ${counted(blocks, "block")} of ${conversation.name}, ${percent(share)}${lost ? `; ${counted(lost, "block")} evicted` : ""}`;
    return el(
      "button",
      { type: "button", class: blocks ? "holder" : "holder lost", title: words, "aria-label": words, onclick: () => this.openWorker(worker) },
      gauge(share, hue),
      el("span", { class: "name" }, worker),
      el("span", { class: "quiet" }, blocks ? percent(share) : "evicted"),
    );
  }
}

// A small ring: how much of a conversation is there.
export function gauge(share, hue) {
  const around = 2 * Math.PI * 5;
  return svg(
    "svg",
    { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" },
    svg("circle", { cx: 7, cy: 7, r: 5, fill: "none", stroke: soft(hue), "stroke-width": 3 }),
    svg("circle", { cx: 7, cy: 7, r: 5, fill: "none", stroke: strong(hue), "stroke-width": 3, "stroke-dasharray": `${around * Math.min(1, share)} ${around}`, transform: "rotate(-90 7 7)" }),
  );
}

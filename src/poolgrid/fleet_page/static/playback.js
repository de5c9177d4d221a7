// The pool's past: a reel of frames from its journal, shown in the place of what is live.

import { byId, el, say, setText } from "./dom.js";
import { clock, count } from "./format.js";
import { ask } from "./server.js";

const SPANS = [
  [60, "1 min"],
  [300, "5 min"],
  [900, "15 min"],
];
const SPEEDS = [1, 4, 16];
const FRAMES = 121;

export class Playback {
  // ``show`` gets (frame state) for each moment, and null when it is over.
  constructor(now, show) {
    this.now = now;
    this.show = show;
    this.node = byId("playback");
    this.hint = byId("strip-hint");
    this.state = null;
    this.index = 0;
    this.spanS = 60;
    this.speed = 1;
    this.timer = 0;
    this.build();
  }

  build() {
    this.play = el("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.back = el("button", { type: "button", "aria-label": "One frame back", onclick: () => this.step(-1) }, "‹");
    this.on = el("button", { type: "button", "aria-label": "One frame on", onclick: () => this.step(1) }, "›");
    this.slider = el("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Moment", oninput: () => this.go(Number(this.slider.value)) });
    this.when = el("span", { class: "when" });
    this.speeds = el("select", { "aria-label": "Speed", onchange: () => this.setSpeed(Number(this.speeds.value)) }, SPEEDS.map((each) => el("option", { value: String(each) }, `${each}×`)));
    this.spans = el("select", { "aria-label": "Length", onchange: () => this.setSpan(Number(this.spans.value)) }, SPANS.map(([seconds, words]) => el("option", { value: String(seconds) }, words)));
    this.live = el("button", { type: "button", class: "live", onclick: () => this.end() }, "Back to now");
    this.node.replaceChildren(this.back, this.play, this.on, this.slider, this.when, this.speeds, this.spans, this.live);
  }

  get isOn() {
    return this.state !== null;
  }

  async open(atMs) {
    this.pause();
    const spanMs = this.spanS * 1000;
    const nowMs = this.now();
    const toMs = Math.min(Math.round(nowMs), Math.round(atMs + spanMs / 2));
    const fromMs = toMs - spanMs;
    this.atMs = atMs;
    this.node.hidden = false;
    setText(this.hint, "reading the journal…");
    this.hint.hidden = false;
    const turn = (this.turn = {});
    try {
      const reel = await ask(`v1/fleet/playback?from_ms=${fromMs}&to_ms=${toMs}&frames=${FRAMES}`);
      if (turn !== this.turn) return;
      this.load(reel, atMs);
    } catch (error) {
      if (turn !== this.turn) return;
      if (this.isOn) setText(this.hint, error.message);
      else {
        this.node.hidden = true;
        setText(this.hint, error.message);
      }
      say(error.message);
    }
  }

  load(reel, atMs) {
    this.reel = reel;
    this.state = { workers: new Map(), holders: new Map(), active: new Map(), at: -1, reel };
    this.slider.max = String(reel.frames.length - 1);
    setText(this.hint, reel.cut);
    this.hint.hidden = !reel.cut;
    let index = reel.frames.findIndex((frame) => frame.time_ms >= atMs);
    if (index < 0) index = reel.frames.length - 1;
    this.go(index);
    say(`The pool as of ${clock(reel.frames[index].time_ms)}`);
    if (!this.node.contains(document.activeElement)) this.play.focus();
  }

  // Folds frames up to an index; backwards it begins anew, which is a few hundred small steps.
  go(index) {
    const { reel, state } = this;
    if (!reel || !state) return;
    const to = Math.max(0, Math.min(reel.frames.length - 1, index));
    if (to < state.at || state.at < 0) {
      state.workers.clear();
      state.holders.clear();
      state.active = new Map(reel.active.map((each) => [each[0], each]));
      state.at = -1;
    }
    while (state.at < to) {
      state.at += 1;
      const frame = reel.frames[state.at];
      for (const [key, row] of Object.entries(frame.workers)) {
        const worker = { key };
        reel.columns.forEach((name, column) => (worker[name] = row[column]));
        worker.running = Math.max(0, worker.requests - worker.waiting);
        worker.trusted = worker.stream !== "stale";
        worker.note = "";
        state.workers.set(key, worker);
      }
      for (const key of frame.gone) state.workers.delete(key);
      for (const [name, holders] of Object.entries(frame.holders)) state.holders.set(name, holders);
      for (const began of frame.began) state.active.set(began[0], began);
      for (const ended of frame.ended) state.active.delete(ended[0]);
    }
    const frame = reel.frames[to];
    this.index = to;
    state.frame = frame;
    this.slider.value = String(to);
    this.slider.setAttribute("aria-valuetext", clock(frame.time_ms));
    setText(this.when, clock(frame.time_ms, true));
    this.when.title = `journal record ${count(frame.offset)}`;
    this.show(state);
  }

  step(by) {
    this.pause();
    this.go(this.index + by);
  }

  toggle() {
    if (this.timer) this.pause();
    else {
      if (this.index >= this.reel.frames.length - 1) this.go(0);
      setText(this.play, "Pause");
      this.next();
    }
  }

  next() {
    const { frames } = this.reel;
    if (this.index >= frames.length - 1) {
      this.pause();
      return;
    }
    const waitMs = (frames[this.index + 1].time_ms - frames[this.index].time_ms) / this.speed;
    this.timer = setTimeout(() => {
      this.go(this.index + 1);
      this.next();
    }, Math.max(30, waitMs));
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = 0;
    setText(this.play, "Play");
  }

  setSpeed(speed) {
    this.speed = speed;
  }

  setSpan(seconds) {
    this.spanS = seconds;
    if (this.isOn) this.open(this.reel.frames[this.index].time_ms);
  }

  end() {
    this.pause();
    this.turn = null;
    this.state = this.reel = null;
    this.node.hidden = true;
    this.hint.hidden = false;
    setText(this.hint, "click a moment to see the pool as it was then");
    this.show(null);
    say("Back to now");
  }

  onKey(event) {
    if (!this.isOn || event.target.closest("input, select, dialog, [role=grid], [role=slider]")) return false;
    if (event.key === " " && event.target.tagName !== "BUTTON") this.toggle();
    else if (event.key === ",") this.step(-1);
    else if (event.key === ".") this.step(1);
    else return false;
    event.preventDefault();
    return true;
  }
}

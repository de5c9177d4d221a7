// Questions to the router, and its stream of events. The key is a header of each, and never part of an address.

const KEY = "poolgrid-operator-key";
const SILENCE_MS = 15000; // the router says something every five seconds
const RETRY_MIN_MS = 500;
const RETRY_MAX_MS = 8000;
const HIDDEN_MS = 30000; // nobody sees a page that is hidden for longer: it lets go of its place

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // A browser that keeps nothing asks again on a reload.
}

export const hasKey = () => key !== "";

export function useKey(value, keep) {
  key = value;
  try {
    if (keep && value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It then holds until the page is left.
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }
}

function headers(more) {
  return key ? { authorization: `Bearer ${key}`, ...more } : { ...more };
}

async function fetched(path, more, signal) {
  const answer = await fetch(new URL(path, document.baseURI), { headers: headers(more), signal, cache: "no-store", credentials: "omit", redirect: "error" });
  if (answer.ok) return answer;
  let message = `the router answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message ?? message;
  } catch {
    // Something in between answered; its status has to do.
  }
  throw new Refused(answer.status, message);
}

export async function ask(path, signal) {
  return (await fetched(path, {}, signal)).json();
}

// Follows the stream for ever: after a break it goes on with what was missed. ``tell`` gets (kind, data).
export class Stream {
  constructor(tell, onState) {
    this.tell = tell;
    this.onState = onState;
    this.last = "";
    this.retryMs = RETRY_MIN_MS;
    this.timer = 0;
    this.hideTimer = 0;
    this.controller = null;
    document.addEventListener("visibilitychange", () => this.onVisible());
  }

  start() {
    clearTimeout(this.timer);
    this.controller?.abort();
    this.run();
  }

  onVisible() {
    clearTimeout(this.hideTimer);
    if (document.hidden) {
      this.hideTimer = setTimeout(() => {
        this.stopped = true;
        clearTimeout(this.timer);
        this.controller?.abort();
      }, HIDDEN_MS);
    } else if (this.stopped) {
      this.stopped = false;
      this.retryMs = RETRY_MIN_MS;
      this.start();
    }
  }

  async run() {
    const controller = (this.controller = new AbortController());
    this.onState("connecting", "");
    let why = "the connection ended";
    let silent = 0;
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => controller.abort(), SILENCE_MS);
    };
    try {
      heard();
      const answer = await fetched("v1/fleet/stream", this.last ? { "last-event-id": this.last } : {}, controller.signal);
      this.onState("live", "");
      this.retryMs = RETRY_MIN_MS;
      await this.read(answer.body.getReader(), heard);
    } catch (error) {
      if (controller !== this.controller || this.stopped) return;
      if (error instanceof Refused) {
        why = error.message;
        if (error.wantsKey) {
          this.onState("key", why);
          return;
        }
      } else why = controller.signal.aborted ? "the router has been silent" : "the router does not answer";
    } finally {
      clearTimeout(silent);
    }
    if (controller !== this.controller || this.stopped) return;
    this.onState("lost", why);
    this.timer = setTimeout(() => this.run(), this.retryMs * (0.8 + 0.4 * Math.random()));
    this.retryMs = Math.min(RETRY_MAX_MS, 2 * this.retryMs);
  }

  async read(reader, heard) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      text += decoder.decode(value, { stream: true });
      let end = text.indexOf("\n\n");
      if (end < 0) continue;
      let at = 0;
      for (; end >= 0; end = text.indexOf("\n\n", at)) {
        this.event(text.slice(at, end));
        at = end + 2;
      }
      text = text.slice(at);
    }
  }

  event(text) {
    let kind = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("id: ")) this.last = line.slice(4);
      else if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (kind && data) this.tell(kind, JSON.parse(data));
  }
}

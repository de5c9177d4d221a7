// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const short = (value) => (value === null || value === undefined ? "–" : value < 10000 ? whole.format(value) : compact.format(value));
export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)}\u00a0%` : "–");
export const counted = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function milliseconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return value < 60000 ? `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s` : `${Math.round(value / 60000)} min`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(ms, fine = false) {
  const at = new Date(ms);
  const text = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return fine ? `${text}.${Math.floor(at.getMilliseconds() / 100)}` : text;
}

export function rate(perSecond) {
  if (!Number.isFinite(perSecond)) return "–";
  return perSecond < 10 ? perSecond.toFixed(1) : whole.format(perSecond);
}

// Hues that stay apart for neighbours: steps of the golden angle.
export const hue = (number) => (number * 137.508 + 205) % 360;
export const hueOfName = (name) => hue(Number.parseInt(name.slice(1), 10) || 0);

const STATUS_WORDS = { "": "sent", stop: "done", length: "max tokens" };

export const statusWords = (status) => STATUS_WORDS[status] ?? status;

const FAILED = new Set(["error", "cancelled", "poison"]);

export function tone(status) {
  if (status === "stop" || status === "length") return "good";
  if (status === "placed" || status === "prefill" || status === "output" || status === "in flight") return "busy";
  if (FAILED.has(status) || status.startsWith("refused")) return "bad";
  return status === "migrated" ? "warn" : "";
}

export const nameOf = (requestId) => requestId.split("~", 1)[0];

// Ids of one router begin alike: their end is what tells them apart.
export const shortId = (requestId, most = 11) => {
  const name = nameOf(requestId);
  return name.length > most ? `…${name.slice(1 - most)}` : name;
};

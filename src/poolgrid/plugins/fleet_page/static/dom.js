// Elements without markup: text stays text, whatever a worker or a request is called.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes, children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, attributes, children);
  return node;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") {
      for (const [property, each] of Object.entries(value)) {
        if (property.startsWith("--")) node.style.setProperty(property, each);
        else node.style[property] = each;
      }
    }
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
}

export const byId = (id) => document.getElementById(id);

// Only what differs is written: a browser lays out again for each text that is set, also for an equal one.
export function setText(node, text) {
  const only = node.firstChild;
  if (only !== null && only === node.lastChild && only.nodeType === Node.TEXT_NODE) {
    if (only.data !== text) only.data = text; // the node stays, and nothing is made anew
  } else if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// An address that others chose becomes a link only when it is one of the web.
export function webAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : "";
  } catch {
    return "";
  }
}

// Everything that draws asks here for the next frame; while nothing changes and nothing moves, no frame is asked for.
const waiting = new Set();
let asked = false;

export function onNextFrame(draw) {
  waiting.add(draw);
  if (!asked) {
    asked = true;
    requestAnimationFrame((now) => {
      asked = false;
      const drawing = [...waiting];
      waiting.clear();
      for (const each of drawing) each(now);
    });
  }
}

// For what fades: ten steps a second look as smooth as sixty, and the frames between have nothing to draw.
const FADE_STEP_MS = 100;
const fading = new Set();

export function onFadeStep(draw) {
  if (fading.has(draw)) return;
  fading.add(draw);
  setTimeout(() => {
    fading.delete(draw);
    onNextFrame(draw);
  }, FADE_STEP_MS);
}

export function say(words) {
  setText(byId("told"), words);
}

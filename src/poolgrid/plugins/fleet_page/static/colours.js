// The page's colours for what is drawn on a canvas, and for pools and conversations. They change with the theme.

const NAMES = ["ground", "surface", "raised", "line", "ink", "quiet", "accent", "accent-soft", "good", "warn", "bad", "cell", "fill"];
const listeners = [];
const KEY = "poolgrid-theme";
const THEMES = ["", "light", "dark"];
const WORDS = { "": "Auto", light: "Light", dark: "Dark" };

export const colours = {};

export function readColours() {
  // A colour that depends on the theme is only known where it is used.
  const probe = document.createElement("span");
  document.body.append(probe);
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  colours.dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (
    getComputedStyle(document.documentElement).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches
  );
  for (const listener of listeners) listener();
}

export function onTheme(listener) {
  listeners.push(listener);
}

// By hue, with a lightness that keeps text of the page's ink readable on the softer one.
export const strong = (hue) => (colours.dark ? `hsl(${hue} 62% 62%)` : `hsl(${hue} 60% 42%)`);
export const soft = (hue) => (colours.dark ? `hsl(${hue} 38% 30%)` : `hsl(${hue} 62% 84%)`);

function show(button, theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  button.textContent = WORDS[theme];
  button.setAttribute("aria-label", `Colours: ${theme || "as the system has them"}`);
  readColours();
}

export function startTheme(button) {
  let theme = "";
  try {
    theme = localStorage.getItem(KEY) ?? "";
  } catch {
    // A browser that keeps nothing for pages shows what the system has.
  }
  show(button, THEMES.includes(theme) ? theme : "");
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // It then holds for this visit.
    }
    show(button, next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);
}

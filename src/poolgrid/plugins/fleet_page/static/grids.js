// The pool grids of a global router: which pool each cell goes to, and the cells that requests fell into.

import { colours, onTheme, soft, strong } from "./colours.js";
import { el, onFadeStep, onNextFrame, setAttribute, setText, webAddress } from "./dom.js";
import { count, counted, hue, percent, short, tone } from "./format.js";

const LEFT = 74;
const FOOT = 34;
const FLASH_MS = 900;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const AXIS_WORDS = { isl: "prompt", context_length: "context", ttft: "TTFT target", itl: "ITL target" };

export const poolHue = (stage, pool) => hue(Math.max(0, stage.pools.findIndex((each) => each.name === pool)) + (stage.stage === "decode" ? 5 : 0));

// The colour of a pool's cells, and that of its dots.
const swatch = (stage, { name }) => `linear-gradient(135deg, ${soft(poolHue(stage, name))} 50%, ${strong(poolHue(stage, name))} 50%)`;

function expand(runs) {
  const cells = [];
  for (const [pool, times] of runs) for (let at = 0; at < times; at += 1) cells.push(pool);
  return cells;
}

const bound = (axis, index) => axis.minimum + (index * (axis.maximum - axis.minimum)) / axis.resolution;

function range(axis, index) {
  const unit = axis.unit === "ms" ? " ms" : "";
  const round = (value) => short(Math.round(value));
  if (axis.resolution === 1) return "all";
  if (index === 0) return `< ${round(bound(axis, 1))}${unit}`;
  if (index === axis.resolution - 1) return `≥ ${round(bound(axis, index))}${unit}`;
  return `${round(bound(axis, index))}–${round(bound(axis, index + 1))}${unit}`;
}

const axisName = (axis) => `${AXIS_WORDS[axis.name] ?? axis.name} (${axis.unit})`;

class StageGrid {
  constructor(stage, open) {
    this.stage = stage;
    this.open = open;
    this.pools = expand(stage.cells);
    this.rowsAxis = stage.axes.at(-2);
    this.columnsAxis = stage.axes.at(-1);
    this.layers = stage.axes.slice(0, -2);
    this.layer = 0;
    this.perLayer = this.rowsAxis.resolution * this.columnsAxis.resolution;
    this.tally = new Map(); // cell -> [requests, index of the pool -> requests that it took]
    this.flashes = new Map();
    this.active = 0;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.cell = el("div", { role: "gridcell", id: `cell-${stage.stage}` });
    this.row = el("div", { role: "row" }, this.cell);
    this.grid = el(
      "div",
      {
        class: "grid", role: "grid", tabindex: "0", "aria-label": `Grid of the ${stage.stage} stage: rows ${axisName(this.rowsAxis)}, columns ${axisName(this.columnsAxis)}`,
        "aria-activedescendant": `cell-${stage.stage}`, "aria-rowcount": String(this.rowsAxis.resolution), "aria-colcount": String(this.columnsAxis.resolution),
      },
      this.canvas,
      el("div", { class: "unseen", role: "rowgroup" }, this.row),
    );
    const legend = stage.pools.map((pool) => el("span", {}, el("i", { style: { background: swatch(stage, pool) } }), pool.name));
    this.node = el(
      "section",
      { class: "panel", "aria-label": `Pools of the ${stage.stage} stage` },
      el("div", { class: "bar" }, el("h2", {}, stage.stage === "aggregated" ? "Pool grid" : `Pool grid, ${stage.stage}`), el("span", { class: "count" }, "requests of the last minute, by cell"), this.layerChoice()),
      el("div", { class: "canvas-box" }, this.grid),
      el("div", { class: "legend" }, legend),
    );
    this.draw = (now) => this.paint(now);
    new ResizeObserver(() => this.layOut()).observe(this.grid);
    onTheme(() => {
      legend.forEach((each, at) => (each.firstChild.style.background = swatch(stage, stage.pools[at])));
      onNextFrame(this.draw);
    });
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    this.grid.addEventListener("focus", () => onNextFrame(this.draw));
    this.grid.addEventListener("blur", () => onNextFrame(this.draw));
    this.canvas.addEventListener("click", (event) => {
      const index = this.indexAt(event);
      if (index < 0) return;
      this.active = index;
      this.sayActive();
      this.open(this.stage, this.fullCell(index));
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const index = this.indexAt(event);
      this.canvas.title = index < 0 ? "" : this.describe(index);
      this.canvas.style.cursor = index < 0 ? "default" : "pointer";
    });
    this.sayActive();
  }

  layerChoice() {
    if (!this.layers.length) return null;
    const total = this.layers.reduce((product, axis) => product * axis.resolution, 1);
    const options = Array.from({ length: total }, (_, at) => {
      const words = this.layerCell(at).map((index, axis) => `${AXIS_WORDS[this.layers[axis].name]} ${range(this.layers[axis], index)}`);
      return el("option", { value: String(at) }, words.join(", "));
    });
    return el("select", {
      class: "tool", "aria-label": "Layer", onchange: (event) => {
        this.layer = Number(event.target.value);
        onNextFrame(this.draw);
        this.sayActive();
      },
    }, options);
  }

  layerCell(at) {
    const cell = [];
    for (let axis = this.layers.length - 1, rest = at; axis >= 0; axis -= 1) {
      cell.unshift(rest % this.layers[axis].resolution);
      rest = Math.floor(rest / this.layers[axis].resolution);
    }
    return cell;
  }

  fullCell(index) {
    const columns = this.columnsAxis.resolution;
    return [...this.layerCell(this.layer), Math.floor(index / columns), index % columns];
  }

  flat(cell) {
    return this.stage.axes.reduce((sum, axis, at) => sum * axis.resolution + cell[at], 0);
  }

  // Takes the placements of this stage within the span that is shown: [cell, pool] each, oldest first.
  show(placements) {
    this.tally.clear();
    for (const [cell, pool] of placements) {
      const at = this.flat(cell);
      const before = this.tally.get(at);
      const index = this.stage.pools.findIndex((each) => each.name === pool);
      if (before) {
        before[0] += 1;
        before[1].set(index, (before[1].get(index) ?? 0) + 1);
      } else this.tally.set(at, [1, new Map([[index, 1]])]);
    }
    onNextFrame(this.draw);
    this.sayActive();
  }

  flash(cell) {
    this.flashes.set(this.flat(cell), performance.now());
    onNextFrame(this.draw);
  }

  layOut() {
    const width = Math.floor(this.grid.clientWidth);
    if (!width) return;
    this.width = width;
    this.cellWidth = (width - LEFT) / this.columnsAxis.resolution;
    this.cellHeight = Math.max(5, Math.min(60, Math.max(300 / this.rowsAxis.resolution, 14)));
    const height = this.cellHeight * this.rowsAxis.resolution + FOOT;
    const ratio = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.height = height;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    onNextFrame(this.draw);
  }

  indexAt(event) {
    const column = Math.floor((event.offsetX - LEFT) / this.cellWidth);
    const row = Math.floor(event.offsetY / this.cellHeight);
    const inside = event.offsetX >= LEFT && column < this.columnsAxis.resolution && row < this.rowsAxis.resolution;
    return inside ? row * this.columnsAxis.resolution + column : -1;
  }

  onKey(event) {
    const columns = this.columnsAxis.resolution;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    let to = this.active;
    if (event.key in steps) to += steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.perLayer - 1;
    else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open(this.stage, this.fullCell(this.active));
      return;
    } else return;
    event.preventDefault();
    if (to >= 0 && to < this.perLayer) this.active = to;
    this.sayActive();
    onNextFrame(this.draw);
  }

  describe(index) {
    const cell = this.fullCell(index);
    const at = this.flat(cell);
    const tally = this.tally.get(at);
    const where = cell.map((each, axis) => `${AXIS_WORDS[this.stage.axes[axis].name] ?? this.stage.axes[axis].name} ${range(this.stage.axes[axis], each)}`);
    return `${where.join(", ")}: pool ${this.stage.pools[this.pools[at]].name}, ${tally ? counted(tally[0], "request") : "no request"}${tally?.[1].size > 1 ? `, taken by ${[...tally[1]].map(([pool, taken]) => `${this.stage.pools[pool]?.name ?? "another pool"} ${taken}`).join(", ")}` : ""}`;
  }

  sayActive() {
    setText(this.cell, this.describe(this.active));
    setAttribute(this.row, "aria-rowindex", String(Math.floor(this.active / this.columnsAxis.resolution) + 1));
    setAttribute(this.cell, "aria-colindex", String((this.active % this.columnsAxis.resolution) + 1));
  }

  paint(now) {
    const { context, width, cellWidth, cellHeight, stage } = this;
    if (!width) return;
    context.fillStyle = colours.surface;
    context.fillRect(0, 0, width, this.height);
    const columns = this.columnsAxis.resolution;
    const base = this.layer * this.perLayer;
    const gap = cellWidth > 14 && cellHeight > 14 ? 2 : cellWidth > 5 ? 1 : 0;
    const most = Math.max(1, ...[...this.tally.values()].map((each) => each[0]));
    for (let index = 0; index < this.perLayer; index += 1) {
      const x = LEFT + (index % columns) * cellWidth;
      const y = Math.floor(index / columns) * cellHeight;
      const at = base + index;
      context.fillStyle = soft(poolHue(stage, stage.pools[this.pools[at]].name));
      context.fillRect(x, y, cellWidth - gap, cellHeight - gap);
      const began = this.flashes.get(at);
      if (began !== undefined) {
        const left = 1 - (now - began) / FLASH_MS;
        if (left <= 0) this.flashes.delete(at);
        else {
          context.globalAlpha = 0.3 * left;
          context.fillStyle = colours.accent;
          context.fillRect(x, y, cellWidth - gap, cellHeight - gap);
          context.globalAlpha = 1;
        }
      }
      const tally = this.tally.get(at);
      if (tally) this.dot(tally, x + (cellWidth - gap) / 2, y + (cellHeight - gap) / 2, most);
    }
    if (document.activeElement === this.grid) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(LEFT + (this.active % columns) * cellWidth, Math.floor(this.active / columns) * cellHeight, cellWidth - gap, cellHeight - gap);
    }
    this.labels();
    if (this.flashes.size) onFadeStep(this.draw);
  }

  // A dot has a sector for each pool that took requests of the cell.
  dot([requests, pools], x, y, most) {
    const { context, cellWidth, cellHeight, stage } = this;
    const room = Math.min(34, cellWidth / 2, cellHeight / 2) - 2;
    const radius = Math.max(2, room * Math.sqrt(requests / most));
    let from = -Math.PI / 2;
    for (const [pool, taken] of [...pools].sort(([one], [other]) => one - other)) {
      const to = from + (2 * Math.PI * taken) / requests;
      context.fillStyle = strong(poolHue(stage, stage.pools[pool]?.name));
      context.beginPath();
      if (pools.size > 1) context.moveTo(x, y);
      context.arc(x, y, radius, from, to);
      context.fill();
      from = to;
    }
    if (radius >= 9) {
      context.fillStyle = colours.surface;
      context.font = `600 10.5px ${FONT}`;
      context.textAlign = "center";
      context.fillText(requests > 999 ? "999+" : String(requests), x, y + 3.5);
      context.textAlign = "left";
    }
  }

  labels() {
    const { context, width, cellWidth, cellHeight } = this;
    context.fillStyle = colours.quiet;
    context.font = `10.5px ${FONT}`;
    const everyRow = Math.max(1, Math.ceil(15 / cellHeight));
    context.textAlign = "right";
    for (let row = 0; row < this.rowsAxis.resolution; row += everyRow) context.fillText(range(this.rowsAxis, row), LEFT - 6, row * cellHeight + cellHeight / 2 + 3);
    const everyColumn = Math.max(1, Math.ceil(72 / cellWidth));
    context.textAlign = "center";
    const foot = cellHeight * this.rowsAxis.resolution;
    for (let column = 0; column < this.columnsAxis.resolution; column += everyColumn) context.fillText(range(this.columnsAxis, column), LEFT + (column + everyColumn / 2) * cellWidth - (everyColumn > 1 ? (everyColumn - 1) * cellWidth * 0.5 : 0), foot + 13);
    context.fillText(`${axisName(this.columnsAxis)} →`, LEFT + (width - LEFT) / 2, foot + 29);
    context.textAlign = "left";
    context.fillText(`↓ ${AXIS_WORDS[this.rowsAxis.name] ?? this.rowsAxis.name}`, 0, foot + 13);
  }
}

export class PoolGrids {
  constructor(open) {
    this.open = open;
    this.node = el("div", { class: "column" });
    this.stages = [];
    this.revision = null;
  }

  use(grids) {
    if (this.revision === `${grids.revision}:${grids.source}`) return;
    this.revision = `${grids.revision}:${grids.source}`;
    this.stages = grids.stages.map((stage) => new StageGrid(stage, this.open));
    this.node.replaceChildren(...this.stages.map((each) => each.node));
  }

  // Takes requests oldest first.
  show(requests) {
    for (const grid of this.stages) {
      const placements = [];
      for (const request of requests) for (const [stage, , pool, , , cell] of request.places) if (stage === grid.stage.stage && this.fits(grid, cell)) placements.push([cell, pool]);
      grid.show(placements);
    }
  }

  fits(grid, cell) {
    return cell.length === grid.stage.axes.length && cell.every((index, axis) => index < grid.stage.axes[axis].resolution);
  }

  flash(request) {
    for (const [stage, , , , , cell] of request.places) {
      const grid = this.stages.find((each) => each.stage.stage === stage);
      if (grid && this.fits(grid, cell)) grid.flash(cell);
    }
  }

  stageOf(name) {
    return this.stages.find((each) => each.stage.stage === name)?.stage;
  }
}

const POOL_TONES = { available: "good", saturated: "warn", draining: "warn", connecting: "warn", loading: "warn", "breaker-open": "bad", down: "bad" };

export const poolTone = (pool) => POOL_TONES[pool.state] ?? tone(pool.state);

// Every pool: its state, its load, its own page.
export class PoolList {
  constructor() {
    this.count = el("span", { class: "count" });
    this.body = el("div", { class: "rows pools", role: "table", "aria-label": "Pools" });
    this.node = el("section", { class: "panel", "aria-labelledby": "pools-title" }, el("div", { class: "bar" }, el("h2", { id: "pools-title" }, "Pools"), this.count), this.body);
    this.last = "";
  }

  show(pools) {
    const now = JSON.stringify(pools);
    if (now === this.last || this.body.contains(document.activeElement)) return;
    this.last = now;
    const up = pools.filter((pool) => poolTone(pool) !== "bad").length;
    setText(this.count, `${count(up)} of ${count(pools.length)} usable`);
    const head = ["pool", "state", "load", "in flight", "waiting", "page"].map((name, at) => el("span", { role: "columnheader", class: `${at === 3 || at === 4 ? "number" : ""}${at === 3 || at === 4 ? " wide" : ""}` }, name));
    this.body.replaceChildren(el("div", { class: "row head", role: "row" }, head), ...pools.map((pool) => this.row(pool)));
  }

  row(pool) {
    const load = pool.capacity ? pool.requests / pool.capacity : 0;
    const fill = el("b", { style: { "--part": String(Math.min(1, load)) } });
    const page = webAddress(pool.url ?? "");
    const words = pool.breaker !== "closed" ? `breaker ${pool.breaker}` : pool.state;
    return el(
      "div",
      { class: "row", role: "row", style: { cursor: "default" }, title: pool.reason || null },
      el("span", { role: "rowheader" }, pool.pool),
      el("span", { role: "cell" }, el("span", { class: "status", "data-tone": poolTone(pool) }, el("i", { "aria-hidden": "true" }), words)),
      el("span", { role: "cell" }, el("span", { class: "share load" }, fill, el("span", {}, pool.capacity ? `${count(pool.requests)} of ${count(pool.capacity)}` : percent(load)))),
      el("span", { role: "cell", class: "number wide" }, count(pool.in_flight)),
      el("span", { role: "cell", class: "number wide" }, count(pool.waiting)),
      el("span", { role: "cell" }, page ? el("a", { href: `${page.replace(/\/$/, "")}/ui`, target: "_blank", rel: "noreferrer" }, "open") : ""),
    );
  }
}

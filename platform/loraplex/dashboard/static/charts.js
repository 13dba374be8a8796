// Small live charts: one uPlot in each tile, all with one cursor. The gateway sends points and figures, ready to show.

import { listen } from "./live.js";

const HEIGHT = 112;
const STEPS = ["--series-1", "--series-2", "--series-3"];
const WHOLE = [1, 2, 5].flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((ten) => one * ten)).sort((left, right) => left - right);
const plots = new Map();

const write = {
  s: (value) => (value === 0 ? "0" : value < 1e-3 ? `${+(value * 1e6).toPrecision(2)} µs` : value < 1 ? `${+(value * 1e3).toPrecision(3)} ms` : value < 120 ? `${+value.toPrecision(3)} s` : `${+(value / 60).toPrecision(3)} min`),
  ratio: (value) => `${+(value * 100).toPrecision(3)} %`,
  count: (value) => (Math.abs(value) >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : String(+value.toPrecision(3))),
  rate: (value) => `${write.count(value)}/s`,
};

function read(name) {
  // light-dark() is resolved where it is used as a colour, not in the custom property itself
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function pad(value) {
  return String(value).padStart(2, "0");
}

function tellTime(seconds) {
  const at = new Date(seconds * 1e3);
  return `${pad(at.getUTCHours())}:${pad(at.getUTCMinutes())}:${pad(at.getUTCSeconds())}`;
}

function fill(values) {
  // uPlot wants numbers or nothing; undefined would be drawn as zero
  return values.map((value) => value ?? null);
}

class Chart {
  constructor(root, tile, at) {
    this.root = root;
    this.place = root.querySelector(".chart");
    this.readout = root.querySelector(".readout");
    this.place.setAttribute("role", "img");
    this.draw(tile, at);
    new ResizeObserver(() => this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT })).observe(this.place);
  }

  draw(tile, at) {
    this.tile = tile;
    const [line, muted] = [read("--line"), read("--muted")];
    const colours = STEPS.map(read);
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "10px system-ui, sans-serif" };
    const options = {
      width: this.place.clientWidth || 240,
      height: HEIGHT,
      padding: [6, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "overview" }, y: false, drag: { x: false, y: false }, points: { size: 5 } },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
      scales: { y: { range: (_, __, max) => [0, this.limit(max)] } },
      axes: [
        { ...axis, size: 24, gap: 8, space: 56, values: (_, splits) => splits.map((one) => tellTime(one).slice(0, 5)) },
        { ...axis, size: 48, gap: 6, space: 28, ...(tile.unit === "count" ? { incrs: WHOLE } : {}), values: (_, splits) => splits.map((one) => write[this.tile.unit](one)) },
      ],
      series: [{}, ...tile.lines.map((one, index) => ({ label: one.label, stroke: colours[index], width: 1.5, points: { show: at.length < 12, size: 4 } }))],
      hooks: { setCursor: [(plot) => this.say(plot.cursor.idx)] },
    };
    this.plot?.destroy();
    this.plot = new uPlot(options, this.data(tile, at), this.place);
    this.label();
  }

  data(tile, at) {
    return [at, ...tile.lines.map((one) => fill(one.values))];
  }

  limit(max) {
    if (this.tile.unit === "ratio") return 1;
    if (!(max > 0)) return this.tile.unit === "s" ? 0.1 : 1;
    return max * 1.1;
  }

  update(tile, at) {
    this.tile = tile;
    this.plot.setData(this.data(tile, at));
    this.root.querySelectorAll(".tile-figures dd").forEach((one, index) => (one.textContent = tile.figures[index][1]));
    this.label();
  }

  label() {
    this.place.classList.toggle("no-data", !this.tile.lines.some((one) => one.values.some((value) => value !== null && value !== undefined)));
    this.place.setAttribute("aria-label", `${this.tile.title}: ${this.tile.figures.map(([name, text]) => `${name} ${text}`).join(", ")}`);
  }

  say(index) {
    if (index === null || index === undefined) {
      this.readout.textContent = this.tile.hint;
      return;
    }
    const found = this.tile.lines.map((one) => [one.label, one.values[index]]);
    const texts = found.map(([name, value]) => `${name} ${value === null || value === undefined ? "–" : write[this.tile.unit](value)}`);
    this.readout.textContent = `${tellTime(this.plot.data[0][index])} · ${texts.join(" · ")}`;
  }
}

function take(charts) {
  for (const tile of charts.tiles) {
    const root = document.querySelector(`[data-tile="${CSS.escape(tile.id)}"]`);
    if (!root) continue;
    if (plots.has(tile.id)) plots.get(tile.id).update(tile, charts.at);
    else plots.set(tile.id, new Chart(root, tile, charts.at));
  }
}

let latest = JSON.parse(document.getElementById("charts").dataset.charts);
take(latest);
listen("charts", (charts) => take((latest = charts)));

function redraw() {
  for (const chart of plots.values()) chart.draw(chart.tile, latest.at);
}
document.addEventListener("theme", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// Versions over time: bytes of each above, its changed share below, on one x axis.

import { byId, draw, make, setAttribute, setText } from "./dom.js";
import { bytes, moment, several, share, whole } from "./format.js";

const EDGE = { left: 62, right: 12, top: 18, bottom: 34 };
const BETWEEN = 24;
const BYTES_PART = 0.62;
const ROUND = [1, 2, 2.5, 5, 10];

/** The smallest round number that is at least `value`. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ROUND.find((step) => step * power >= value * (1 - 1e-9));
}

/** Ticks of a log axis: powers of ten, thinned until at most `most` are left. */
export function decades(low, high, most) {
  const powers = [];
  for (let power = low; power <= high; power += 1) powers.push(power);
  const every = Math.ceil(powers.length / most);
  return powers.filter((power) => (power - low) % every === 0).map((power) => 10 ** power);
}

export class VersionsChart {
  constructor(tip) {
    this.tip = tip;
    this.svg = byId("versions-chart");
    this.isLog = true;
    this.versions = [];
    this.at = -1;
    new ResizeObserver(() => this.#render()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.svg.addEventListener("pointerleave", () => this.#select(-1));
    this.svg.addEventListener("focus", () => this.#select(this.versions.length - 1));
    this.svg.addEventListener("blur", () => this.#select(-1));
    this.svg.addEventListener("keydown", (event) => this.#step(event));
    byId("versions-log").addEventListener("change", () => this.#scale(true));
    byId("versions-linear").addEventListener("change", () => this.#scale(false));
  }

  draw({ versions }, now_ms) {
    const oldest = [...versions].reverse();
    const mark = JSON.stringify([oldest.length, oldest.at(-1), oldest[0]?.version]);
    this.now_ms = now_ms;
    if (mark === this.mark) return;
    this.mark = mark;
    this.versions = oldest;
    byId("versions-empty").hidden = oldest.length > 0;
    setAttribute(byId("versions-body"), "hidden", oldest.length === 0);
    this.#render();
  }

  #scale(isLog) {
    this.isLog = isLog;
    this.#render();
  }

  #render() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width || !this.versions.length) return;
    this.box = { width, height };
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${height}`);
    const inner = height - EDGE.top - EDGE.bottom - BETWEEN;
    this.bytesBottom = EDGE.top + inner * BYTES_PART;
    this.shareTop = this.bytesBottom + BETWEEN;
    this.shareBottom = height - EDGE.bottom;
    this.band = (width - EDGE.left - EDGE.right) / this.versions.length;
    this.cursor = draw("line", { class: "cursor", y1: EDGE.top - 6, y2: this.shareBottom });
    const parts = [...this.#bytesPanel(), ...this.#sharePanel(), ...this.#lineages()];
    this.svg.replaceChildren(...parts, ...this.#xAxis(), this.cursor);
    this.#describe();
    this.#select(-1);
  }

  #x(place) {
    return EDGE.left + (place + 0.5) * this.band;
  }

  #bytesPanel() {
    const sizes = this.versions.map((one) => Math.max(1, one.payload_bytes));
    const full = this.versions.map((one) => Math.max(1, one.raw_bytes));
    const top = Math.max(...sizes, ...full);
    // Half a decade of room, so that the smallest does not lie on the axis.
    const low = Math.floor(Math.log10(Math.min(...sizes) / 3));
    const high = Math.max(low + 1, Math.ceil(Math.log10(top)));
    const span = this.bytesBottom - EDGE.top;
    const most = roundUp(Math.max(...sizes));
    const y = this.isLog
      ? (value) => this.bytesBottom - (span * (Math.log10(value) - low)) / (high - low)
      : (value) => this.bytesBottom - (span * value) / most;
    const ticks = this.isLog ? decades(low, high, 6) : [0, most / 2, most];
    const parts = ticks.flatMap((value) => this.#line(y(value), bytes(value).replace(/\.0+ /, " ")));
    parts.push(draw("text", { class: "name", x: EDGE.left, y: 10 }, "bytes per version"));
    if (this.isLog) parts.push(...this.#fullLine(full.map(y)));
    const radius = Math.max(1.2, Math.min(3.2, this.band * 0.42));
    let stems = "";
    let dots = "";
    let anchors = "";
    this.versions.forEach((one, place) => {
      const x = this.#x(place);
      const at = y(sizes[place]);
      stems += `M${x} ${this.bytesBottom}V${at}`;
      if (one.kind === "delta") dots += circle(x, at, radius);
      else anchors += diamond(x, at, radius + 2.4);
    });
    parts.push(draw("path", { class: "stems", d: stems }));
    parts.push(draw("path", { class: "dots", d: dots }));
    parts.push(draw("path", { class: "anchors", d: anchors }));
    return parts;
  }

  #fullLine(heights) {
    const steps = heights.map((at, place) => {
      const left = EDGE.left + place * this.band;
      return `${place ? "L" : "M"}${left} ${at}H${left + this.band}`;
    });
    const says = `full checkpoint ${bytes(this.versions.at(-1).raw_bytes)}`;
    const at = { class: "full-name", x: this.box.width - EDGE.right, y: heights.at(-1) - 5 };
    return [draw("path", { class: "full", d: steps.join("") }), draw("text", at, says)];
  }

  #sharePanel() {
    const shares = this.versions.map((one) => this.#share(one));
    const most = roundUp(Math.max(...shares.map((one) => one ?? 0)));
    const span = this.shareBottom - this.shareTop;
    const y = (value) => this.shareBottom - (span * value) / most;
    const parts = [0, most].flatMap((value) => this.#line(y(value), share(value)));
    const name = { class: "name", x: EDGE.left, y: this.shareTop - 8 };
    parts.push(draw("text", name, "weights that changed"));
    let line = "";
    let dots = "";
    let isDown = false;
    shares.forEach((value, place) => {
      if (value === null) {
        isDown = false;
        return;
      }
      line += `${isDown ? "L" : "M"}${this.#x(place)} ${y(value)}`;
      if (this.band > 7) dots += circle(this.#x(place), y(value), 1.8);
      isDown = true;
    });
    parts.push(draw("path", { class: "share", d: line }), draw("path", { class: "dots", d: dots }));
    return parts;
  }

  /** Only a delta has one: an anchor stands for itself. */
  #share(one) {
    return one.kind === "delta" && one.word_count ? one.changed_count / one.word_count : null;
  }

  #line(y, text) {
    const right = this.box.width - EDGE.right;
    return [
      draw("line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y }),
      draw("text", { class: "tick left", x: EDGE.left - 7, y: y + 3.5 }, text),
    ];
  }

  #lineages() {
    return this.versions.flatMap((one, place) => {
      if (!place || one.lineage === this.versions[place - 1].lineage) return [];
      const x = EDGE.left + place * this.band;
      return [
        draw("line", { class: "lineage", x1: x, x2: x, y1: EDGE.top - 6, y2: this.shareBottom }),
        draw("text", { class: "lineage-name", x: x + 4, y: this.bytesBottom - 5 }, "new lineage"),
      ];
    });
  }

  #xAxis() {
    const most = Math.max(2, Math.floor((this.box.width - EDGE.left) / 110));
    const every = roundUp(Math.max(1, this.versions.length / most));
    const step = Math.max(1, Math.ceil(every));
    const last = this.versions.length - 1;
    return this.versions.flatMap((one, place) => {
      if ((last - place) % step) return [];
      const isFirst = this.#x(place) < EDGE.left + 30;
      const anchor = place === last && last ? "end" : isFirst ? "start" : "middle";
      const x = place === last && last ? this.box.width - EDGE.right : this.#x(place);
      const at = { class: "tick", x, "text-anchor": anchor };
      const time = moment(one.created_ms, this.now_ms);
      return [
        draw("text", { ...at, y: this.shareBottom + 15 }, `v${one.version}`),
        draw("text", { ...at, class: "tick faint", y: this.shareBottom + 28 }, time),
      ];
    });
  }

  #describe() {
    const deltas = this.versions.filter((one) => one.kind === "delta");
    const sizes = deltas.map((one) => one.payload_bytes);
    const range = sizes.length
      ? `; deltas of ${bytes(Math.min(...sizes))} to ${bytes(Math.max(...sizes))}`
      : "";
    const whole = this.versions.length - deltas.length;
    const text = `${several(this.versions.length, "version")}, ${whole} of them whole${range}.`;
    setAttribute(this.svg, "aria-label", `Versions over time: ${text} Arrow keys show each.`);
    setText(byId("versions-note"), text);
  }

  #hover(event) {
    if (!this.versions.length) return;
    const left = this.svg.getBoundingClientRect().left;
    const place = Math.floor((event.clientX - left - EDGE.left) / this.band);
    this.#select(place >= 0 && place < this.versions.length ? place : -1);
  }

  #step(event) {
    const moves = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0 };
    moves.End = this.versions.length - 1;
    if (event.key === "Escape") this.#select(-1);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#select(Math.max(0, Math.min(this.versions.length - 1, moves[event.key])));
  }

  #select(place) {
    const wasShown = this.at >= 0;
    this.at = place;
    if (!this.cursor) return;
    setAttribute(this.cursor, "visibility", place < 0 ? "hidden" : "visible");
    if (place < 0) {
      // The box may show somebody else's details by now.
      if (wasShown) this.tip.hide();
      return;
    }
    const x = this.#x(place);
    setAttribute(this.cursor, "x1", x);
    setAttribute(this.cursor, "x2", x);
    const one = this.versions[place];
    const rows = this.#rows(one);
    const frame = this.svg.getBoundingClientRect();
    const near = { left: frame.left + x, right: frame.left + x, top: frame.top + EDGE.top };
    this.tip.show(`v${one.version}`, rows, { ...near, bottom: frame.bottom });
    const spoken = rows.map(([label, text]) => `${label} ${text}`).join(", ");
    if (document.activeElement === this.svg) {
      setText(byId("versions-spoken"), `version ${one.version}: ${spoken}`);
    }
  }

  #rows(one) {
    const rows = [["kind", one.kind]];
    if (one.step !== null) rows.push(["step", whole(one.step)]);
    if (one.identity) rows.push(["identity", one.identity]);
    rows.push(["at", moment(one.created_ms, this.now_ms)]);
    const part = one.raw_bytes ? ` (${share(one.payload_bytes / one.raw_bytes)} of full)` : "";
    rows.push(["bytes", bytes(one.payload_bytes) + part]);
    if (this.#share(one) !== null) rows.push(["changed", share(this.#share(one))]);
    rows.push(["lineage", one.lineage.slice(0, 8)]);
    return rows;
  }
}

function circle(x, y, radius) {
  const turn = `a${radius} ${radius} 0 1 0`;
  return `M${x - radius} ${y}${turn} ${2 * radius} 0${turn} ${-2 * radius} 0`;
}

function diamond(x, y, half) {
  return `M${x} ${y - half}L${x + half} ${y}L${x} ${y + half}L${x - half} ${y}Z`;
}

/** The signs of the chart, for its legend. */
export function versionsLegend() {
  const sign = (className, d) =>
    draw("svg", { class: "sign", viewBox: "0 0 14 14" }, draw("path", { class: className, d }));
  return [
    make("li", {}, sign("dots", circle(7, 7, 3)), "delta"),
    make("li", {}, sign("anchors", diamond(7, 7, 5)), "whole (anchor)"),
    make("li", {}, sign("full", "M0 7H14"), "full checkpoint"),
    make("li", {}, sign("lineage", "M7 0V14"), "new lineage"),
  ];
}

// The last update of each replica as a bar of its phases; how long requests were held back below.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { age, bytes, quantile, seconds, several } from "./format.js";

const SHOWN = 16;
// Phases that followers and engines have, by colour: what is alike shares one.
const COLOUR_OF = {
  fetch: "fetch", stage: "apply", apply: "apply", update: "apply", exchange: "apply", meet: "meet",
  pause: "pause", attach: "attach", resume: "attach", caches: "attach", label: "attach",
  prove: "prove",
};
const COLOURS = ["fetch", "apply", "meet", "pause", "attach", "prove"];
const OTHER = "other";

/** Seconds of all phases of an update. */
export function total(update) {
  return Object.values(update.phases).reduce((sum, one) => sum + one, 0);
}

/** The newest update of each replica; `order` is "slowest", "held" or "newest". Pure. */
export function lastOfEach(updates, order) {
  const last = new Map();
  for (const one of updates) {
    const known = last.get(one.replica);
    if (!known || known.ended_ms < one.ended_ms) last.set(one.replica, one);
  }
  const value = { slowest: total, held: (one) => one.pause_s, newest: (one) => one.ended_ms }[order];
  return [...last.values()].sort((left, right) => value(right) - value(left));
}

/** Where the requests were held back, as [begin, length] in seconds of the bar; null: not. Pure. */
export function heldBack(update) {
  if (!update.pause_s) return null;
  let before = 0;
  for (const [name, length] of Object.entries(update.phases)) {
    if (name === "pause") return [before, update.pause_s];
    before += length;
  }
  return [Math.max(0, before - update.pause_s), update.pause_s];
}

export class Updates {
  constructor() {
    this.order = byId("updates-order");
    this.list = byId("updates");
    this.data = null;
    this.order.addEventListener("change", () => this.#render());
  }

  draw(data) {
    this.data = data;
    this.#render();
  }

  #render() {
    if (!this.data) return;
    const each = lastOfEach(this.data.updates, this.order.value);
    byId("updates-empty").hidden = each.length > 0;
    byId("updates-body").hidden = each.length === 0;
    setText(byId("updates-note"), summary(each));
    const shown = each.slice(0, SHOWN);
    const longest = Math.max(...shown.map((one) => Math.max(total(one), heldEnd(one))), 1e-9);
    keep(this.list, shown, {
      key: (one) => one.replica,
      create: () => row(),
      update: (element, one) => this.#update(element, one, longest),
    });
    setText(byId("updates-scale-end"), seconds(longest));
    setText(byId("updates-scale-half"), seconds(longest / 2));
    this.#legend(shown);
  }

  #update(element, one, longest) {
    const { name, bar, held, took, pause, when } = element.parts;
    setAttribute(element, "data-failed", !one.is_ok);
    setText(name, `${one.replica}`);
    setAttribute(name, "title", one.region ? `${one.replica} in ${one.region}` : one.replica);
    const mark = JSON.stringify([one.phases, one.pause_s, longest]);
    if (element.mark !== mark) {
      element.mark = mark;
      bar.replaceChildren(...Object.entries(one.phases).map((phase) => segment(phase, longest)));
      const span = heldBack(one);
      held.hidden = span === null;
      if (span) {
        held.style.left = `${(100 * span[0]) / longest}%`;
        held.style.width = `${(100 * span[1]) / longest}%`;
      }
      setText(took, seconds(total(one)));
      setText(pause, one.pause_s ? seconds(one.pause_s) : "–");
      setAttribute(element, "aria-label", spoken(one));
    }
    setText(when, `${one.is_ok ? "" : "× "}v${one.version}`);
    setAttribute(when, "title", `${one.is_ok ? "" : "failed; "}${bytes(one.fetched_bytes)} fetched; ` +
      `served ${age(one.age_s)} after the commit`);
  }

  #legend(shown) {
    const names = new Set(shown.flatMap((one) => Object.keys(one.phases)));
    const colours = Map.groupBy([...names], (name) => colourOf(name));
    const found = [...COLOURS, OTHER].filter((one) => colours.has(one));
    const signs = found.map((one) => [one, colours.get(one).join(", ")]);
    keep(byId("updates-legend"), [...signs, ["held", "requests held back"]], {
      key: ([colour]) => colour,
      create: ([colour]) => make("li", {},
        make("span", { class: `swatch ${colour}`, "data-phase": colour }), make("span")),
      update: (element, [, text]) => setText(element.lastChild, text),
    });
  }
}

function heldEnd(update) {
  const span = heldBack(update);
  return span ? span[0] + span[1] : 0;
}

function summary(each) {
  if (!each.length) return "";
  const sorted = (pick) => each.map(pick).sort((left, right) => left - right);
  const took = sorted(total);
  const pauses = sorted((one) => one.pause_s);
  const failed = each.filter((one) => !one.is_ok).length;
  const parts = [`${several(each.length, "replica")}`,
    `p50 ${seconds(quantile(took, 0.5))}, p95 ${seconds(quantile(took, 0.95))}`,
    `held back p95 ${seconds(quantile(pauses, 0.95))}`];
  if (failed) parts.push(`${failed} failed`);
  return parts.join(" · ");
}

function spoken(one) {
  const phases = Object.entries(one.phases).map(([name, length]) => `${name} ${seconds(length)}`);
  const pause = one.pause_s ? `; requests held back for ${seconds(one.pause_s)}` : "";
  const end = one.is_ok ? "" : ", failed";
  return `${one.replica} to version ${one.version}${end}: ${phases.join(", ")}${pause}`;
}

function colourOf(name) {
  return Object.hasOwn(COLOUR_OF, name) ? COLOUR_OF[name] : OTHER;
}

function segment([name, length], longest) {
  const percent = (100 * length) / longest;
  const text = percent > 9 ? name : "";
  const says = `${name} ${seconds(length)}`;
  const element = make("span", { "data-phase": colourOf(name), title: says }, text);
  element.style.width = `${percent}%`;
  return element;
}

function row() {
  const parts = {
    name: make("span", { class: "who" }),
    bar: make("span", { class: "bar" }),
    held: make("span", { class: "held", hidden: true }),
    took: make("span", { class: "number" }),
    pause: make("span", { class: "number pause" }),
    when: make("span", { class: "number faint" }),
  };
  const element = make("li", {}, parts.name,
    make("span", { class: "track" }, parts.bar, parts.held), parts.took, parts.pause, parts.when);
  element.parts = parts;
  return element;
}

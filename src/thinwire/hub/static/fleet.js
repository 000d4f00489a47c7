// The map: a card for each region, a cell for each replica.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { age, bytes, several } from "./format.js";
import { NOT_SERVING, STATES, behind, bucketRanges, cellOf, details, relayedShare }
  from "./staleness.js";

export class Fleet {
  /** `onPick(replica)` is called where someone chooses a cell. */
  constructor(tip, onPick) {
    this.tip = tip;
    this.onPick = onPick;
    this.cards = byId("regions");
    this.byName = new Map();
    this.shown = "";
    for (const kind of ["pointerover", "focusin"]) {
      this.cards.addEventListener(kind, (event) => this.#show(event.target));
    }
    this.cards.addEventListener("pointerleave", () => this.#hide());
    this.cards.addEventListener("focusout", () => this.#hide());
    this.cards.addEventListener("click", (event) => this.#pick(event.target));
    this.cards.addEventListener("keydown", (event) => this.#move(event));
  }

  draw(data) {
    const { status, replicas, limit } = data;
    this.data = data;
    this.limit = limit;
    this.byName = new Map(replicas.map((one) => [one.beat.replica, one]));
    byId("fleet-empty").hidden = replicas.length > 0;
    this.#legend(limit);
    const members = Map.groupBy(replicas, (one) => one.beat.region);
    const known = new Map(status.regions.map((region) => [region.region, region]));
    const names = [...new Set([...known.keys(), ...members.keys()])].sort();
    const items = names.map((name) => ({
      name,
      region: known.get(name),
      own: (members.get(name) ?? []).filter((one) => one.beat.kind === "replica"),
      relays: (members.get(name) ?? []).filter((one) => one.beat.kind === "relay"),
    }));
    keep(this.cards, items.filter((item) => item.region || item.own.length || item.relays.length), {
      key: (item) => item.name,
      create: (item) => card(item),
      update: (element, item) => this.#update(element.parts, item),
    });
    if (this.shown) this.#refresh();
  }

  #update(parts, { name, region, own, relays }) {
    setText(parts.title, name || "no region");
    const counts = region?.counts ?? {};
    const isGone = own.length > 0 && own.every((one) => one.state === "lost");
    setAttribute(parts.card, "data-lost", isGone);
    parts.gone.hidden = !isGone;
    keep(parts.counts, STATES.filter((state) => counts[state] || state === "ready"), {
      key: (state) => state,
      create: (state) => make("li", { "data-state": state }, make("b"), ` ${state}`),
      update: (element, state) => setText(element.firstChild, String(counts[state] ?? 0)),
    });
    const steps = (value) => (value === null || value === undefined ? "–" : String(value));
    // Wide where there is much to show: the cards end at about the same height.
    parts.card.style.flexGrow = String(own.length + 1);
    setText(parts.p50, steps(region?.staleness_steps_p50));
    setText(parts.p95, steps(region?.staleness_steps_p95));
    setText(parts.max, steps(region?.staleness_steps_max));
    const longest = region?.staleness_s_max;
    setText(parts.longest, longest === null || longest === undefined ? "–" : age(longest));
    setText(parts.fetched, bytes(region?.fetched_bytes));
    keep(parts.relays, relays, {
      key: (one) => one.beat.replica,
      create: (one) => make("li", {}, make("span", { class: "relay-name" }), make("span")),
      update: (element, one) => {
        setAttribute(element, "data-state", one.state);
        setText(element.firstChild, `${one.state === "lost" ? "×" : "◆"} ${one.beat.replica}`);
        setText(element.lastChild, one.state === "lost" ? "lost" : relayedShare(one.beat));
      },
    });
    setText(parts.noRelay, relays.length ? "" : "no relay: each replica fetches for itself");
    setAttribute(parts.cells, "aria-label", `${name || "no region"}: ${several(own.length, "replica")}`);
    keep(parts.cells, own, {
      key: (one) => one.beat.replica,
      create: (one) => make("button", { class: "cell", type: "button", tabindex: "-1",
        "data-replica": one.beat.replica }),
      update: (element, one) => this.#cell(element, one),
    });
    const entry = parts.cells.querySelector("[tabindex='0']") ?? parts.cells.firstElementChild;
    if (entry) setAttribute(entry, "tabindex", "0");
  }

  #cell(element, status) {
    const { text, look, isUpdating } = cellOf(status, this.limit);
    const mark = `${look}|${text}|${isUpdating}|${status.state}|${status.staleness_steps}`;
    // Most cells stay as they are between two looks: their document is not touched.
    if (element.mark === mark) return;
    element.mark = mark;
    setText(element, text);
    setAttribute(element, "data-look", look);
    setAttribute(element, "data-updating", isUpdating);
    const says = status.state === "lost" ? "" : `, ${spoken(status)}`;
    setAttribute(element, "aria-label", `${status.beat.replica}: ${status.state}${says}`);
  }

  #legend(limit) {
    if (this.legendOf === limit) return;
    this.legendOf = limit;
    const sample = (attributes, text) => make("span", { class: "cell", ...attributes }, text);
    const ranges = bucketRanges(limit).flatMap((range, place) =>
      range === null ? [] : [make("li", {}, sample({ "data-look": `b${place}` }, ""), range)],
    );
    const others = Object.entries(NOT_SERVING).map(([look, text]) =>
      make("li", {}, sample({ "data-look": look }, text), look),
    );
    const updating = sample({ "data-look": "b0", "data-updating": "" }, "");
    byId("fleet-legend").replaceChildren(
      make("li", { class: "legend-name" }, "steps behind"), ...ranges,
      make("li", {}, updating, "updating"), ...others,
    );
  }

  #show(target) {
    const name = target.closest?.("[data-replica]")?.dataset.replica;
    if (!name) return this.#hide();
    this.shown = name;
    this.anchor = target;
    return this.#refresh();
  }

  #refresh() {
    const status = this.byName.get(this.shown);
    if (!status || !this.anchor.isConnected) return this.#hide();
    const passed_s = Math.max(0, this.data.now() - this.data.read_ms) / 1000;
    const fault_s = status.beat.fault ? (this.data.now() - status.beat.fault.at_ms) / 1000 : 0;
    const rows = details(status, passed_s, fault_s);
    return this.tip.show(this.shown, rows, this.anchor.getBoundingClientRect());
  }

  #hide() {
    if (!this.shown) return;
    this.shown = "";
    this.tip.hide();
  }

  #pick(target) {
    const name = target.closest("[data-replica]")?.dataset.replica;
    if (name) this.onPick(name);
  }

  /** Arrow keys walk over cells; one cell of each region is a stop of the Tab key. */
  #move(event) {
    const cell = event.target.closest("[data-replica]");
    if (event.key === "Escape") this.#hide();
    if (!cell) return;
    const cells = [...cell.parentElement.children];
    const row = cells.findIndex((one) => one.offsetTop !== cells[0].offsetTop);
    const width = row < 0 ? cells.length : row;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width };
    const ends = { Home: 0, End: cells.length - 1 };
    if (!(event.key in moves) && !(event.key in ends)) return;
    event.preventDefault();
    const place = event.key in ends ? ends[event.key] : cells.indexOf(cell) + moves[event.key];
    const next = cells[place];
    if (!next) return;
    setAttribute(cell, "tabindex", "-1");
    setAttribute(next, "tabindex", "0");
    next.focus();
  }
}

function card({ name }) {
  const parts = {
    title: make("h3"),
    gone: make("p", { class: "gone", hidden: true }, "not heard of: cut off, or all stopped"),
    counts: make("ul", { class: "counts" }),
    p50: make("dd"), p95: make("dd"), max: make("dd"), longest: make("dd"), fetched: make("dd"),
    relays: make("ul", { class: "relays" }),
    noRelay: make("p", { class: "faint" }),
    cells: make("div", { class: "cells", role: "group" }),
  };
  const pair = (label, value) => make("div", {}, make("dt", {}, label), value);
  const numbers = make("dl", { class: "numbers" }, pair("p50", parts.p50), pair("p95", parts.p95),
    pair("max", parts.max), pair("longest", parts.longest), pair("fetched", parts.fetched));
  parts.card = make("article", { class: "region", "data-region": name },
    make("header", {}, parts.title, parts.counts), parts.gone, numbers, parts.cells,
    make("footer", {}, parts.relays, parts.noRelay));
  parts.card.parts = parts;
  return parts.card;
}

function spoken(status) {
  const text = behind(status);
  return status.staleness_steps > 0 ? `behind by ${text}` : text;
}

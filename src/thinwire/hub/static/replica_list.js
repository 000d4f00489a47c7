// All replicas as a table: filtered, sorted, usable from the keyboard.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { age, bytes } from "./format.js";
import { STATES, behind, progress } from "./staleness.js";

const FIRST_ROWS = 14;
const MORE_ROWS = 100;

const COLUMNS = {
  replica: (one) => one.beat.replica,
  // What serves nothing known is the stalest of all; a relay serves no version, and is not stale.
  staleness: (one) => (one.beat.kind === "relay" ? -1 : (one.staleness_steps ?? Infinity)),
  state: (one) => STATES.indexOf(one.state),
  region: (one) => one.beat.region,
  version: (one) => one.beat.version,
  seen: (one) => one.seen_s,
  fetched: (one) => one.beat.fetched_bytes,
};

/** The rows that fit the filter, in order. Pure. */
export function chosen(replicas, { text, state, region, column, isDown }) {
  const needle = text.trim().toLowerCase();
  const found = replicas.filter(
    (one) => (!state || one.state === state) &&
      (region === null || one.beat.region === region) &&
      (!needle || fields(one).some((field) => field.toLowerCase().includes(needle))),
  );
  const value = COLUMNS[column];
  const sign = isDown ? -1 : 1;
  return found.sort((left, right) => {
    const [a, b] = [value(left), value(right)];
    if (a !== b) return a < b ? -sign : sign;
    return left.beat.replica < right.beat.replica ? -1 : 1;
  });
}

function fields({ beat }) {
  return [beat.replica, beat.engine, beat.region, beat.fault?.code ?? ""];
}

export class ReplicaList {
  constructor() {
    this.filter = { text: "", state: "", region: null, column: "staleness", isDown: true };
    this.rows = FIRST_ROWS;
    this.data = null;
    byId("list-text").addEventListener("input", (event) => this.#set({ text: event.target.value }));
    byId("list-state").append(...STATES.map((state) => make("option", { value: state }, state)));
    byId("list-state").addEventListener("change", (event) => this.#set({ state: event.target.value }));
    byId("list-region").addEventListener("change", (event) => {
      const { value } = event.target;
      this.#set({ region: value === "all" ? null : value.slice(1) });
    });
    byId("list-head").addEventListener("click", (event) => this.#sort(event.target));
    byId("list-more").addEventListener("click", () => {
      this.rows += MORE_ROWS;
      this.#render();
    });
  }

  draw(data) {
    this.data = data;
    this.#render();
  }

  /** Shows one replica alone. */
  find(replica) {
    byId("list-text").value = replica;
    byId("list-state").value = "";
    byId("list-region").value = "all";
    this.#set({ text: replica, state: "", region: null });
    byId("list-text").focus();
  }

  #set(change) {
    this.filter = { ...this.filter, ...change };
    this.rows = FIRST_ROWS;
    this.#render();
  }

  #sort(target) {
    const column = target.closest("button")?.dataset.column;
    if (!column) return;
    const isSame = column === this.filter.column;
    const isDown = isSame ? !this.filter.isDown : !["replica", "region"].includes(column);
    this.#set({ column, isDown });
  }

  #render() {
    if (!this.data) return;
    const { replicas } = this.data;
    this.#regions(replicas);
    for (const head of byId("list-head").children) {
      const isSorted = head.firstElementChild.dataset.column === this.filter.column;
      const order = this.filter.isDown ? "descending" : "ascending";
      setAttribute(head, "aria-sort", isSorted ? order : null);
    }
    const found = chosen(replicas, this.filter);
    const shown = found.slice(0, this.rows);
    setText(byId("list-note"), `${found.length} of ${replicas.length}`);
    byId("list-more").hidden = found.length <= shown.length;
    setText(byId("list-more"), `show ${Math.min(MORE_ROWS, found.length - shown.length)} more`);
    const passed_s = Math.max(0, this.data.now() - this.data.read_ms) / 1000;
    keep(byId("list-rows"), shown, {
      key: (one) => one.beat.replica,
      create: () => make("tr", {}, make("th", { scope: "row" }),
        ...Array.from({ length: 6 }, () => make("td"))),
      update: (element, one) => update(element, one, passed_s),
    });
  }

  #regions(replicas) {
    const names = [...new Set(replicas.map((one) => one.beat.region))].sort();
    keep(byId("list-region"), [null, ...names], {
      key: (name) => (name === null ? "all" : `=${name}`),
      create: (name) => make("option", { value: name === null ? "all" : `=${name}` },
        name === null ? "every region" : name || "no region"),
      update: () => {},
    });
  }
}

function update(element, one, passed_s) {
  const { beat } = one;
  const part = progress(beat);
  const far = part === null ? "" : ` ${Math.floor(part * 100)} %`;
  const isBusy = beat.phase !== "idle" && one.state !== "lost";
  const isRelay = beat.kind === "relay";
  const texts = [
    beat.replica,
    isRelay ? "–" : behind(one),
    (isRelay ? "relay, " : "") + one.state + (isBusy ? `: ${beat.phase}${far}` : ""),
    beat.region || "–",
    beat.version ? `v${beat.version}` : "–",
    `${age(one.seen_s + passed_s)} ago`,
    bytes(beat.fetched_bytes),
  ];
  texts.forEach((text, place) => setText(element.children[place], text));
  setAttribute(element, "data-state", one.state);
  setAttribute(element.children[2], "title", one.doubt || beat.fault?.code || null);
}

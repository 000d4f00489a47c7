// Says how the page stands with the hub, and the hub with the bucket.

import { byId, setAttribute, setText } from "./dom.js";
import { age } from "./format.js";

const WORDS = { connecting: "connecting", live: "live", away: "hub away", refused: "refused" };

export class Line {
  constructor(onRetry) {
    this.state = { name: "connecting" };
    this.heard_ms = null;
    byId("line-retry").addEventListener("click", onRetry);
  }

  heard() {
    this.heard_ms = Date.now();
  }

  show(state) {
    this.state = state;
    setText(byId("line-word"), WORDS[state.name]);
    setAttribute(byId("line"), "data-line", state.name);
    setAttribute(document.body, "data-line", state.name);
    byId("line-banner").hidden = !["away", "refused"].includes(state.name);
    this.tick(null);
  }

  tick(status) {
    const { name, next_ms, error } = this.state;
    if (name === "away" || name === "refused") {
      const heard = this.heard_ms === null
        ? "It was not heard since this page was opened."
        : `Last heard ${age((Date.now() - this.heard_ms) / 1000)} ago; what is shown is from then.`;
      const next = `Next try in ${age(Math.max(0, next_ms - Date.now()) / 1000)}.`;
      setText(byId("line-text"), `${said(name, error)} ${heard} ${next}`);
    }
    if (status) this.#bucket(status);
  }

  #bucket(status) {
    const { fault, looked_s } = status;
    byId("bucket-banner").hidden = !fault;
    if (!fault) return;
    const since = looked_s === null ? "It never did." : `It last did ${age(looked_s)} before.`;
    setText(byId("bucket-text"),
      `The hub cannot read the bucket (${fault.code}): ${fault.message}. ${since} ` +
      "Replicas go on by themselves.");
  }
}

function said(name, error) {
  if (name === "refused") return `The hub refuses: ${error.message}. ${error.hint}`;
  // That is what a proxy says of a hub that is down, and a hub that has too much to do.
  return error.status ? `The hub answers ${error.status}.` : "The hub does not answer.";
}

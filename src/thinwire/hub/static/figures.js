// The row of figures: the head, what a version costs, what was saved, how the fleet stands.

import { byId, setAttribute, setText } from "./dom.js";
import { age, bytes, count, money, quantile, several, share, whole } from "./format.js";

/** All figures as text, from what the hub said. Pure. */
export function figures({ status, versions, replicas, limit, price }) {
  return { ...ofHead(status, versions), ...ofSavings(status, price), ...ofFleet(replicas, limit) };
}

function ofHead(status, versions) {
  const head = status.head;
  if (!head) {
    const none = { head: "none yet", headMore: "", changed: "–", changedMore: "" };
    return { ...none, size: "–", sizeMore: "" };
  }
  const step = head.step === null ? "no step" : `step ${whole(head.step)}`;
  const deltas = versions.filter((one) => one.kind === "delta");
  const newest = head.kind === "delta" ? head : deltas[0];
  const mean = deltas.reduce((sum, one) => sum + one.payload_bytes, 0) / deltas.length;
  return {
    head: `v${head.version}`,
    headMore: [step, head.kind, head.identity].filter(Boolean).join(" · "),
    changed: newest ? share(newest.changed_count / newest.word_count) : "–",
    changedMore: newest ? `of ${count(newest.word_count)} weights` : "",
    size: bytes(head.payload_bytes),
    sizeMore: deltas.length
      ? `deltas ${bytes(mean)} on average; full ${bytes(head.raw_bytes)}`
      : `full ${bytes(head.raw_bytes)}`,
  };
}

function ofSavings(status, price) {
  const saved = status.full_bytes - status.sent_bytes;
  if (status.full_bytes <= 0 || status.sent_bytes <= 0) {
    return { saved: "–", savedMore: "", money: "–", moneyMore: "" };
  }
  const ratio = status.full_bytes / status.sent_bytes;
  const fewer = ratio >= 100 ? whole(Math.round(ratio)) : ratio.toFixed(1);
  const places = Math.max(1, status.regions.length);
  const copies = places === 1 ? "one copy out" : `a copy to each of ${places} regions`;
  return {
    saved: share(saved / status.full_bytes),
    savedMore: `${fewer} × fewer bytes than full checkpoints; ${bytes(Math.max(0, saved))} a copy`,
    money: money((Math.max(0, saved) / 1e9) * price * places),
    moneyMore: copies,
  };
}

function ofFleet(replicas, limit) {
  const own = replicas.filter((one) => one.beat.kind === "replica");
  if (!own.length) return { fleet: "–", fleetMore: "no replica", isStale: false };
  const heard = own.filter((one) => one.state !== "lost");
  const fresh = heard.filter(
    (one) => (one.state === "ready" || one.state === "updating") &&
      one.staleness_steps !== null && one.staleness_steps <= limit,
  );
  const steps = heard.map((one) => one.staleness_steps).filter((one) => one !== null);
  steps.sort((left, right) => left - right);
  const p95 = quantile(steps, 0.95);
  const spread = p95 === null ? "" : `; p95 ${p95}, max ${steps[steps.length - 1]}`;
  return {
    fleet: `${fresh.length} / ${own.length}`,
    fleetMore: `ready and within ${several(limit, "step")}${spread}`,
    isStale: fresh.length < own.length * 0.9,
  };
}

export class Figures {
  draw(data) {
    const texts = figures(data);
    for (const name of ["head", "changed", "size", "saved", "money", "fleet"]) {
      setText(byId(`figure-${name}`), texts[name]);
      setText(byId(`figure-${name}-more`), texts[`${name}More`]);
    }
    setAttribute(byId("figure-fleet"), "data-stale", texts.isStale);
  }

  /** What changes by itself. */
  tick(data, now_ms) {
    const head = data.status?.head;
    setText(byId("figure-age"), head ? age((now_ms - head.created_ms) / 1000) : "–");
    const looked = data.status?.looked_s;
    const passed = Math.max(0, now_ms - data.read_ms) / 1000;
    const text = looked === null || looked === undefined
      ? "bucket not read yet"
      : `bucket read ${age(looked + passed)} ago`;
    setText(byId("figure-age-more"), text);
  }
}

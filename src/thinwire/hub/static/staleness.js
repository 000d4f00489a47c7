// What a replica's cell looks like and says. All pure.

import { age, bytes, seconds, several, share } from "./format.js";

export const STATES = ["ready", "updating", "joining", "unready", "lost"];

/** The signs of replicas that are not served from. */
export const NOT_SERVING = {
  joining: "↑",
  unready: "!",
  lost: "×",
};

/** The usual distance of two versions in steps: the median over the newest ones, at least 1. */
export function stride(versions) {
  const gaps = [];
  for (let place = 1; place < Math.min(versions.length, 50); place += 1) {
    const [newer, older] = [versions[place - 1], versions[place]];
    if (newer.step === null || older.step === null || newer.lineage !== older.lineage) continue;
    if (newer.step > older.step) gaps.push(newer.step - older.step);
  }
  gaps.sort((left, right) => left - right);
  return gaps.length ? gaps[gaps.length >> 1] : 1;
}

/** 0: current; 1: within half the limit; 2: within it; 3: up to twice; 4: beyond. */
export function bucket(steps, limit) {
  if (steps <= 0) return 0;
  if (steps <= limit / 2) return 1;
  if (steps <= limit) return 2;
  return steps <= 2 * limit ? 3 : 4;
}

/** The ranges of the buckets as text; null: none fall into it. */
export function bucketRanges(limit) {
  const half = Math.floor(limit / 2);
  const range = (low, high) => (low > high ? null : low === high ? `${low}` : `${low}–${high}`);
  const top = Math.floor(limit);
  return ["current", range(1, half), range(Math.max(1, half + 1), top), range(top + 1, 2 * top),
    `> ${2 * top}`];
}

/** What a replica's cell shows: {text, look, isUpdating}. */
export function cellOf(status, limit) {
  const isUpdating = status.state === "updating";
  const not = NOT_SERVING[status.state];
  if (not) return { text: not, look: status.state, isUpdating };
  const steps = status.staleness_steps;
  if (steps === null) return { text: "?", look: "unknown", isUpdating };
  // What is current is quiet: an empty cell.
  const text = steps > 99 ? "»" : steps > 0 ? String(steps) : "";
  return { text, look: `b${bucket(steps, limit)}`, isUpdating };
}

/** "current", "3 steps, 41 s", "not known". */
export function behind(status) {
  const steps = status.staleness_steps;
  if (status.state === "lost") return "not known";
  if (steps === null) return status.beat.version ? "not known" : "serves none";
  if (steps <= 0) return "current";
  const lag = status.staleness_s ? `, ${age(status.staleness_s)}` : "";
  return `${several(steps, "step")}${lag}`;
}

/** How far a running update is, between 0 and 1; null: not known. */
export function progress(beat) {
  return beat.total_bytes > 0 ? Math.min(1, beat.done_bytes / beat.total_bytes) : null;
}

/** What the hover details of a replica say, as [label, text] pairs. */
export function details(status, passed_s, fault_s) {
  const { beat } = status;
  const rows = [["state", status.state]];
  if (beat.region) rows.push(["region", beat.region]);
  if (beat.engine) rows.push(["engine", beat.engine]);
  if (beat.version) {
    const step = beat.step === null ? "" : `, step ${beat.step}`;
    rows.push(["serves", `v${beat.version}${step}`]);
  }
  rows.push(["staleness", behind(status)]);
  if (beat.phase !== "idle") rows.push(["doing", doing(beat)]);
  rows.push(["heard", `${age(status.seen_s + passed_s)} ago`]);
  rows.push(["fetched", `${bytes(beat.fetched_bytes)} in ${several(beat.update_count, "update")}`]);
  if (beat.pause_s) rows.push(["last pause", seconds(beat.pause_s)]);
  if (status.doubt) rows.push(["doubt", status.doubt]);
  if (beat.fault) rows.push(["error", `${beat.fault.code} ${age(fault_s)} ago`]);
  return rows;
}

/** "fetch to v12, 41 %, for 3.2 s". */
export function doing(beat) {
  const part = progress(beat);
  const target = beat.target ? ` to v${beat.target}` : "";
  const far = part === null ? "" : `, ${Math.floor(part * 100)} %`;
  return `${beat.phase}${target}${far}, for ${seconds(beat.phase_s)}`;
}

/** A relay's share of what it gave that it did not have to fetch. */
export function relayedShare(beat) {
  if (!beat.served_bytes) return "nothing asked for yet";
  const part = Math.max(0, 1 - beat.fetched_bytes / beat.served_bytes);
  return `gave ${bytes(beat.served_bytes)}, ${share(part)} from its cache`;
}

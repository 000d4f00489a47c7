// What runs now, and what went wrong last.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { age, seconds, several } from "./format.js";
import { progress } from "./staleness.js";

const RUNNING_SHOWN = 6;
const ERRORS_SHOWN = 3;
const NAMES_SHOWN = 3;

/** The updates that run, the longest first. Pure. */
export function running(replicas) {
  const busy = replicas.filter((one) => one.beat.phase !== "idle" && one.state !== "lost");
  return busy.sort((left, right) => right.beat.phase_s - left.beat.phase_s);
}

/** Last errors, those of one code together, the newest first. Pure. */
export function faults(replicas) {
  const failed = replicas.filter((one) => one.beat.fault);
  const groups = [...Map.groupBy(failed, (one) => one.beat.fault.code).entries()];
  const found = groups.map(([code, members]) => {
    members.sort((left, right) => right.beat.fault.at_ms - left.beat.fault.at_ms);
    const names = members.slice(0, NAMES_SHOWN).map((one) => one.beat.replica);
    const { message, at_ms } = members[0].beat.fault;
    return { code, message, at_ms, names, count: members.length };
  });
  return found.sort((left, right) => right.at_ms - left.at_ms);
}

export class Activity {
  draw({ replicas }) {
    this.#drawRunning(running(replicas));
    this.found = faults(replicas);
    byId("errors-empty").hidden = this.found.length > 0;
    const codes = this.found.length - ERRORS_SHOWN;
    setText(byId("errors-more"), codes > 0 ? `and ${several(codes, "other code")}` : "");
    keep(byId("errors"), this.found.slice(0, ERRORS_SHOWN), {
      key: (fault) => fault.code,
      create: () => errorRow(),
      update: (element, fault) => {
        const { code, who, text } = element.parts;
        setText(code, fault.count > 1 ? `${fault.code} × ${fault.count}` : fault.code);
        const more = fault.count - fault.names.length;
        setText(who, fault.names.join(", ") + (more > 0 ? ` and ${more} more` : ""));
        setText(text, fault.message);
      },
    });
  }

  tick(data, now_ms) {
    const rows = byId("errors").children;
    (this.found ?? []).slice(0, ERRORS_SHOWN).forEach((fault, place) => {
      setText(rows[place].parts.when, `${age((now_ms - fault.at_ms) / 1000)} ago`);
    });
  }

  #drawRunning(busy) {
    byId("running-empty").hidden = busy.length > 0;
    const phases = [...Map.groupBy(busy, (one) => one.beat.phase).entries()];
    phases.sort((left, right) => right[1].length - left[1].length);
    const says = phases.map(([phase, members]) => `${members.length} ${phase}`).join(", ");
    setText(byId("running-note"), says);
    keep(byId("running"), busy.slice(0, RUNNING_SHOWN), {
      key: (one) => one.beat.replica,
      create: () => runningRow(),
      update: (element, { beat }) => {
        const { name, what, bar, far } = element.parts;
        const part = progress(beat);
        setText(name, beat.replica);
        setText(what, `${beat.phase}${beat.target ? ` to v${beat.target}` : ""}`);
        setAttribute(bar, "value", part);
        setAttribute(bar, "aria-label", `${beat.replica}, ${beat.phase}`);
        const percent = part === null ? "" : `${Math.floor(part * 100)} % · `;
        setText(far, `${percent}${seconds(beat.phase_s)}`);
      },
    });
    const left = busy.length - RUNNING_SHOWN;
    setText(byId("running-more"), left > 0 ? `and ${left} more` : "");
  }
}

function runningRow() {
  const parts = {
    name: make("span", { class: "who" }),
    what: make("span", { class: "faint" }),
    bar: make("progress", { max: "1" }),
    far: make("span", { class: "number" }),
  };
  const element = make("li", {}, parts.name, parts.what, parts.bar, parts.far);
  element.parts = parts;
  return element;
}

function errorRow() {
  const parts = {
    code: make("strong"), who: make("span", { class: "who" }),
    when: make("span", { class: "number faint" }), text: make("p"),
  };
  const element = make("li", {},
    make("div", {}, parts.code, parts.who, parts.when), parts.text);
  element.parts = parts;
  return element;
}

// The dashboard: what it knows, when it reads, who draws.

import { Activity } from "./activity.js";
import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Fleet } from "./fleet.js";
import { Denied, Hub } from "./hub.js";
import { Line } from "./line.js";
import { Live } from "./live.js";
import { Refresh } from "./refresh.js";
import { ReplicaList } from "./replica_list.js";
import { readLimit, readPrice, readToken, writeLimit, writePrice, writeToken } from "./settings.js";
import { stride } from "./staleness.js";
import { bindTheme } from "./theme.js";
import { Tip } from "./tip.js";
import { TokenPrompt } from "./token.js";
import { Updates } from "./updates.js";
import { VersionsChart, versionsLegend } from "./versions_chart.js";

const VERSIONS = 300;
const UPDATES = 1000;
// They are many, and none of them changes.
const UPDATES_GAP_MS = 5000;
// Staleness in seconds grows without an event.
const REREAD_MS = 10_000;
const STRIDES = 2;

const tip = new Tip();
const list = new ReplicaList();
const panels = [new Figures(), new VersionsChart(tip), new Activity(), new Updates(), list,
  new Fleet(tip, (replica) => list.find(replica))];
const prompt = new TokenPrompt();
const line = new Line(() => live.tryNow());
const hub = new Hub({ readToken, onHeard: () => line.heard() });

const data = {
  streams: [],
  stream: "",
  status: null,
  versions: [],
  replicas: [],
  updates: [],
  updates_next_ms: 0,
  read_ms: 0,
  price: readPrice(),
  limit: 1,
  now: () => Date.now() + hub.skew_ms,
};

const refresh = new Refresh(read, (error) => {
  // The line to the events notices a hub that is away by itself; a refused token does not wait.
  if (error instanceof Denied) live.restart();
});

const live = new Live({
  session,
  askToken: (isWrong) => prompt.ask(isWrong),
  hasToken: () => prompt.hasToken(),
  onState: (state) => line.show(state),
});

/** One life of the line: read all there is, then follow what happens. */
async function session(signal, onOpen) {
  data.streams = await hub.streams(signal);
  chooseStream();
  if (!data.stream) {
    onOpen();
    await new Promise((resolve) => setTimeout(resolve, REREAD_MS));
    return;
  }
  Object.assign(data, { versions: [], updates_next_ms: 0 });
  await refresh.begin(signal);
  for await (const event of hub.events(data.stream, signal)) {
    if (event.name === "open") {
      byId("forget").hidden = !prompt.hasToken();
      onOpen();
    } else {
      refresh.want();
    }
  }
}

function askedStream() {
  try {
    return decodeURIComponent(location.hash.replace(/^#stream=/, ""));
  } catch {
    return ""; // no text, such as a lone %
  }
}

function chooseStream() {
  const names = data.streams.map((one) => one.name);
  const asked = askedStream();
  data.stream = names.includes(asked) ? asked : (names[0] ?? "");
  const select = byId("stream");
  keep(select, names, {
    key: (name) => name,
    create: (name) => make("option", { value: name }, name),
    update: () => {},
  });
  select.value = data.stream;
  byId("stream-label").hidden = names.length < 2;
  setText(byId("stream-name"), data.stream || "no stream");
  byId("stream-name").hidden = names.length > 1;
}

async function read(signal) {
  const { stream } = data;
  const [status, replicas, updates] = await Promise.all([
    hub.status(stream, signal),
    hub.replicas(stream, signal),
    readUpdates(signal),
  ]);
  const versions = isNewest(status.head) ? data.versions : await hub.versions(stream, VERSIONS, signal);
  if (signal.aborted) return;
  Object.assign(data, { status, replicas, updates, versions, read_ms: data.now() });
  drawAll();
}

async function readUpdates(signal) {
  if (performance.now() < data.updates_next_ms) return data.updates;
  const updates = await hub.updates(data.stream, UPDATES, signal);
  data.updates_next_ms = performance.now() + UPDATES_GAP_MS;
  return updates;
}

function isNewest(head) {
  const known = data.versions[0];
  if (!head || !known) return !head && !known;
  return head.lineage === known.lineage && head.version === known.version;
}

let isDrawWanted = false;

/** Draws once in a frame, however many ask. */
function drawAll() {
  if (isDrawWanted || !data.status) return;
  isDrawWanted = true;
  // A hidden page gets no frames; it is drawn when it is shown.
  requestAnimationFrame(() => {
    isDrawWanted = false;
    data.limit = readLimit() ?? STRIDES * stride(data.versions);
    if (document.activeElement !== byId("limit")) byId("limit").value = String(data.limit);
    setText(byId("model"), data.status.model);
    setText(byId("url"), data.status.url);
    const head = data.status.head;
    document.title = `${head ? `v${head.version} · ` : ""}${data.stream} – thinwire`;
    setAttribute(byId("page"), "data-shown", data.stream);
    for (const panel of panels) panel.draw(data, data.now());
    tick();
  });
}

function tick() {
  line.tick(data.status);
  if (!data.status) return;
  for (const panel of panels) panel.tick?.(data, data.now());
}

function bindInputs() {
  bindTheme(byId("theme"));
  byId("versions-legend").replaceChildren(...versionsLegend());
  byId("stream").addEventListener("change", (event) => {
    location.hash = `stream=${encodeURIComponent(event.target.value)}`;
  });
  window.addEventListener("hashchange", () => live.restart());
  byId("price").value = data.price.toFixed(2);
  byId("price").addEventListener("input", (event) => {
    const price = Number.parseFloat(event.target.value);
    if (!(price >= 0 && price <= 1000)) return;
    data.price = price;
    writePrice(price);
    drawAll();
  });
  byId("limit").addEventListener("input", (event) => {
    const limit = Number.parseInt(event.target.value, 10);
    if (event.target.value !== "" && !(limit >= 0 && limit <= 1e9)) return;
    // Emptied: as the stream's own stride has it.
    writeLimit(event.target.value === "" ? null : limit);
    drawAll();
  });
  byId("forget").addEventListener("click", () => {
    writeToken("");
    location.reload();
  });
  byId("forget").hidden = !prompt.hasToken();
}

bindInputs();
setInterval(tick, 1000);
setInterval(() => refresh.want(), REREAD_MS);
live.restart();

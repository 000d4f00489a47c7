// The hub over HTTP. EventSource cannot send a token, so events are read from fetch.

const REQUEST_TIMEOUT_MS = 20_000;
// The hub sends a comment line every 15 s: more than two of them missing is silence.
const SILENCE_MS = 40_000;
const PAGE_REPLICAS = 1000;
// As many as a hub knows of one stream.
const MAX_REPLICAS = 10_000;
const MAX_EVENT_CHARS = 1 << 20;

/** The hub wants another token. */
export class Denied extends Error {}

/** The hub, or what is between, cannot be reached or answers nonsense. */
export class Away extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The hub answered that it won't. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message || `the hub answered ${status}`);
    this.status = status;
    this.hint = error?.hint || "";
  }
}

const BEAT = {
  kind: "replica", region: "", engine: "", lineage: "", version: 0, step: null, is_ready: false,
  phase: "idle", target: 0, done_bytes: 0, total_bytes: 0, phase_s: 0, fetched_bytes: 0,
  cached_bytes: 0, served_bytes: 0, update_count: 0, started_ms: 0, pause_s: 0, fault: null,
};
const UPDATE = {
  phases: {}, fetched_bytes: 0, pause_s: 0, age_s: 0, is_ok: true, replica: "", region: "",
};

export class Hub {
  /** `readToken` gives the token of now or ""; `onHeard` is told whenever the hub says anything. */
  constructor({ readToken, onHeard }) {
    this.readToken = readToken;
    this.onHeard = onHeard;
    // The hub's clock less ours, by its answers' Date: ages are by its clock.
    this.skew_ms = 0;
  }

  async streams(signal) {
    return (await this.#read("v1/streams", {}, signal)).streams;
  }

  async status(stream, signal) {
    return this.#read(`v1/streams/${encodeURIComponent(stream)}`, {}, signal);
  }

  async versions(stream, limit, signal) {
    const path = `v1/streams/${encodeURIComponent(stream)}/versions`;
    return (await this.#read(path, { limit }, signal)).versions;
  }

  async updates(stream, limit, signal) {
    const path = `v1/streams/${encodeURIComponent(stream)}/updates`;
    const { updates } = await this.#read(path, { limit }, signal);
    return updates.map((update) => ({ ...UPDATE, ...update }));
  }

  /** All replicas and relays, page by page; what the hub left out as default is filled in. */
  async replicas(stream, signal) {
    const path = `v1/streams/${encodeURIComponent(stream)}/replicas`;
    const found = [];
    let after = null;
    do {
      const query = after === null ? { limit: PAGE_REPLICAS } : { limit: PAGE_REPLICAS, after };
      const page = await this.#read(path, query, signal);
      for (const one of page.replicas) found.push({ ...one, beat: { ...BEAT, ...one.beat } });
      after = page.next;
    } while (after !== null && after !== undefined && found.length < MAX_REPLICAS);
    return found;
  }

  /** Events as {name, data}, from the head on, until the line breaks (Away). */
  async *events(stream, signal) {
    const silence = new AbortController();
    let timer = 0;
    const rewind = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
    };
    rewind();
    try {
      const path = `v1/streams/${encodeURIComponent(stream)}/events`;
      const both = AbortSignal.any([signal, silence.signal]);
      const answer = await this.#fetch(path, {}, both, "text/event-stream");
      yield { name: "open", data: null };
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read().catch((error) => {
          throw new Away(String(error));
        });
        if (done) throw new Away("the hub ended the line");
        rewind();
        this.onHeard();
        const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
        rest = blocks.pop();
        if (rest.length > MAX_EVENT_CHARS) throw new Away("an event without an end");
        for (const block of blocks) {
          const event = parsed(block);
          if (event) yield event;
        }
      }
    } finally {
      clearTimeout(timer);
      silence.abort();
    }
  }

  async #read(path, query, signal) {
    const both = AbortSignal.any([signal, AbortSignal.timeout(REQUEST_TIMEOUT_MS)]);
    const answer = await this.#fetch(path, query, both, "application/json");
    try {
      return await answer.json();
    } catch (error) {
      throw new Away(String(error));
    }
  }

  async #fetch(path, query, signal, accept) {
    // Relative to the page: the hub may lie behind a path of a proxy.
    const url = new URL(path, document.baseURI);
    url.search = new URLSearchParams(query).toString();
    const headers = { Accept: accept };
    const token = this.readToken();
    if (token) headers.Authorization = `Bearer ${token}`;
    const options = { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
    let answer;
    try {
      answer = await fetch(url, options);
    } catch (error) {
      throw new Away(String(error));
    }
    if (answer.status === 401 || answer.status === 403) throw new Denied("not with this token");
    // A proxy in front answers so for a hub that is down.
    if ([502, 503, 504].includes(answer.status)) throw new Away("", answer.status);
    if (!answer.ok) throw new Refused(answer.status, (await answer.json().catch(() => ({}))).error);
    const date = Date.parse(answer.headers.get("Date") ?? "");
    // The header has whole seconds: half of one is its mean error.
    if (Number.isFinite(date)) this.skew_ms = date + 500 - Date.now();
    if (Math.abs(this.skew_ms) < 2000) this.skew_ms = 0;
    this.onHeard();
    return answer;
  }
}

function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (!data.length) return null;
  try {
    return { name, data: JSON.parse(data.join("\n")) };
  } catch {
    return null;
  }
}

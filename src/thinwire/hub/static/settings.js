// What the viewer chose. The token is kept for this tab only; the rest stays in the browser.

const PREFIX = "thinwire.";
const TOKEN = `${PREFIX}token`;

/** Dollars for a GB that leaves the bucket's region, as `thinwire plan` counts it. */
export const DEFAULT_PRICE = 0.02;

function read(store, key) {
  try {
    return store().getItem(key);
  } catch {
    // Storage may be forbidden: then nothing is remembered.
    return null;
  }
}

function write(store, key, value) {
  try {
    if (value === null) store().removeItem(key);
    else store().setItem(key, value);
  } catch {
    // As above.
  }
}

let tokenOfPage = read(() => sessionStorage, TOKEN) ?? "";

export function readToken() {
  return tokenOfPage;
}

export function writeToken(token) {
  tokenOfPage = token;
  write(() => sessionStorage, TOKEN, token || null);
}

function readNumber(key, fallback, low, high) {
  const value = Number.parseFloat(read(() => localStorage, PREFIX + key) ?? "");
  return value >= low && value <= high ? value : fallback;
}

/** Dollars for a GB; a nonsense value counts as the default. */
export function readPrice() {
  return readNumber("price", DEFAULT_PRICE, 0, 1000);
}

export function writePrice(price) {
  write(() => localStorage, `${PREFIX}price`, String(price));
}

/** From how many steps on a replica counts as stale; null: not chosen. */
export function readLimit() {
  return readNumber("limit", null, 0, 1e9);
}

export function writeLimit(limit) {
  write(() => localStorage, `${PREFIX}limit`, limit === null ? null : String(limit));
}

/** "light", "dark" or "auto": as the system has it. */
export function readTheme() {
  const theme = read(() => localStorage, `${PREFIX}theme`);
  return theme === "light" || theme === "dark" ? theme : "auto";
}

export function writeTheme(theme) {
  write(() => localStorage, `${PREFIX}theme`, theme === "auto" ? null : theme);
}

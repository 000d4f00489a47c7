// Numbers for people. All pure.

const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const COUNT_UNITS = ["", "k", "M", "G", "T", "P"];
const NONE = "–";
// Made once: a new one for each of a thousand replicas would be felt.
const WHOLE = new Intl.NumberFormat("en-US");

function significant(value) {
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

function scaled(value, units) {
  let power = 0;
  let left = value;
  // 999.5 would be shown as 1000 of the smaller unit.
  while (left >= 999.5 && power < units.length - 1) {
    left /= 1000;
    power += 1;
  }
  return [power === 0 ? String(Math.round(left)) : significant(left), units[power]];
}

/** 3145728 -> "3.15 MB"; powers of ten, as networks and bills count. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  return scaled(value, BYTE_UNITS).join(" ");
}

/** 1235814 -> "1.24 M". */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  return scaled(value, COUNT_UNITS).join(" ").trim();
}

/** 0.01834 -> "1.83 %". */
export function share(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const percent = value * 100;
  if (percent === 0 || percent === 100) return `${percent} %`;
  // What is almost everything, or almost nothing, must not read as all or none.
  if (percent > 99.99) return "> 99.99 %";
  if (percent < 0.0001) return "< 0.0001 %";
  const digits = percent >= 99 || percent < 10 ? 2 : 1;
  return `${percent < 0.01 ? percent.toPrecision(2) : percent.toFixed(digits)} %`;
}

/** Seconds, as short as they can be read: "0.31 s", "12 s", "2 m 14 s", "3 h 05 m", "2 d 4 h". */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${padded(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${padded(Math.floor(whole / 60) % 60)} m`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
}

function padded(value) {
  return String(value).padStart(2, "0");
}

/** The same without parts of a second, for what ticks. */
export function age(value) {
  if (value === null || value === undefined) return NONE;
  return value < 60 ? `${Math.floor(Math.max(0, value))} s` : seconds(value);
}

export function money(dollars) {
  if (!Number.isFinite(dollars)) return NONE;
  if (dollars > 0 && dollars < 0.01) return "< $0.01";
  const digits = dollars < 1000 ? 2 : 0;
  return dollars.toLocaleString("en-US", {
    style: "currency",
    currency: "USD",
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/** 1 -> "1 step", 3 -> "3 steps". */
export function several(number, word) {
  return `${whole(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** 12345 -> "12,345". */
export function whole(number) {
  return WHOLE.format(number);
}

/** A time of day; with the date where it is not today. */
export function moment(unix_ms, now_ms) {
  const date = new Date(unix_ms);
  const time = date.toLocaleTimeString([], { hourCycle: "h23" });
  if (date.toDateString() === new Date(now_ms).toDateString()) return time;
  const day = `${date.getFullYear()}-${padded(date.getMonth() + 1)}-${padded(date.getDate())}`;
  return `${day} ${time}`;
}

/** The value below which `portion` of the sorted numbers lie; null: there are none. */
export function quantile(sorted, portion) {
  if (!sorted.length) return null;
  return sorted[Math.max(0, Math.ceil(portion * sorted.length) - 1)];
}

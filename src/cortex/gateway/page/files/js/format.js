// Numbers, sizes and times as text. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  let amount = value;
  while (amount >= 1024 && unit < UNITS.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${amount >= 100 || unit === 0 ? Math.round(amount) : amount.toFixed(1)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.001) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.ceil(whole / 60); // a time that is left is never too short
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  const hours = Math.ceil(whole / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compactNumber = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value == null ? "–" : grouped.format(value));
export const compact = (value) => (value == null ? "–" : compactNumber.format(value));
export const rate = (value) => (value == null ? "–" : value >= 100 ? grouped.format(value) : value.toFixed(1));
export const percent = (value) => (value == null ? "–" : `${Math.round(value * 100)} %`);

/** Money without a currency, because the catalogue has none. */
export function money(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  if (value < 0.0001) return "< 0.0001";
  return value < 0.1 ? String(Number(value.toFixed(4))) : value.toFixed(2);
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
export const dayAndClock = (unix) =>
  new Date(unix * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
export const day = (unix) => new Date(unix * 1000).toISOString().slice(0, 10);

/** The reason of a model for a line that begins with its name. */
export const withoutName = (id, reason) => (reason.startsWith(`${id}: `) ? reason.slice(id.length + 2) : reason);
export const plural = (number, word, many = `${word}s`) => `${count(number)} ${number === 1 ? word : many}`;

const hues = new Map();

/** A colour of the palette. It stays the same for a name; no two names have the same while colours are left. */
export function hue(name) {
  let hash = 0;
  for (const character of name) hash = (hash * 31 + character.codePointAt(0)) >>> 0;
  if (name && !hues.has(name)) {
    const uses = Array(8).fill(0);
    for (const colour of hues.values()) uses[colour]++;
    while (uses[hash % 8] > Math.min(...uses)) hash++;
    hues.set(name, hash % 8);
  }
  return hues.get(name) ?? hash % 8;
}

/** The devices of each replica: `0, 1`, or `0+1, 2+3` where each is divided. */
export const deviceGroups = (replicas) => replicas.map((devices) => devices.join("+")).join(", ");

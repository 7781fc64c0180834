// Numbers for people: as the command line writes them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function formatBytes(count) {
  if (count === null || count === undefined) return "-";
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${Math.round(value)} B` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds === 0) return "0 us";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(1)} us`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(1)} s`;
}

export function formatCount(count, what) {
  return `${formatNumber(count)} ${what}${count === 1 ? "" : what.endsWith("x") ? "es" : "s"}`;
}

export function formatNumber(count) {
  return count.toLocaleString("en-US");
}

export function formatShape(shape) {
  return shape.length ? shape.join(" x ") : "scalar";
}

// A box as Python would slice it.
export function formatBox(starts, ends) {
  return `[${starts.map((start, d) => `${start}:${ends[d]}`).join(", ")}]`;
}

// Holders of a tile: replicas with commas, addends of a pending reduction with plus signs.
export function formatHolders(holders, most = 4) {
  const texts = holders.slice(0, most).map((ranks) => formatRanks(ranks, 3));
  return texts.join("+") + (holders.length > most ? `+… (${formatNumber(holders.length)})` : "");
}

// A list of ranks with runs, cut off where it gets long.
export function formatRanks(ranks, most = 8) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const texts = runs.slice(0, most).map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a},${b}` : `${a}-${b}`));
  return texts.join(",") + (runs.length > most ? `… (${ranks.length})` : "");
}

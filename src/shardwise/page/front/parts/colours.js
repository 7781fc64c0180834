// Colours that people with colour vision deficiencies can tell apart.
// Up to 8 things have the colours of Okabe and Ito; more have a ramp (viridis without its darkest end, which a dark page would
// swallow), ordered by lightness as well.

const NAMED = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c"];
const RAMP = [
  [71, 45, 123],
  [62, 74, 137],
  [49, 104, 142],
  [38, 130, 142],
  [31, 158, 137],
  [53, 183, 121],
  [109, 205, 89],
  [180, 222, 44],
  [253, 231, 37],
];
export const PARTS = {
  parameters: "#0072b2",
  gradients: "#e69f00",
  optimizer: "#009e73",
  activations: "#cc79a7",
  other: "#8c8c8c",
};

export function colourOf(index, count) {
  if (count <= NAMED.length) return NAMED[index % NAMED.length];
  return ramp(count > 1 ? index / (count - 1) : 0);
}

export function ramp(share) {
  const place = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const low = Math.min(RAMP.length - 2, Math.floor(place));
  const mixed = RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

export function rampImage() {
  return `linear-gradient(90deg, ${RAMP.map((_, i) => ramp(i / (RAMP.length - 1))).join(", ")})`;
}

export function channels(colour) {
  if (colour.startsWith("#")) return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return colour
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
}

// Black or white, whichever is easier to read on a colour.
export function inkOn(colour) {
  const [r, g, b] = channels(colour).map((value) => (value / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.24 ? "#10161d" : "#ffffff";
}

export function mix(a, b, share) {
  const [from, to] = [channels(a), channels(b)];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * share)).join(" ")})`;
}

// A colour of the style sheet: it differs between light and dark.
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

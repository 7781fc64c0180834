// What is under the pointer or the keyboard's cursor: beside it for the eye, in a live region for a screen reader.

import { element } from "./dom.js";

export function showTip(x, y, lines) {
  const tip = document.getElementById("tooltip");
  const [first, ...rest] = lines;
  tip.replaceChildren(element("strong", {}, first), ...rest.map((text) => element("span", {}, text)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 10))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18}px`;
}

export function hideTip() {
  document.getElementById("tooltip").hidden = true;
}

export function announce(text) {
  document.getElementById("status").textContent = text;
}

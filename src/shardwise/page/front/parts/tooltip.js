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

// Elements with `data-why` show it beside the pointer, and below them at the focus.
export function explainFigures(root) {
  const shown = (event) => event.target.closest?.("[data-why]");
  root.addEventListener("pointermove", (event) => {
    const asked = shown(event);
    if (asked) showTip(event.clientX, event.clientY, asked.dataset.why.split("\n"));
  });
  root.addEventListener("pointerout", (event) => {
    if (shown(event) && !event.relatedTarget?.closest?.("[data-why]")) hideTip();
  });
  root.addEventListener("focusin", (event) => {
    const asked = shown(event);
    if (!asked || !asked.matches(":focus-visible")) return;
    const place = asked.getBoundingClientRect();
    showTip(place.left, place.bottom - 14, asked.dataset.why.split("\n"));
  });
  root.addEventListener("focusout", hideTip);
}

export function announce(text) {
  document.getElementById("status").textContent = text;
}

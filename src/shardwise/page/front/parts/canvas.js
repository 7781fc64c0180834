// A canvas that is as sharp as the screen, is drawn again when its size or the colours change, and has a cursor.
//
// `draw(context, width, height)` paints. `find(x, y)` says what is at a point: an object with `lines`, or null. The
// keyboard moves by `step(key, shift)`, which returns such an object with the point `at` that it stands for.

import { element } from "./dom.js";
import { announce, hideTip, showTip } from "./tooltip.js";

const KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

export function createPlot({ label, height, draw, find, step, name }) {
  const canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": label, "data-name": name });
  const plot = { canvas, node: element("div", { class: "plot" }, canvas), found: null, width: 0, height: 0 };

  plot.redraw = () => {
    const width = Math.max(1, canvas.clientWidth);
    const wanted = typeof height === "function" ? height(width) : height;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${wanted}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(wanted * ratio);
    Object.assign(plot, { width, height: wanted });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const begin = performance.now();
    draw(context, width, wanted);
    canvas.dataset.redrawMs = (performance.now() - begin).toFixed(2);
  };

  const show = (found, x, y) => {
    const changed = found !== plot.found;
    plot.found = found;
    if (found) showTip(x, y, found.lines);
    else hideTip();
    if (changed) plot.redraw();
  };

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = find ? find(event.clientX - box.left, event.clientY - box.top) : null;
    const same = found && plot.found && found.key === plot.found.key;
    show(same ? plot.found : found, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
    if (!step || !KEYS.has(event.key)) return;
    event.preventDefault();
    const found = step(event.key, event.shiftKey);
    if (!found) return;
    const box = canvas.getBoundingClientRect();
    show(found, box.left + found.at[0], box.top + found.at[1]);
    announce(found.lines.join(", "));
  });

  new ResizeObserver(() => {
    if (canvas.clientWidth && canvas.clientWidth !== plot.width) plot.redraw();
  }).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  matchMedia("print").addEventListener("change", () => plot.redraw());
  return plot;
}

export function clipText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 0 ? `${text.slice(0, low)}…` : "";
}

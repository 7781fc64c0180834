// A picture of a layout with its controls: which dims, which slice, which colours, zoom, and one rank to look for.

import { choice, element, swatch } from "../parts/dom.js";
import { formatCount, formatNumber } from "../parts/format.js";
import { createModel, defaultView } from "./layout_model.js";
import { createPicture } from "./layout_picture.js";
import { colourChoices, colourLegend, rankClasses } from "./rank_colours.js";

export function createLayoutPanel(layout, { tallest = 460, name = "layout", compact = false } = {}) {
  const model = createModel(layout);
  const state = {
    layout,
    model,
    view: defaultView(layout, model),
    classes: rankClasses(layout, "rank"),
    chosenRank: null,
    zoom: { x: 0, y: 0, factor: 1 },
  };
  const picture = createPicture(state, { label: describe(layout), tallest, name });
  const sliders = element("div", { class: "sliders" });
  const below = element("div");

  const fill = () => {
    sliders.replaceChildren(...sliceSliders(state, picture));
    below.replaceChildren(colourLegend(state.classes, marks(layout)));
    picture.redraw();
  };
  const plain = compact && layout.shape.length <= 2;
  const controls = element(
    "div",
    { class: "controls" },
    ...(plain ? [] : dimChoices(state, fill)),
    colours(state, fill),
    compact ? null : rankField(state, picture),
    zoomButtons(picture, compact),
  );
  addDragging(picture, state);
  sliders.replaceChildren(...sliceSliders(state, picture));
  below.append(colourLegend(state.classes, marks(layout)));
  return {
    node: element("div", {}, controls, sliders, picture.node, below, plain ? dimNote(state.view) : null),
    picture,
    state,
  };
}

export function describe(layout) {
  const boxes = layout.regular
    ? layout.regular.cuts.reduce((n, dim) => n * dim.starts.length, 1)
    : layout.boxes.starts.length;
  return `A tensor of shape ${layout.shape.join(" by ") || "scalar"} in ${formatCount(boxes, "box")} on ${formatCount(layout.ranks.count, "rank")}. Arrow keys go from tile to tile.`;
}

export function axisChips(layout) {
  if (!layout.axes.length) return null;
  return element(
    "ul",
    { class: "chips", "aria-label": "Axes of the mesh" },
    ...layout.axes.map((axis) =>
      element("li", {}, element("b", {}, `${axis.name}=${formatNumber(axis.size)}`), ` ${axis.words}`),
    ),
  );
}

function dimNote(view) {
  return view.rows === null
    ? null
    : element("p", { class: "note" }, `dim ${view.rows} down, dim ${view.columns} across`);
}

function marks(layout) {
  const entries = [];
  const copies = layout.regular
    ? layout.regular.replicas > 1
    : layout.boxes.holders.some((holders) => holders[0].length > 1);
  const addends = layout.regular
    ? layout.regular.addends > 1
    : layout.boxes.holders.some((holders) => holders.length > 1);
  if (copies) entries.push([swatch(null, "bands"), "bands: replicas, 0,1"]);
  if (addends) entries.push([swatch(null, "hatch"), `hatched: addends of a pending ${layout.pending}, 0+1`]);
  if (layout.groups.length) entries.push([swatch(null, "dashed"), "border of a fused group"]);
  return entries;
}

function dimChoices(state, changed) {
  const { shape } = state.layout;
  if (shape.length < 2) return [];
  const options = shape.map((length, dim) => [String(dim), `dim ${dim} (${formatNumber(length)})`]);
  const put = (role, other) => (value) => {
    const dim = Number(value);
    if (state.view[other] === dim) state.view[other] = state.view[role];
    state.view[role] = dim;
    state.zoom = { x: 0, y: 0, factor: 1 };
    refresh();
    changed();
  };
  const down = choice("Down", options, String(state.view.rows), put("rows", "columns"));
  const across = choice("Across", options, String(state.view.columns), put("columns", "rows"));
  const refresh = () => {
    down.querySelector("select").value = String(state.view.rows);
    across.querySelector("select").value = String(state.view.columns);
  };
  return [down, across];
}

function colours(state, changed) {
  return choice("Colour", colourChoices(state.layout), "rank", (value) => {
    state.classes = rankClasses(state.layout, value);
    changed();
  });
}

function rankField(state, picture) {
  const input = element("input", {
    type: "number",
    min: "0",
    placeholder: "all",
    "data-name": "rank",
    oninput: () => {
      state.chosenRank = input.value === "" ? null : Number(input.value);
      picture.redraw();
    },
  });
  return element("label", {}, "Only rank", input);
}

function zoomButtons(picture, compact) {
  const button = (text, label, act) =>
    element("button", { type: "button", class: "act", "aria-label": label, onclick: act }, text);
  return element(
    "span",
    { class: compact ? "" : "push" },
    button("−", "Zoom out", () => picture.zoomAt(0.5)),
    " ",
    button("+", "Zoom in", () => picture.zoomAt(2)),
  );
}

function sliceSliders(state, picture) {
  const { shape } = state.layout;
  const others = shape
    .map((_, dim) => dim)
    .filter((dim) => dim !== state.view.rows && dim !== state.view.columns && shape[dim] > 1);
  return others.map((dim) => {
    const value = element("output", {}, sliceText(state, dim));
    const input = element("input", {
      type: "range",
      min: "0",
      max: String(shape[dim] - 1),
      value: String(state.view.at[dim]),
      "aria-label": `Slice of dim ${dim}`,
      "data-dim": String(dim),
      oninput: () => {
        state.view.at[dim] = Number(input.value);
        value.textContent = sliceText(state, dim);
        picture.redraw();
      },
    });
    return element("label", {}, element("span", {}, `Slice of dim ${dim} (${formatNumber(shape[dim])})`), input, value);
  });
}

function sliceText(state, dim) {
  return `index ${formatNumber(state.view.at[dim])}`;
}

// Drag to move a picture that is zoomed in; a double click, or the wheel with Ctrl, zooms.
function addDragging(picture, state) {
  const { canvas } = picture;
  let last = null;
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (state.zoom.factor > 1) last = [event.clientX, event.clientY];
  });
  addEventListener("pointerup", () => {
    last = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!last) return;
    picture.panBy(event.clientX - last[0], event.clientY - last[1]);
    last = [event.clientX, event.clientY];
  });
  canvas.addEventListener("dblclick", (event) => picture.zoomAt(2, ...share(event)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      picture.zoomAt(event.deltaY < 0 ? 1.25 : 0.8, ...share(event));
    },
    { passive: false },
  );
}

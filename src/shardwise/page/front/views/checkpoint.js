// The page of a checkpoint: its tensors, the layout of the chosen one, files, element types, and the balance over ranks.

import { ask } from "../parts/ask.js";
import { createBars } from "../parts/bars.js";
import { colourOf } from "../parts/colours.js";
import { card, element, figures, legend, swatch } from "../parts/dom.js";
import { formatBytes, formatCount, formatNumber, formatShape } from "../parts/format.js";
import { createTable } from "../parts/table.js";
import { announce } from "../parts/tooltip.js";
import { axisChips, createLayoutPanel } from "./layout_panel.js";

const SIDE_BY_SIDE = 240; // pixels of the longest layout, up to which the table leaves room for the picture

export function showCheckpoint(root, facts, { served }) {
  const tensors = facts.tensors.map(([name, dtype, shape, layout, bytes, files, picture], number) => ({
    name,
    dtype,
    shape,
    layout,
    bytes,
    files,
    picture,
    number,
  }));
  const detail = element("div", {}, element("p", { class: "empty" }, "Choose a tensor to see who holds what."));
  const wide = layoutWidth(facts);
  const long = wide > SIDE_BY_SIDE;
  const table = createTable({
    what: "tensor",
    least: `${570 + wide}px`,
    label: "Tensors",
    rows: tensors,
    columns: tensorColumns(facts),
    fold: { key: (t) => `${t.dtype} ${t.shape} ${t.layout} ${t.bytes}`, name: (t) => t.name },
    onchoose: (tensor) => showTensor(detail, tensor, facts, served),
  });
  root.append(
    figures(checkpointFigures(facts, tensors)),
    card("Tensors", "", { class: long ? "" : "wide", "data-card": "tensors" }, table.node),
    card("Layout", "", { class: long ? "half" : "narrow", "data-card": "layout", "aria-live": "polite" }, detail),
    element("div", { class: "half column" }, balanceCard(facts), typesCard(tensors)),
    filesCard(facts),
  );
  const first = tensors.find((tensor) => tensor.picture !== null);
  if (first) table.choose(first);
  const values = [...facts.values, ...facts.opaque.map((name) => [name, "(not plain data: not read)"])];
  if (values.length) root.append(valuesCard(values));
}

function tensorColumns(facts) {
  const fileNames = (tensor) => tensor.files.map((number) => facts.files[number][0]).join(" ");
  return [
    { title: "tensor", value: (t) => t.name, text: (t) => t.name, code: true },
    { title: "dtype", value: (t) => t.dtype, text: (t) => t.dtype, width: "70px" },
    {
      title: "shape",
      value: (t) => t.shape.reduce((a, b) => a * b, 1),
      text: (t) => formatShape(t.shape),
      width: "112px",
    },
    { title: "layout", value: (t) => t.layout || "", text: (t) => t.layout || "whole", code: true, width: `${layoutWidth(facts)}px` },
    { title: "bytes", kind: "number", value: (t) => t.bytes, text: (t) => formatBytes(t.bytes), width: "90px" },
    {
      title: "files",
      kind: "number",
      value: (t) => t.files.length,
      text: (t) => String(t.files.length),
      search: fileNames,
      width: "60px",
    },
  ];
}

// Layouts are shown whole, up to 80 letters; beyond, the card beside the table has them.
function layoutWidth(facts) {
  const longest = facts.tensors.reduce((most, [, , , layout]) => Math.max(most, (layout || "").length), 8);
  return Math.round(24 + 7.9 * Math.min(80, longest));
}

function checkpointFigures(facts, tensors) {
  const largest = tensors.reduce((most, tensor) => (!most || tensor.bytes > most.bytes ? tensor : most), null);
  const held = facts.ranks.map((row) => row[1]).filter((bytes) => bytes !== null);
  const mean = held.reduce((a, b) => a + b, 0) / (held.length || 1);
  const worst = held.reduce((a, b) => Math.max(a, b), 0);
  return [
    ["Format", facts.format, null, "words"],
    [
      "Tensors",
      formatNumber(tensors.length),
      formatBytes(facts.bytes),
      null,
      "The bytes of all tensors, each element once: the product of the shape and the bytes of an element.",
    ],
    [
      "Files",
      formatNumber(facts.files.length),
      formatBytes(facts.files.reduce((sum, file) => sum + file[1], 0)),
      null,
      "The lengths of the files: tensors and headers.",
    ],
    ["Largest tensor", largest ? formatBytes(largest.bytes) : "-", largest ? largest.name : ""],
    [
      "Fullest rank",
      held.length ? formatBytes(worst) : "-",
      held.length
        ? `${(worst / (mean || 1)).toFixed(2)} times the mean of ${formatCount(held.length, "rank")}`
        : "the format does not record it",
      null,
      "What each rank had in memory when it saved, copies included; the mean is over ranks.",
    ],
    [
      "Values",
      formatNumber(facts.values.length + facts.opaque.length),
      facts.opaque.length ? `${facts.opaque.length} not read` : "",
    ],
  ];
}

async function showTensor(detail, tensor, facts, served) {
  const head = element(
    "p",
    { class: "note" },
    element("strong", {}, tensor.name),
    ` ${tensor.dtype}, ${formatShape(tensor.shape)}, ${formatBytes(tensor.bytes)}`,
    tensor.layout ? element("code", { class: "whole" }, tensor.layout) : null,
  );
  const files = element(
    "p",
    { class: "note" },
    `in ${tensor.files
      .slice(0, 3)
      .map((n) => facts.files[n][0])
      .join(", ")}${tensor.files.length > 3 ? ` and ${formatCount(tensor.files.length - 3, "more file")}` : ""}`,
  );
  let picture = tensor.picture === null ? null : facts.pictures[tensor.picture];
  if (!picture && tensor.layout && served) {
    try {
      picture = (await ask({ tensor: tensor.number })).picture;
    } catch (problem) {
      announce(problem.message);
    }
  }
  const itemsize =
    tensor.bytes /
    Math.max(
      1,
      tensor.shape.reduce((a, b) => a * b, 1),
    );
  const missing = tensor.layout
    ? "Its layout is not part of this file; serve the page to see it."
    : "It is stored whole.";
  const shown = picture
    ? [
        axisChips(picture),
        createLayoutPanel({ ...picture, itemsize }, { tallest: 300, name: "tensor", compact: true }).node,
      ]
    : [element("p", { class: "empty" }, missing)];
  detail.replaceChildren(head, files, ...shown.filter(Boolean));
}

function balanceCard(facts) {
  const ranks = facts.ranks;
  if (!ranks.length)
    return card(
      "Balance over ranks",
      "",
      {},
      element("p", { class: "empty" }, "This format does not record which rank had what."),
    );
  const colours = ["#0072b2", "#e69f00"];
  const series = [
    ["held", 1],
    ["written", 2],
  ]
    .filter(([, at]) => ranks.some((row) => row[at] !== null))
    .map(([title, at], i) => ({ title, values: ranks.map((row) => row[at] ?? 0), colour: colours[i] }));
  const bars = createBars({
    label: `Bytes that each of ${formatCount(ranks.length, "rank")} held and wrote`,
    name: "balance",
    numbers: ranks.map((row) => row[0]),
    series,
  });
  const entries = series.map((one) => [
    swatch(one.colour),
    one.title === "held" ? "held in memory, copies included" : "written to files",
  ]);
  return card("Balance over ranks", "", { "data-card": "balance" }, bars.node, legend(entries));
}

function typesCard(tensors) {
  const totals = new Map();
  for (const tensor of tensors) {
    const [count, bytes] = totals.get(tensor.dtype) || [0, 0];
    totals.set(tensor.dtype, [count + 1, bytes + tensor.bytes]);
  }
  const rows = [...totals]
    .map(([dtype, [count, bytes]]) => ({ dtype, count, bytes }))
    .sort((a, b) => b.bytes - a.bytes);
  const all = rows.reduce((sum, row) => sum + row.bytes, 0) || 1;
  const track = element(
    "div",
    { class: "track", "aria-hidden": "true" },
    ...rows.map((row, i) =>
      element("span", { style: { width: `${(100 * row.bytes) / all}%`, background: colourOf(i, rows.length) } }),
    ),
  );
  const entries = rows.map((row, i) => [
    swatch(colourOf(i, rows.length)),
    `${row.dtype}: ${formatBytes(row.bytes)} in ${formatCount(row.count, "tensor")}`,
  ]);
  return card(
    "Element types",
    "",
    { "data-card": "types" },
    element("div", { class: "stack" }, track),
    legend(entries),
  );
}

function filesCard(facts) {
  const table = createTable({
    what: "file",
    label: "Files",
    height: 240,
    rows: facts.files,
    columns: [
      { title: "file", value: (file) => file[0], text: (file) => file[0], code: true, width: "56%" },
      { title: "bytes", kind: "number", value: (file) => file[1], text: (file) => formatBytes(file[1]) },
      { title: "tensors", kind: "number", value: (file) => file[2], text: (file) => formatNumber(file[2]) },
    ],
  });
  return card("Files", "", { class: "half", "data-card": "files" }, table.node);
}

function valuesCard(values) {
  const table = createTable({
    what: "value",
    label: "Values",
    height: 240,
    rows: values,
    columns: [
      { title: "name", value: (row) => row[0], text: (row) => row[0], code: true, width: "40%" },
      { title: "value", value: (row) => row[1], text: (row) => row[1], code: true },
    ],
  });
  return card("Values", "", { "data-card": "values" }, table.node);
}

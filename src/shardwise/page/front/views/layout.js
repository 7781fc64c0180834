// The page of a layout: the picture, the axes in words, and what each rank holds.

import { card, element, figures } from "../parts/dom.js";
import { createBars, largest } from "../parts/bars.js";
import { createForm } from "../parts/form.js";
import { formatBytes, formatCount, formatNumber, formatShape } from "../parts/format.js";
import { createTable } from "../parts/table.js";
import { axisChips, createLayoutPanel } from "./layout_panel.js";

export function showLayout(root, facts, { served, show }) {
  const panel = createLayoutPanel(facts, { tallest: 540 });
  const form = createForm({
    label: "The layout in the notation",
    button: "Draw",
    onanswer: show,
    fields: [
      { name: "notation", label: "Layout", value: facts.notation, kind: "code" },
      { name: "ranks_per_host", label: "Ranks per host", value: String(facts.ranks_per_host), kind: "number" },
    ],
  });
  const bytes = facts.ranks.elements.map((count) => count * facts.itemsize);
  root.append(
    ...(served ? [form.node] : []),
    figures(layoutFigures(facts, bytes)),
    card("Who holds what", shownNote(facts), { class: "wide", "data-card": "picture" }, axisChips(facts), panel.node),
    card(
      "Bytes per rank",
      balanceNote(bytes),
      { class: "narrow", "data-card": "ranks" },
      ...rankParts(facts, bytes, panel),
    ),
  );
}

function layoutFigures(facts, bytes) {
  const held = bytes.reduce((sum, value) => sum + value, 0);
  const copies = facts.bytes ? held / facts.bytes : 0;
  return [
    [
      "Tensor",
      formatBytes(facts.bytes),
      `${facts.dtype}, ${formatShape(facts.shape)}`,
      null,
      `${facts.shape.join(" × ") || 1} elements of ${facts.itemsize} bytes.`,
    ],
    [
      "Ranks",
      formatNumber(facts.ranks.count),
      formatCount(Math.ceil(facts.ranks.count / facts.ranks_per_host), "host"),
    ],
    [
      "Held in all",
      formatBytes(held),
      copies > 1 ? `${copies.toFixed(copies < 10 ? 1 : 0)} times the tensor` : "every element once",
      null,
      "The bytes of all local tensors of all ranks; replicas and addends count each time.",
    ],
    [
      "Largest rank",
      formatBytes(largest(bytes)),
      facts.bytes ? `${((100 * largest(bytes)) / facts.bytes).toPrecision(3)} % of the tensor` : "",
      null,
      "The most that one rank holds: elements of its boxes times the bytes of an element.",
    ],
    [
      "Pending",
      facts.pending || "nothing",
      facts.pending ? "values are incomplete until it is reduced" : "values are complete",
      "words",
    ],
  ];
}

function shownNote(facts) {
  const merged = facts.regular && facts.regular.merged.some((step) => step > 1);
  if (merged) return "Neighbouring boxes are merged where they are too many to draw.";
  if (facts.boxes && facts.boxes.hidden) return `${formatCount(facts.boxes.hidden, "more box")} are not drawn.`;
  return "Each dim is to scale.";
}

function balanceNote(bytes) {
  const [low, high] = [bytes.reduce((a, b) => Math.min(a, b), Infinity), largest(bytes)];
  if (!bytes.length) return "No rank holds anything.";
  return low === high ? `${formatBytes(high)} on every rank.` : `From ${formatBytes(low)} to ${formatBytes(high)}.`;
}

function rankParts(facts, bytes, panel) {
  if (!bytes.length) return [element("p", { class: "empty" }, "No rank holds a piece of this tensor.")];
  const { numbers, elements } = facts.ranks;
  const rows = elements.map((count, i) => ({ rank: numbers ? numbers[i] : i, elements: count, bytes: bytes[i] }));
  const bars = createBars({
    label: `Bytes on each of ${formatCount(bytes.length, "rank")}`,
    numbers,
    name: "rank-bytes",
    series: [{ title: "holds", values: bytes, colour: "#0072b2" }],
  });
  const table = createTable({
    what: "rank",
    label: "Bytes of each rank",
    height: 260,
    rows,
    columns: [
      { title: "rank", kind: "number", value: (row) => row.rank, text: (row) => String(row.rank) },
      {
        title: "host",
        kind: "number",
        value: (row) => row.rank,
        text: (row) => String(Math.floor(row.rank / facts.ranks_per_host)),
      },
      { title: "elements", kind: "number", value: (row) => row.elements, text: (row) => formatNumber(row.elements) },
      { title: "bytes", kind: "number", value: (row) => row.bytes, text: (row) => formatBytes(row.bytes) },
    ],
    onchoose: (row) => {
      panel.state.chosenRank = row.rank;
      panel.node.querySelector("[data-name=rank]").value = String(row.rank);
      panel.picture.redraw();
    },
  });
  return [bars.node, element("details", {}, element("summary", {}, "As a table"), table.node)];
}

// The page of a recorded step: a timeline of operators, moves and waiting for each rank, and where the time went.

import { createBars } from "../parts/bars.js";
import { card, element, figures, legend, swatch } from "../parts/dom.js";
import { formatBytes, formatCount, formatNumber, formatSeconds } from "../parts/format.js";
import { createTable } from "../parts/table.js";
import { createTimeline } from "./timeline.js";

const COLOURS = { operator: "#0072b2", move: "#e69f00", wait: "#b9474e", other: "#8c8c8c" };
const WORDS = { operator: "operators", move: "moving", wait: "waiting for others", other: "other" };
const MOST_RANKS = 32;

export function showStep(root, facts) {
  if (!facts.count) {
    root.append(card("No events", "", {}, element("p", { class: "empty" }, "The trace has no events.")));
    return;
  }
  root.append(figures(stepFigures(facts)), timelineCard(facts), ranksCard(facts), whatCard(facts));
}

function shares(facts) {
  const sums = {};
  for (const [kind, values] of Object.entries(facts.by_rank)) sums[kind] = values.reduce((a, b) => a + b, 0);
  return sums;
}

function stepFigures(facts) {
  const sums = shares(facts);
  const all = facts.seconds * 1e6 * facts.ranks.length || 1;
  const bytes = facts.kinds.reduce((sum, kind, i) => sum + (kind[1] === "move" ? kind[2] * facts.totals[i][0] : 0), 0);
  const part = (kind) => `${((100 * (sums[kind] || 0)) / all).toFixed(1)} %`;
  return [
    ["Step", formatSeconds(facts.seconds), `on ${formatCount(facts.ranks.length, "rank")}`],
    ["Operators", part("operator"), "of the time of all ranks"],
    ["Moving", part("move"), `${formatBytes(bytes)} in all`],
    ["Waiting", part("wait"), "for other ranks"],
    [
      "Outside of events",
      `${Math.max(0, 100 - (100 * Object.values(sums).reduce((a, b) => a + b, 0)) / all).toFixed(1)} %`,
      "of the time of all ranks",
    ],
    [
      "Events",
      formatNumber(facts.count),
      facts.whats.length < facts.count ? `the ${formatNumber(facts.whats.length)} longest are drawn` : "all are drawn",
    ],
  ];
}

function timelineCard(facts) {
  const rows = facts.ranks.map(() => []);
  facts.places.forEach((place, i) =>
    rows[place].push({
      start: facts.starts[i],
      duration: facts.durations[i],
      lane: facts.lanes[i],
      what: facts.whats[i],
    }),
  );
  const state = { zoom: 1, from: 0, first: 0, most: MOST_RANKS };
  const plot = createTimeline({ facts, rows, colours: COLOURS, state });
  const button = (text, label, act) =>
    element("button", { type: "button", class: "act", "aria-label": label, onclick: act }, text);
  const first = element("input", {
    type: "number",
    min: "0",
    max: String(rows.length - 1),
    value: "0",
    oninput: () => {
      state.first = Math.min(Math.max(0, rows.length - 1), Math.max(0, Number(first.value)));
      plot.redraw();
    },
  });
  const many = rows.length > MOST_RANKS ? element("label", {}, "Ranks from number", first) : null;
  const zoom = element(
    "span",
    { class: "push" },
    button("−", "Zoom out", () => plot.zoomBy(0.5)),
    " ",
    button("+", "Zoom in", () => plot.zoomBy(2)),
    " ",
    button("←", "Earlier", () => plot.panBy(200)),
    " ",
    button("→", "Later", () => plot.panBy(-200)),
  );
  addDragging(plot);
  const used = Object.keys(COLOURS).filter((kind) => facts.by_rank[kind]);
  const entries = used.map((kind) => [swatch(COLOURS[kind]), WORDS[kind]]);
  return card(
    "Timeline",
    "Drag to move, double click to zoom.",
    { "data-card": "timeline" },
    element("div", { class: "controls" }, many, zoom),
    plot.node,
    legend(entries),
  );
}

function addDragging(plot) {
  let last = null;
  plot.canvas.addEventListener("pointerdown", (event) => {
    last = event.clientX;
  });
  addEventListener("pointerup", () => {
    last = null;
  });
  plot.canvas.addEventListener("pointermove", (event) => {
    if (last === null) return;
    plot.panBy(event.clientX - last);
    last = event.clientX;
  });
  plot.canvas.addEventListener("dblclick", (event) => {
    const box = plot.canvas.getBoundingClientRect();
    plot.zoomBy(2, (event.clientX - box.left) / box.width);
  });
  plot.canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = plot.canvas.getBoundingClientRect();
      plot.zoomBy(event.deltaY < 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    },
    { passive: false },
  );
}

function ranksCard(facts) {
  const used = Object.keys(COLOURS).filter((kind) => facts.by_rank[kind]);
  const series = used.map((kind) => ({ title: WORDS[kind], values: facts.by_rank[kind], colour: COLOURS[kind] }));
  const bars = createBars({
    label: "Time of each rank by kind",
    name: "step-ranks",
    numbers: facts.ranks,
    series,
    stacked: true,
    format: (value) => formatSeconds(value / 1e6),
  });
  return card(
    "Time of each rank",
    "A moment counts for what began last: a move inside an operator is moving.",
    { "data-card": "ranks" },
    bars.node,
    legend(series.map((one) => [swatch(one.colour), one.title])),
  );
}

function whatCard(facts) {
  const rows = facts.kinds.map(([name, kind, bytes, source, layouts], i) => ({
    name,
    kind,
    bytes,
    source,
    layouts,
    count: facts.totals[i][0],
    time: facts.totals[i][1],
    longest: facts.totals[i][2],
  }));
  const table = createTable({
    what: "row",
    label: "Where the time went",
    rows,
    sorted: [5, true],
    columns: [
      { title: "what", value: (r) => r.name, text: (r) => r.name, code: true, width: "19%" },
      { title: "kind", value: (r) => r.kind, text: (r) => r.kind, width: "8%" },
      { title: "line", value: (r) => r.source, text: (r) => r.source || "-", code: true, width: "20%" },
      { title: "layouts", value: (r) => r.layouts, text: (r) => r.layouts || "-", code: true, width: "23%" },
      { title: "times", kind: "number", value: (r) => r.count, text: (r) => formatNumber(r.count), width: "7%" },
      { title: "in all", kind: "number", value: (r) => r.time, text: (r) => formatSeconds(r.time / 1e6), width: "8%" },
      {
        title: "longest",
        kind: "number",
        value: (r) => r.longest,
        text: (r) => formatSeconds(r.longest / 1e6),
        width: "8%",
      },
      {
        title: "bytes",
        kind: "number",
        value: (r) => r.bytes * r.count,
        text: (r) => (r.bytes ? formatBytes(r.bytes * r.count) : "-"),
        width: "7%",
      },
    ],
  });
  return card("Where the time went", "Of all ranks together.", { "data-card": "what" }, table.node);
}

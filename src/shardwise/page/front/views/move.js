// The page of a move: figures, the animation, who sends to whom, bytes by rank against the lower bound.

import { ask } from "../parts/ask.js";
import { createBars } from "../parts/bars.js";
import { card, element, figures, legend, swatch } from "../parts/dom.js";
import { createForm } from "../parts/form.js";
import { formatBytes, formatCount, formatNumber, formatSeconds } from "../parts/format.js";
import { createTable } from "../parts/table.js";
import { announce } from "../parts/tooltip.js";
import { axisChips, createLayoutPanel } from "./layout_panel.js";
import { createLanes } from "./lanes.js";
import { canZoom, createMatrix, cutMatrix } from "./matrix.js";

const SENT = "#e69f00";
const RECEIVED = "#0072b2";

export function showMove(root, facts, { served, show }) {
  const form = createForm({
    label: "The two layouts",
    button: "Plan",
    onanswer: show,
    fields: [
      { name: "source", label: "From", value: facts.from.notation, kind: "code" },
      { name: "target", label: "To", value: facts.to.notation, kind: "code" },
      {
        name: "topology",
        label: "Ranks per host : bandwidth in : between",
        value: topologyText(facts.topology),
        kind: "text",
      },
      {
        name: "buffer",
        label: "Buffer limit",
        value: facts.figures.max_buffer_bytes ? `${facts.figures.max_buffer_bytes}` : "",
        kind: "text",
        placeholder: "none, or 64MB",
      },
    ],
  });
  root.append(
    ...(served ? [form.node] : []),
    figures(moveFigures(facts)),
    lanesCard(facts, served, form),
    matrixCard(facts, served, form),
    element("div", { class: "half column" }, ranksCard(facts), wordsCard(facts)),
    layoutCard("Before", facts.from, "before"),
    layoutCard("After", facts.to, "after"),
  );
}

function topologyText({ ranks_per_host: count, within, between }) {
  return [count, ...[within, between].map(({ bandwidth }) => `${bandwidth / 1e9}GB`)].join(":");
}

function moveFigures({ figures: numbers, matrix, topology }) {
  const met = numbers.moved_bytes === numbers.lower_bound_bytes;
  const rank = (entry) => (entry ? `rank ${formatNumber(entry[0])}` : "nothing is sent");
  const link = matrix.busiest_link;
  const within = topology.within.bandwidth;
  const between = topology.between.bandwidth;
  return [
    [
      "Moved",
      formatBytes(numbers.moved_bytes),
      met ? "the lower bound: no plan moves less" : `lower bound ${formatBytes(numbers.lower_bound_bytes)}`,
      null,
      "The bytes that leave a rank, summed over ranks.\nLower bound: for each rank, what it needs and does not hold, counted in boxes of the tensor.",
    ],
    [
      "Copied within ranks",
      formatBytes(numbers.copied_bytes),
      null,
      null,
      "What a rank needs and holds already: it goes from one local tensor to another.",
    ],
    [
      "Between hosts",
      formatBytes(numbers.bytes_between_hosts),
      numbers.lower_bound_between_hosts === null
        ? "not counted for so many ranks"
        : `lower bound ${formatBytes(numbers.lower_bound_between_hosts)}`,
      null,
      "The bytes whose sender and receiver are on different hosts.\nLower bound: what a host needs and none of its ranks holds, once for each host.",
    ],
    [
      "Estimate",
      formatSeconds(numbers.estimate_seconds),
      `${formatBytes(within)}/s in a host, ${formatBytes(between)}/s between`,
      null,
      "For each round: the latency of a message, and the bytes of the busiest port over the bandwidth of its links.\nA move that is one collective is priced as that collective.",
    ],
    [
      "Rounds",
      formatNumber(numbers.rounds),
      numbers.max_buffer_bytes ? `at most ${formatBytes(numbers.max_buffer_bytes)} in flight` : "no buffer limit",
    ],
    [
      "Busiest sender",
      numbers.busiest_sender ? formatBytes(numbers.busiest_sender[1]) : "-",
      rank(numbers.busiest_sender),
      null,
      "The most bytes that one rank sends to all others together.",
    ],
    [
      "Busiest link",
      link ? formatBytes(link[2]) : "-",
      link
        ? `rank ${formatNumber(link[0])} to ${formatNumber(link[1])}${matrix.sampled ? ", of those shown" : ""}`
        : "nothing is sent",
    ],
    ["Collective", numbers.collective || "plain exchange", null, "words"],
  ];
}

function wordsCard(facts) {
  const lines = facts.explain.map((line) => element("li", {}, line.replace(/^\d+\. /, "")));
  return card("In words", "", {}, element("ol", { class: "told" }, ...lines));
}

function lanesCard(facts, served, form) {
  const { lanes } = facts;
  const holder = element("div");
  const put = (shown) => holder.replaceChildren(createLanes(shown, facts.from.itemsize).node);
  put(lanes);
  const all = lanes.ranks.length === lanes.count;
  const note = lanes.labels
    ? `${formatNumber(lanes.count)} ranks in blocks of ${formatCount(lanes.hosts, "host")}: what the ranks of a block hold together, and what goes between blocks.`
    : all
      ? "Boxes leave their sender, in its colour, and fill their receiver."
      : `${lanes.ranks.length} of ${formatNumber(lanes.count)} ranks are shown, and the boxes between them.`;
  const more = all || !served ? null : firstRankField(facts, form, (answer) => put(answer.lanes));
  return card("The move, round by round", note, { "data-card": "lanes" }, more, holder);
}

function firstRankField(facts, form, onanswer) {
  const input = element("input", {
    type: "number",
    min: "0",
    max: String(facts.lanes.count - 1),
    value: String(facts.lanes.first),
    onchange: async () => {
      try {
        onanswer(await ask({ ...form.read(), animated: Number(input.value) }));
      } catch (problem) {
        announce(problem.message);
      }
    },
  });
  const words = facts.lanes.labels ? "Show single ranks, from number" : "Ranks from number";
  return element("div", { class: "controls" }, element("label", {}, words, input));
}

function matrixCard(facts, served, form) {
  const holder = element("div");
  const back = element(
    "button",
    { type: "button", class: "act", hidden: true, onclick: () => put(facts.matrix) },
    "Show all ranks",
  );
  const numbers = facts.by_rank.numbers;
  const put = (matrix) => {
    const focused = holder.contains(document.activeElement);
    const { node, plot } = createMatrix(matrix, numbers, canZoom(matrix, served) ? zoom : null);
    back.hidden = matrix === facts.matrix;
    holder.replaceChildren(node);
    if (focused) plot.canvas.focus();
  };
  const zoom = async (window) => {
    try {
      put(served ? (await ask({ ...form.read(), ...window })).matrix : cutMatrix(facts.matrix, window));
    } catch (problem) {
      announce(problem.message);
    }
  };
  put(facts.matrix);
  const { rows, count, sampled } = facts.matrix;
  let note = "Bytes from rank to rank.";
  if (rows[2] > 1)
    note = `${formatNumber(count)} ranks, ${formatNumber(rows[2])} in a cell${sampled ? "; a row is one of its senders" : ""}.${canZoom(facts.matrix, served) ? " Click to look closer." : ""}`;
  return card("Who sends to whom", note, { class: "half", "data-card": "matrix" }, holder, back);
}

function ranksCard(facts) {
  const { sent, received, bound, numbers } = facts.by_rank;
  if (!facts.figures.moved_bytes)
    return card(
      "Bytes per rank",
      "",
      {},
      element("p", { class: "empty" }, "Nothing is sent: every rank has what it needs."),
    );
  const bars = createBars({
    label: `Bytes that each of ${formatCount(sent.length, "rank")} sends and receives`,
    name: "move-bytes",
    numbers,
    bound,
    series: [
      { title: "receives", values: received, colour: RECEIVED },
      { title: "sends", values: sent, colour: SENT },
    ],
  });
  const entries = [
    [swatch(RECEIVED), "received"],
    [swatch(SENT), "sent"],
  ];
  if (bound) entries.push([swatch(null, "bound"), "lower bound of what it must receive: needed and not held"]);
  return card(
    "Bytes per rank",
    `In all ${formatBytes(facts.figures.moved_bytes)}, lower bound ${formatBytes(facts.figures.lower_bound_bytes)}.`,
    { "data-card": "ranks" },
    bars.node,
    legend(entries),
    element("details", {}, element("summary", {}, "As a table"), ranksTable(facts.by_rank).node),
  );
}

function ranksTable({ sent, received, bound, numbers }) {
  const rows = sent.map((_, i) => ({
    rank: numbers ? numbers[i] : i,
    sent: sent[i],
    received: received[i],
    bound: bound ? bound[i] : null,
  }));
  const bytes = (title) => ({
    title,
    kind: "number",
    value: (row) => row[title],
    text: (row) => formatBytes(row[title]),
  });
  const columns = [
    { title: "rank", kind: "number", value: (row) => row.rank, text: (row) => String(row.rank) },
    bytes("received"),
    bytes("sent"),
    ...(bound ? [bytes("bound")] : []),
  ];
  return createTable({ what: "rank", label: "Bytes of each rank", height: 240, rows, columns });
}

function layoutCard(title, layout, name) {
  const panel = createLayoutPanel(layout, { tallest: 320, name, compact: true });
  return card(title, "", { class: "half", "data-card": name }, axisChips(layout), panel.node);
}
